"""`shell-router batch`: profile, plan, run."""

import json as jsonlib
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from shell_router.cli.options import (
    Json,
    KeyVariable,
    Limit,
    Seed,
    Several,
    argument,
    examples,
    list_option,
    option,
    read_key,
    require_writable,
    run,
    say,
    write,
)

app = typer.Typer(help="Answer a file of questions with a pool of models.", no_args_is_help=True)

Method = Literal["ilp", "round-robin", "longest-first"]
Pool = Annotated[Path, argument("POOL", "YAML: models, workers, and how they answer.")]
Answering = Annotated[
    Path, argument("POOL", "The pool's YAML; with --url a model or a topology of that router.")
]
Data = Annotated[Path, option('Questions: JSONL, one {"question": …} per line.', metavar="FILE")]
Planner = Annotated[Method, option("Planner: the integer linear program, or a heuristic.")]
LimitS = Annotated[float, option("Longest time to plan a stage, in seconds.", "--limit-s")]
SIZES = Several((8, 16, 32, 64))


@app.command(epilog=examples("shell-router batch profile pool.yaml --data questions.jsonl"))
def profile(
    pool: Pool,
    data: Data,
    limit: Limit = None,
    sizes: Annotated[Several, list_option(int, "Numbers of prompts to time.", "N,N,…")] = SIZES,
) -> None:
    """Time a pool's models on its workers."""
    from rich.console import Console

    from shell_router.batch.pool import load_pool
    from shell_router.batch.pool_run import profile_pool
    from shell_router.batch.questions import read_questions
    from shell_router.batch.report import follow_on_screen

    loaded = load_pool(pool)
    questions = read_questions(data, loaded.proposer_names, limit)
    with follow_on_screen(Console()) as follow:
        run(profile_pool(loaded, questions, sizes, follow))


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

    from shell_router.batch import planner
    from shell_router.batch.report import draw_plan, summarize_plan
    from shell_router.files.read import read_file

    require_writable(json)
    see = "docs/how-to/batch-a-file.md explains workloads."
    loaded, _ = read_file(workload, planner.Workload, see=see)
    heuristics = {name: make(loaded) for name, make in planner.HEURISTICS.items()}
    best = heuristics.pop(method, None) or planner.plan(loaded, limit_s)
    Console().print(draw_plan(best))
    print("\n".join(summarize_plan(best, list(heuristics.values()))))
    if json:
        write(json, jsonlib.dumps(best.as_json(), indent=2) + "\n")


@app.command(
    "run",
    epilog=examples(
        "shell-router batch run pool.yaml --data questions.jsonl --out run1",
        "shell-router batch run tree --url http://127.0.0.1:8000 --data questions.jsonl --out run1",
    ),
)
def answer(
    pool: Answering,
    data: Data,
    out: Annotated[Path, option("Folder that keeps the run.", metavar="FOLDER")],
    limit: Limit = None,
    method: Planner = "ilp",
    limit_s: LimitS = 10.0,
    tau: Annotated[
        float | None, option("Agreement at which the aggregator is skipped. Default: the pool's.")
    ] = None,
    seed: Seed = 0,
    url: Annotated[
        str | None, option("Run beside the online requests of the router that runs there.")
    ] = None,
    api_key_env: KeyVariable = None,
) -> None:
    """Answer a file of questions, or continue an interrupted run."""
    if url is not None:
        run(_answer_online(str(pool), data, out, limit, url, read_key(api_key_env)))
        return

    from rich.console import Console

    from shell_router.batch.planner import HEURISTICS
    from shell_router.batch.pool import load_pool
    from shell_router.batch.pool_run import run_pool
    from shell_router.batch.questions import read_questions
    from shell_router.batch.report import follow_on_screen, summarize_run
    from shell_router.batch.run import plan_apart
    from shell_router.batch.sessions import Planner

    loaded = load_pool(pool).with_tau(tau)
    questions = read_questions(data, loaded.proposer_names, limit)
    planners: dict[str, Planner] = {**HEURISTICS, "ilp": partial(plan_apart, limit_s=limit_s)}

    async def answer_questions() -> None:
        with follow_on_screen(Console()) as follow:
            report = await run_pool(loaded, questions, out, planners[method], follow, seed=seed)
        print("\n".join(summarize_run(report.results, report.stages)))

    run(answer_questions())


async def _answer_online(
    target: str, data: Path, out: Path, limit: int | None, url: str, api_key: str | None
) -> None:
    import aiohttp

    from shell_router.batch.questions import read_questions
    from shell_router.lab.batches import answer_online
    from shell_router.lab.evaluation.client import RouterClient

    questions = read_questions(data, limit=limit)
    for refused in questions.refused:
        say(f"line {refused.line} is left out: {refused.error}")
    async with aiohttp.ClientSession() as session:
        client = RouterClient(session, url, api_key=api_key)
        await answer_online(client, target, questions, out, say)
