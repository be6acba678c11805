"""`shell-router batch`: profile, plan, run."""

import json as jsonlib
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from shell_router.cli.options import (
    Json,
    Seed,
    Several,
    argument,
    examples,
    listed,
    option,
    require_writable,
    run,
    write,
)

app = typer.Typer(help="Answer a file of questions with a pool of models.", no_args_is_help=True)

Method = Literal["ilp", "round-robin", "longest-first"]
Pool = Annotated[Path, argument("POOL", "YAML: models, workers, and how they answer.")]
Data = Annotated[Path, option('Questions: JSONL, one {"question": …} per line.', metavar="FILE")]
Limit = Annotated[int | None, option("Ask at most this many questions.", least=1)]
Planner = Annotated[Method, option("Planner: the integer linear program, or a heuristic.")]
LimitS = Annotated[float, option("Longest time to plan a stage, in seconds.", "--limit-s")]
SIZES = Several((8, 16, 32, 64))


@app.command(epilog=examples("shell-router batch profile pool.yaml --data questions.jsonl"))
def profile(
    pool: Pool,
    data: Data,
    limit: Limit = None,
    sizes: Annotated[Several, listed(int, "Numbers of prompts to time.", "N,N,…")] = SIZES,
) -> None:
    """Time a pool's models on its workers."""
    from rich.console import Console

    from shell_router.batch.pool import load_pool
    from shell_router.batch.pool_run import profile_pool, questions_for
    from shell_router.batch.report import on_screen

    found = load_pool(pool)
    questions = questions_for(found, data, limit)
    with on_screen(Console()) as follow:
        run(profile_pool(found, questions, sizes, follow))


@app.command(epilog=examples("shell-router batch plan workload.yaml --json plan.json"))
def plan(
    workload: Annotated[
        Path, argument("WORKLOAD", "YAML: workers, their capacity, models and their costs.")
    ],
    method: Planner = "ilp",
    limit_s: LimitS = 10.0,
    json: Json = None,
) -> None:
    """Plan which worker runs how many prompts of each model."""
    from rich.console import Console

    from shell_router.batch.planner import WITHOUT_SOLVER, Workload
    from shell_router.batch.planner import plan as solved
    from shell_router.batch.report import plan_summary, plan_table
    from shell_router.config.read import read_file

    require_writable(json)
    found, _ = read_file(workload, Workload, see="docs/how-to/batch-a-file.md explains workloads.")
    if method == "ilp":
        made = solved(found, limit_s)
    else:
        made = WITHOUT_SOLVER[method](found)
    Console().print(plan_table(made))
    others = [other(found) for name, other in WITHOUT_SOLVER.items() if name != method]
    print("\n".join(plan_summary(made, others)))
    if json:
        write(json, jsonlib.dumps(made.as_json(), indent=2) + "\n")


@app.command(
    "run", epilog=examples("shell-router batch run pool.yaml --data questions.jsonl --out run1")
)
def answer(
    pool: Pool,
    data: Data,
    out: Annotated[Path, option("Folder that keeps the run.", metavar="FOLDER")],
    limit: Limit = None,
    method: Planner = "ilp",
    limit_s: LimitS = 10.0,
    tau: Annotated[
        float | None, option("Agreement at which the aggregator is skipped. Default: the pool's.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Answer a file of questions, or continue an interrupted run."""
    from rich.console import Console

    from shell_router.batch.planner import WITHOUT_SOLVER
    from shell_router.batch.pool import load_pool
    from shell_router.batch.pool_run import questions_for, run_pool
    from shell_router.batch.report import on_screen, outcome
    from shell_router.batch.run import plan_apart

    found = load_pool(pool).with_tau(tau)
    questions = questions_for(found, data, limit)

    async def ran() -> None:
        planner = (
            (partial(plan_apart, limit_s=limit_s))
            if (method == "ilp")
            else (WITHOUT_SOLVER[method])
        )
        with on_screen(Console()) as follow:
            finished = await run_pool(found, questions, out, planner, follow, seed=seed)
        print("\n".join(outcome(finished.results, finished.stages)))

    run(ran())
