"""`shell-router batch`."""

# ruff: noqa: PLC0415 - see the package's docstring

import argparse
from pathlib import Path

from shell_router.cli.arguments import Commands, positive, whole_numbers
from shell_router.cli.planning import METHODS, add_plan
from shell_router.cli.running import run

SIZES = (8, 16, 32, 64)


def add_commands(commands: Commands) -> None:
    """What these commands take."""
    batch = commands.add_parser("batch", help="answer a file of questions with more experts than the workers hold")
    kinds = batch.add_subparsers(required=True, metavar="COMMAND")
    _add_profile(kinds.add_parser("profile", help="time a pool's models on its workers"))
    add_plan(kinds)
    _add_run(kinds.add_parser("run", help="answer a file of questions, or go on where a run was ended"))
    _add_calibrate(
        kinds.add_parser("calibrate", help="choose when the aggregator may be left out, from a finished run")
    )


def _add_pool(command: argparse.ArgumentParser) -> None:
    command.add_argument("pool", type=Path, metavar="POOL", help="YAML: models, workers, and how they answer")
    command.add_argument("--data", type=Path, required=True, help='JSONL, one {"question": …} per line')
    command.add_argument("--limit", type=positive, help="ask at most so many questions")


def _add_profile(profile: argparse.ArgumentParser) -> None:
    _add_pool(profile)
    profile.add_argument(
        "--sizes", type=whole_numbers, default=SIZES, help="prompts of the timed sessions (default 8,16,32,64)"
    )
    profile.set_defaults(command=_profile)


def _add_run(command: argparse.ArgumentParser) -> None:
    _add_pool(command)
    command.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the run is kept")
    command.add_argument("--method", choices=METHODS, default=METHODS[0], help="how to plan (default ilp)")
    command.add_argument("--limit-s", type=float, default=10.0, help="longest time to plan a stage (default 10)")
    command.add_argument("--tau", type=float, help="agreement that needs no aggregator (default: the pool's)")
    command.add_argument("--seed", type=int, default=0, help="fixes who is recruited and what is drawn (default 0)")
    command.set_defaults(command=_run)


def _add_calibrate(calibrate: argparse.ArgumentParser) -> None:
    calibrate.add_argument("run", type=Path, metavar="FOLDER", help="a run with --tau 2, on questions with answers")
    calibrate.add_argument(
        "--confidence", choices=("plurality", "probability"), help="how agreement is measured (default: as in the run)"
    )
    calibrate.add_argument("--bound", type=float, default=0.5, help="points of accuracy that may be lost (default 0.5)")
    calibrate.set_defaults(command=_calibrate)


def _profile(chosen: argparse.Namespace) -> int:
    from rich.console import Console

    from shell_router.batch.screen import on_screen
    from shell_router.config.pool import load_pool
    from shell_router.wiring.batch import profile_pool, questions_for

    pool = load_pool(chosen.pool)
    questions = questions_for(pool, chosen.data, chosen.limit)
    with on_screen(Console()) as follow:
        return run(profile_pool(pool, questions, chosen.sizes, follow))


def _run(chosen: argparse.Namespace) -> int:
    from rich.console import Console

    from shell_router.batch import BASELINES, Plan, Workload, plan
    from shell_router.batch.report import outcome
    from shell_router.batch.screen import on_screen
    from shell_router.config.pool import load_pool
    from shell_router.wiring.batch import Finished, questions_for, run_pool

    def planned(workload: Workload) -> Plan:
        return plan(workload, chosen.limit_s) if chosen.method == "ilp" else BASELINES[chosen.method](workload)

    async def ran() -> None:
        finished.append(await run_pool(pool, questions, chosen.out, planned, follow, seed=chosen.seed))

    pool = load_pool(chosen.pool).with_tau(chosen.tau)
    questions = questions_for(pool, chosen.data, chosen.limit)
    finished: list[Finished] = []
    with on_screen(Console()) as follow:
        code = run(ran())
    for one in finished:
        print("\n".join(outcome(one.results, one.stages)))
    return code


def _calibrate(chosen: argparse.Namespace) -> int:
    from rich.console import Console

    from shell_router.batch.report import trial_table
    from shell_router.batch.results import read_results
    from shell_router.batch.tau import choose, trials

    tried = trials(read_results(chosen.run), chosen.confidence)
    Console().print(trial_table(tried, choose(tried, chosen.bound)))
    return 0
