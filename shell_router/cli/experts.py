"""`shell-router experts`: record, place, report, watch; and profile."""

# ruff: noqa: PLC0415 - see the package's docstring

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from shell_router.cli.arguments import Commands, names, positive
from shell_router.cli.pool_profile import add_profile
from shell_router.cli.running import run
from shell_router.errors import ConfigError

if TYPE_CHECKING:
    from shell_router.placement import PlacementSettings

ALGORITHMS = ("swap", "layerwise", "gimbal", "milp", "eplb", "contiguous")
"""The keys of `placement.ALGORITHMS`, which would have to be imported for `--help`."""
QUICK = ("contiguous", "eplb", "gimbal", "swap")


def add_commands(commands: Commands) -> None:
    """What these commands take."""
    experts = commands.add_parser("experts", help="place a model's experts on GPUs; profile a pool of experts")
    parts = experts.add_subparsers(required=True, metavar="COMMAND")
    _add_record(parts.add_parser("record", help="have an engine record which experts its tokens choose"))
    _add_place(parts.add_parser("place", help="write the placement that SGLang loads with --init-expert-location"))
    _add_report(parts.add_parser("report", help="compare placements on a record"))
    _add_watch(parts.add_parser("watch", help="record, place and write the file again and again"))
    add_profile(parts.add_parser("profile", help="measure what a pool's experts cost, and split its memory"))


def _add_record(record: argparse.ArgumentParser) -> None:
    _add_engine(record)
    record.add_argument("--out", type=Path, required=True, metavar="FILE", help="the record, as NumPy's .npz")
    what = record.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompts", type=Path, metavar="FILE", help='ask these: JSONL, one {"question": …} per line')
    what.add_argument("--seconds", type=float, metavar="S", help="ask nothing, and record for S seconds what it serves")
    record.add_argument("--new-tokens", type=positive, default=64, help="tokens that each answer has (default 64)")
    record.add_argument("--concurrency", type=positive, default=8, help="prompts at once (default 8)")
    record.set_defaults(command=_record)


def _add_engine(command: argparse.ArgumentParser) -> None:
    command.add_argument("url", metavar="URL", help="an SGLang server that records experts")
    command.add_argument("--api-key-env", metavar="NAME", help="the environment variable that holds its key")
    command.add_argument("--timeout-s", type=float, default=600.0, help="limit for one request (default 600)")


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--gpus", type=positive, required=True, metavar="N", help="expert-parallel size")
    command.add_argument("--slack", type=float, default=0.0, help="load that a GPU may have above the mean (default 0)")
    command.add_argument("--anchor-gpu", type=int, default=0, help="gimbal: where related experts go (default 0)")
    command.add_argument("--affinity-pairs", type=int, default=8, help="gimbal: such pairs per layer (default 8)")
    command.add_argument("--one-partition", action="store_true", help="gimbal, milp: place all layers alike")
    command.add_argument("--alpha", type=float, default=1.0, help="milp: weight of the imbalance (default 1)")
    command.add_argument("--beta", type=float, default=1.0, help="milp: weight of the traffic (default 1)")
    command.add_argument("--limit-s", type=float, default=60.0, help="longest run of a solver (default 60)")


def _settings(chosen: argparse.Namespace) -> "PlacementSettings":
    from shell_router.placement import PlacementSettings

    names = ("gpus", "slack", "anchor_gpu", "affinity_pairs", "one_partition", "alpha", "beta", "limit_s")
    try:
        return PlacementSettings(**{name: getattr(chosen, name) for name in names})
    except ValueError as error:
        raise ConfigError(f"{error}.", remedy="Correct the option of that name.") from error


def _add_place(place: argparse.ArgumentParser) -> None:
    place.add_argument("record", type=Path, metavar="RECORD", help="what `experts record` wrote")
    place.add_argument("--algorithm", choices=ALGORITHMS, default=ALGORITHMS[0], help="how (default swap)")
    place.add_argument("--out", type=Path, required=True, metavar="FILE", help="the placement, as SGLang's JSON")
    _add_settings(place)
    place.set_defaults(command=_place)


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument("record", type=Path, metavar="RECORD", help="what `experts record` wrote")
    report.add_argument("placements", type=Path, nargs="*", metavar="PLACEMENT", help="files of placements")
    report.add_argument(
        "--algorithms", type=names, default=QUICK, help=f"compare these (default {','.join(QUICK)}), or all: all"
    )
    report.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    _add_settings(report)
    report.set_defaults(command=_report)


def _add_watch(watch: argparse.ArgumentParser) -> None:
    _add_engine(watch)
    watch.add_argument("--out", type=Path, required=True, metavar="FILE", help="the placement, as SGLang's JSON")
    watch.add_argument("--every-s", type=float, default=600.0, metavar="S", help="record for so long (default 600)")
    watch.add_argument("--rounds", type=positive, metavar="N", help="stop after so many (default: never)")
    watch.add_argument("--margin", type=float, default=0.05, help="gain that is worth a restart (default 0.05)")
    watch.add_argument("--algorithm", choices=ALGORITHMS, default=ALGORITHMS[0], help="how (default swap)")
    _add_settings(watch)
    watch.set_defaults(command=_watch)


def _record(chosen: argparse.Namespace) -> int:
    from shell_router.cli.expert_work import record

    return run(record(chosen))


def _place(chosen: argparse.Namespace) -> int:
    from shell_router.cli.expert_work import place

    place(chosen, _settings(chosen))
    return 0


def _report(chosen: argparse.Namespace) -> int:
    from shell_router.cli.expert_work import report

    report(chosen, _settings(chosen))
    return 0


def _watch(chosen: argparse.Namespace) -> int:
    from shell_router.cli.expert_work import watch

    return run(watch(chosen, _settings(chosen)))
