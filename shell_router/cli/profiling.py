"""`shell-router profile`."""

# ruff: noqa: PLC0415 - see the package's docstring

import argparse
from datetime import UTC, datetime
from pathlib import Path

from shell_router.cli.arguments import Commands, names, positive, whole_numbers
from shell_router.cli.running import run

LENGTHS, BATCHES = (32, 128, 512, 1024, 2048), (1, 2, 4, 8, 16)


def add_commands(commands: Commands) -> None:
    """What `profile` takes."""
    command = commands.add_parser("profile", help="measure what a deployment's engines cost, for `simulate`")
    command.add_argument("config", type=Path, metavar="CONFIG", help="the deployment's YAML file")
    command.add_argument("--out", type=Path, required=True, metavar="FILE", help="profiles, as YAML; others in it stay")
    command.add_argument("--models", type=names, default=(), help="measure only these: small,large (default: all)")
    command.add_argument("--rounds", type=positive, default=5, help="medians of so many rounds (default 5)")
    command.add_argument(
        "--lengths", type=whole_numbers, default=LENGTHS, help=f"prompts' tokens (default {_listed(LENGTHS)})"
    )
    command.add_argument(
        "--batches", type=whole_numbers, default=BATCHES, help=f"sequences at once (default {_listed(BATCHES)})"
    )
    command.add_argument("--new-tokens", type=positive, default=64, help="tokens that each of them writes (default 64)")
    command.add_argument("--chunk-tokens", type=positive, help="new tokens that a pass holds (default: SGLang's 8192)")
    command.add_argument("--prompts-per-pass", type=positive, help="prompts that a pass holds (default: any)")
    command.add_argument("--cache-tokens", type=positive, help="tokens that an engine has room for (default: any)")
    command.add_argument("--max-running", type=positive, help="sequences that decode at once (default: any)")
    command.add_argument("--machine", metavar="HOST", help="start only engines whose URLs name this host")
    command.set_defaults(command=_profile)


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _profile(chosen: argparse.Namespace) -> int:
    from shell_router.simulation.profile import Limits, ProfileOptions, run_profile
    from shell_router.simulation.profiling import Amount

    options = ProfileOptions(
        chosen.config,
        chosen.out,
        datetime.now(UTC).date().isoformat(),
        chosen.models,
        Amount(chosen.lengths, chosen.batches, chosen.new_tokens, chosen.rounds),
        Limits(chosen.chunk_tokens, chosen.prompts_per_pass, chosen.cache_tokens, chosen.max_running),
        chosen.machine,
    )
    return run(run_profile(options, lambda line: print(line, flush=True)))
