"""`shell-router batch plan`."""

# ruff: noqa: PLC0415 - see the package's docstring

import argparse
import json
from pathlib import Path

from shell_router.cli.arguments import Commands
from shell_router.errors import ConfigError

METHODS = ("ilp", "round-robin", "data-parallel", "longest-first")
"""The program, and the keys of `batch.BASELINES`, which would have to be imported for `--help`."""


def add_plan(commands: Commands) -> None:
    """What `plan` takes."""
    plan = commands.add_parser("plan", help="say which worker runs how many of each expert's prompts, and how long")
    plan.add_argument(
        "workload", type=Path, metavar="WORKLOAD", help="YAML: workers, capacity, experts and their costs"
    )
    plan.add_argument("--method", choices=METHODS, default=METHODS[0], help="how to plan (default ilp)")
    plan.add_argument("--limit-s", type=float, default=10.0, help="longest time to look for a better plan (default 10)")
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the plan")
    plan.add_argument("--picture", type=Path, metavar="FILE", help="draw the plan, as SVG")
    plan.set_defaults(command=_plan)


def _plan(chosen: argparse.Namespace) -> int:
    from rich.console import Console

    from shell_router.batch import BASELINES, Workload, draw_plan, plan, plan_table, said
    from shell_router.config.read import read_file

    for file in (chosen.json, chosen.picture):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise ConfigError(f"{file} cannot be written.", remedy="Name a file in a folder that is there.")
    workload, _ = read_file(chosen.workload, Workload, see="docs/pools.md explains workloads.")
    made = plan(workload, chosen.limit_s) if chosen.method == "ilp" else BASELINES[chosen.method](workload)
    Console().print(plan_table(made))
    print("\n".join(said(made, [baseline(workload) for name, baseline in BASELINES.items() if name != chosen.method])))
    if chosen.json:
        write(chosen.json, json.dumps(made.as_json(), indent=2) + "\n")
    if chosen.picture:
        write(chosen.picture, draw_plan(made))
    return 0


def write(file: Path, content: str) -> None:
    """Write a file that the user named. Raises ConfigError."""
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.", remedy="Name a file that you may write.") from error
