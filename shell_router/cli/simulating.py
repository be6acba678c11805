"""`shell-router simulate`."""

# ruff: noqa: PLC0415 - see the package's docstring

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shell_router.cli.arguments import Commands, positive
from shell_router.cli.planning import write
from shell_router.errors import ConfigError

if TYPE_CHECKING:
    from shell_router.simulation.load import Loaded


def add_commands(commands: Commands) -> None:
    """What `simulate` takes."""
    command = commands.add_parser("simulate", help="say how fast topologies would be on engines that one does not have")
    command.add_argument("simulation", type=Path, help="YAML: topologies, engines and what they cost, a workload")
    command.add_argument("--compare", type=Path, nargs="+", default=[], metavar="FILE", help="further simulations")
    command.add_argument("--topology", metavar="NAME", help="only this one of the topologies")
    command.add_argument("--seed", type=int, default=0, help="fixes what is asked, written and drawn (default 0)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    command.add_argument("--picture", type=Path, metavar="FILE", help="draw one request of each, as SVG")
    command.add_argument(
        "--what-if-gpus", type=positive, metavar="N", help="look for the cheapest arrangement of at most N GPUs"
    )
    command.add_argument("--p95-s", type=float, metavar="S", help="in which 19 of 20 requests take at most S seconds")
    command.set_defaults(command=_simulate)


def _simulate(chosen: argparse.Namespace) -> int:
    from shell_router.simulation.load import load

    if (chosen.what_if_gpus is None) != (chosen.p95_s is None):
        raise ConfigError("--what-if-gpus and --p95-s go together.", remedy="Give both, or none.")
    if chosen.what_if_gpus is not None and (chosen.compare or chosen.json or chosen.picture):
        raise ConfigError("--what-if-gpus prints a table of one simulation.", remedy="Leave the other options out.")
    for file in (chosen.json, chosen.picture):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise ConfigError(f"{file} cannot be written.", remedy="Name a file in a folder that is there.")
    files = [chosen.simulation, *chosen.compare]
    loaded = [_only(load(file), file, chosen.topology) for file in files]
    if chosen.what_if_gpus is not None:
        return _what_if(chosen, loaded[0])
    names = [file.stem for file in files]
    names = names if len(set(names)) == len(names) else list(map(str, files))
    return _report(chosen, dict(zip(names if len(files) > 1 else [""], loaded, strict=True)))


def _only(loaded: "Loaded", file: Path, name: str | None) -> "Loaded":
    if name is None:
        return loaded
    if name not in loaded.topologies:
        raise ConfigError(f"{file} has no topology {name!r}.", remedy=f"Choose one of: {', '.join(loaded.topologies)}.")
    return replace(loaded, topologies={name: loaded.topologies[name]})


def _report(chosen: argparse.Namespace, loaded: "Mapping[str, Loaded]") -> int:
    from rich.console import Console

    from shell_router.simulation.picture import draw_traces
    from shell_router.simulation.run import simulate
    from shell_router.simulation.screen import as_json, report
    from shell_router.simulation.summary import middle, summary_of

    done = {
        " ".join(filter(None, (of, name))): simulate(one.simulation, topology, one.costs, chosen.seed)
        for of, one in loaded.items()
        for name, topology in one.topologies.items()
    }
    answered = {name: one for name, one in done.items() if one.answered} or done
    summaries = {name: summary_of(one) for name, one in answered.items()}
    console = Console()
    for part in report(summaries):
        console.print(part)
    for name, one in done.items():
        if name not in answered:
            print(f"{name} answered no request: {one.runs[0].error}")
    if chosen.json:
        write(chosen.json, json.dumps(as_json(summaries), indent=2) + "\n")
    if chosen.picture:
        write(chosen.picture, draw_traces({name: middle(one) for name, one in answered.items()}))
    return 0


def _what_if(chosen: argparse.Namespace, loaded: "Loaded") -> int:
    from rich.console import Console

    from shell_router.simulation.arrangements import arranged, cheapest
    from shell_router.simulation.screen import arrangement_table

    if len(loaded.topologies) > 1:
        raise ConfigError("An arrangement is for one topology.", remedy="Choose it by --topology.")
    tried = list(arranged(loaded, chosen.what_if_gpus, chosen.p95_s, chosen.seed))
    best = cheapest(tried, chosen.p95_s)
    Console().print(arrangement_table(tried, best))
    if best is None:
        print(f"No arrangement of {chosen.what_if_gpus} GPUs answers 19 of 20 requests within {chosen.p95_s:g} s.")
        return 1
    print(f"The cheapest takes {best.gpus} GPUs: {', '.join(f'{n} x {m}' for m, n in best.pairs.items())}.")
    return 0
