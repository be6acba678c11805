"""`shell-router demo`, `eval`, `calibrate`, `simulate` and `profile`."""

import json as jsonlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shell_router.cli.options import (
    NONE,
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
from shell_router.errors import ConfigError

if TYPE_CHECKING:
    from shell_router.core.exact_json import Values
    from shell_router.lab.simulation.run import Simulated
    from shell_router.lab.simulation.settings import Loaded

app = typer.Typer()

FIRST = Several((0,))
THRESHOLDS = Several((0.5, 0.6, 0.7, 0.8, 0.9, 0.95))
POLICIES = Several(("in_flight",))
SCOPES = Several(("cluster",))
TAUS = Several((0.7,))
LENGTHS = Several((32, 128, 512, 1024, 2048))
BATCHES = Several((1, 2, 4, 8, 16))


Data = Annotated[
    Path,
    option(
        'One {"question": …, "answer": …} per line, or a published data set (JSONL, CSV, Parquet).',
        metavar="FILE",
    ),
]
Grader = Annotated[
    Literal["auto", "exact", "numeric", "choice", "math"],
    option("Compares answers; `auto` chooses by the form of the right answer."),
]
Offset = Annotated[int, option("Skip this many questions.", least=0)]
Seeds = Annotated[Several, list_option(int, "Ask every question once per seed.", "0,1,…")]
Concurrency = Annotated[int, option("Questions that are asked at the same time.", least=1)]
LimitS = Annotated[float, option("Limit for one request, in seconds.", "--timeout-s")]
Report = Annotated[Path | None, option("Write the whole report, as JSON.", metavar="FILE")]
Records = Annotated[Path | None, option("Write every answer, as JSONL.", metavar="FILE")]


@app.command(
    epilog=examples(
        "shell-router demo --rounds 5", 'shell-router demo --real --question "Why is the sky blue?"'
    )
)
def demo(
    rounds: Annotated[int, option("Questions per topology, of the tiny models.", least=1)] = 3,
    seed: Seed = 0,
    real: Annotated[
        bool, option("Ask a real instruct model, SmolLM2-135M, in the place of the tiny ones.")
    ] = False,
    question: Annotated[str | None, option("What to ask it.", metavar="TEXT")] = None,
) -> None:
    """Start all on this machine, ask questions, and show what each mechanism gains and costs.

    Needs neither a GPU nor a download; `--real` needs packages, which it names.
    """
    from shell_router.lab.demo import EXAMPLE, run_demo

    if question is not None and not real:
        raise ConfigError(
            "--question goes with --real.", remedy="The tiny models solve word problems alone."
        )
    run(run_demo(rounds, seed, (question or EXAMPLE) if real else None))


@app.command(
    "eval",
    epilog=examples(
        "shell-router eval --config configs/evaluation.yaml --data models/data/test.jsonl "
        "--limit 50",
        "shell-router eval --url http://127.0.0.1:8000 --data mine.jsonl small large tree",
    ),
)
def evaluate(
    data: Data,
    settings: Annotated[
        list[str] | None,
        argument("SETTING", "A model, a topology or auto. Default: all models and topologies."),
    ] = None,
    config: Annotated[
        Path | None, option("Start this deployment on a free port, and ask it.", metavar="FILE")
    ] = None,
    url: Annotated[str | None, option("Ask the router that runs there.")] = None,
    api_key_env: KeyVariable = None,
    temperature: Annotated[
        float | None, option("For plain models (default 0) and for the roots of topologies.")
    ] = None,
    max_tokens: Annotated[
        int | None, option("Output limit of plain models. By default what fits.", least=1)
    ] = None,
    baseline: Annotated[
        str | None, option("Compare with this one. Default: the first topology.", metavar="SETTING")
    ] = None,
    grader: Grader = "auto",
    offset: Offset = 0,
    limit: Limit = None,
    seeds: Seeds = FIRST,
    concurrency: Concurrency = 1,
    limit_s: LimitS = 900.0,
    json: Report = None,
    records: Records = None,
) -> None:
    """Compare models and topologies on your questions.

    Reports accuracy with its 95 % interval, latency, tokens and early exits.
    """
    from shell_router.lab.evaluation.records import EvaluationOptions
    from shell_router.lab.evaluation.run import run_evaluation

    _require_one_router(config, url, api_key_env)
    require_writable(json, records)
    options = EvaluationOptions(
        data,
        config=config,
        url=url,
        api_key=read_key(api_key_env),
        settings=tuple(settings or ()),
        baseline=baseline,
        temperature=temperature,
        max_tokens=max_tokens,
        grader=grader,
        offset=offset,
        limit=limit,
        seeds=seeds,
        concurrency=concurrency,
        limit_s=limit_s,
        json=json,
        records=records,
    )
    run(run_evaluation(options))


def _require_one_router(config: Path | None, url: str | None, api_key_env: str | None) -> None:
    if (config is None) == (url is None):
        raise typer.BadParameter(
            "exactly one of the two is required.", param_hint="--config / --url"
        )
    if config and api_key_env:
        raise ConfigError(
            "--api-key-env goes with --url only.", remedy="A deployment of --config needs no key."
        )


@app.command(
    epilog=examples(
        "shell-router calibrate tree.yaml --config configs/evaluation.yaml --data "
        "models/data/test.jsonl --bound 1"
    )
)
def calibrate(
    topology: Annotated[Path, argument("TOPOLOGY", "A file, with early exit or without.")],
    config: Annotated[Path, option("The deployment that serves its models.", metavar="FILE")],
    data: Data,
    bound: Annotated[float, option("Points of accuracy that early exit may lose.")] = 0.5,
    policies: Annotated[
        Several, list_option(str, "Policies to try: in_flight, monotone, threshold.")
    ] = POLICIES,
    scopes: Annotated[
        Several, list_option(str, "Agents to judge together: cluster, layer.")
    ] = SCOPES,
    taus: Annotated[
        Several, list_option(float, "Values of tau to try, for the policy `threshold`.")
    ] = TAUS,
    thresholds: Annotated[
        Several, list_option(float, "Thresholds to try.", "0.8,0.9,…")
    ] = THRESHOLDS,
    grader: Grader = "auto",
    offset: Offset = 0,
    limit: Limit = None,
    seeds: Seeds = FIRST,
    concurrency: Concurrency = 1,
    limit_s: LimitS = 900.0,
    json: Report = None,
    records: Records = None,
) -> None:
    """Choose a topology's early exit by its loss of accuracy.

    Takes the fastest one whose loss, and that of more cautious thresholds, stays within the bound.
    """
    from shell_router.lab.evaluation.calibration import Tried, run_calibration
    from shell_router.lab.evaluation.records import EvaluationOptions

    tried = Tried(thresholds, policies, scopes, taus)
    require_writable(json, records)
    options = EvaluationOptions(
        data,
        config=config,
        grader=grader,
        offset=offset,
        limit=limit,
        seeds=seeds,
        concurrency=concurrency,
        limit_s=limit_s,
        json=json,
        records=records,
    )
    run(run_calibration(topology, tried, bound, options))


@app.command(
    epilog=examples(
        "shell-router simulate configs/simulations/six-h200.yaml --topology full",
        "shell-router simulate configs/simulations/tool-loops.yaml --clients 16",
    )
)
def simulate(
    simulation: Annotated[
        list[Path],
        argument("FILE", "YAML: topologies, engines and their costs, a workload."),
    ],
    topology: Annotated[str | None, option("Simulate only this topology.", metavar="NAME")] = None,
    clients: Annotated[
        int | None,
        option("Questions at a time, in place of the file's arrivals.", least=1),
    ] = None,
    replay: Annotated[
        Path | None,
        option(
            "Run the graphs of these spans, as `shell-router trace --otel` writes them, in place "
            "of the file's topologies and workload.",
            metavar="FILE",
        ),
    ] = None,
    seed: Seed = 0,
    json: Json = None,
) -> None:
    """Predict latencies on engines that you do not have.

    Runs the router's own code in virtual time, on engines that cost what their profile gives.
    """
    from shell_router.lab.simulation.run import simulate
    from shell_router.lab.simulation.settings import load

    require_writable(json)
    if replay and (topology or clients):
        raise ConfigError(
            "--replay brings its own graphs and arrivals.",
            remedy="Leave --topology and --clients out.",
        )
    loaded = {file: load(file, clients) for file in simulation}
    for file, content in loaded.items():
        if topology is not None and topology not in content.topologies:
            names = ", ".join(content.topologies)
            raise ConfigError(
                f"{file} has no topology {topology!r}.", remedy=f"Choose one of: {names}."
            )
    has_own_stems = len({file.stem for file in loaded}) == len(loaded)
    done: dict[str, Simulated] = {}
    for file, content in loaded.items():
        prefix = ""
        if len(loaded) > 1:
            prefix = f"{file.stem if has_own_stems else file} "
        if replay:
            replayed = _replay(replay, content, seed)
            done |= {prefix + name: simulated for name, simulated in replayed.items()}
            continue
        for name, graph in content.topologies.items():
            if topology in (None, name):
                done[prefix + name] = simulate(content.simulation, graph, content.costs, seed)
    _report_simulated(done, json)


def _replay(file: Path, content: "Loaded", seed: int) -> "Mapping[str, Simulated]":
    from shell_router.lab.simulation.replay import load_replay
    from shell_router.lab.simulation.run import replay

    graphs = load_replay(file, content.simulation.models)
    return replay(content.simulation, graphs, content.costs, seed)


def _report_simulated(done: "Mapping[str, Simulated]", json: Path | None) -> None:
    """Print the tables of simulations, and write their figures to the file `json`."""
    from shell_router.lab.simulation.summary import build_tables, describe_bound, summarize, to_json
    from shell_router.lab.tables import print_table

    answered = {name: simulated for name, simulated in done.items() if simulated.answered} or done
    summaries = {name: summarize(simulated) for name, simulated in answered.items()}
    for title, rows in build_tables(summaries):
        print_table(title, rows)
    for name, summary in summaries.items():
        print(describe_bound(name, summary))
    for name, simulated in done.items():
        if name not in answered:
            print(f"{name} answered no request: {simulated.error}")
    if json:
        write(json, jsonlib.dumps(to_json(summaries), indent=2) + "\n")


@app.command(
    epilog=examples(
        "shell-router trace --status failed",
        "shell-router trace 5c3e9d0a7b1f4e28a6d2c80f9b7e4a13 --perfetto run.json",
    )
)
def trace(
    id: Annotated[
        str | None,
        argument("ID", "A request's x-trace-id. Without it the latest requests are listed."),
    ] = None,
    url: Annotated[str, option("The router.")] = "http://127.0.0.1:8000",
    api_key_env: KeyVariable = None,
    model: Annotated[str | None, option("List only requests for this model or topology.")] = None,
    status: Annotated[
        Literal["running", "finished", "failed", "cancelled"] | None,
        option("List only these requests."),
    ] = None,
    last_s: Annotated[
        float | None, option("List only requests of the last S seconds.", "--last-s", metavar="S")
    ] = None,
    limit: Annotated[int, option("List at most this many.", least=1)] = 20,
    perfetto: Annotated[
        Path | None,
        option(
            "Write the request for ui.perfetto.dev or chrome://tracing, as JSON.", metavar="FILE"
        ),
    ] = None,
    otel: Annotated[
        Path | None,
        option(
            "Write the request, or those listed, for inference-perf, guidellm and `simulate`: "
            "spans as JSON. Needs `traces.contents`.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """List a router's latest requests, or draw one.

    The router keeps the latest `traces.kept` requests in memory.
    """
    import time

    key = read_key(api_key_env)
    require_writable(otel)
    if id is not None:
        _draw_request(url, key, id, perfetto, otel)
        return
    if perfetto:
        raise ConfigError("--perfetto writes one request.", remedy="Name it by its x-trace-id.")
    filters = {"limit": str(limit)}
    if model is not None:
        filters["model"] = model
    if status is not None:
        filters["status"] = status
    if last_s is not None:
        filters["since"] = f"{time.time() - last_s:.3f}"
    _list_requests(url, key, filters, otel)


def _list_requests(
    url: str, key: str | None, filters: Mapping[str, str], otel: Path | None
) -> None:
    import asyncio

    from shell_router.lab.tables import print_table
    from shell_router.lab.traces import fetch_traces, list_rows

    if otel:
        _write_spans(otel, asyncio.run(fetch_traces(url, key, filters)))
    rows = asyncio.run(list_rows(url, key, filters))
    if rows:
        print_table("Latest requests", rows)
    else:
        say("The router keeps no such request.")


def _write_spans(file: Path, requests: "Sequence[Values]") -> None:
    from shell_router.lab.traces import to_otel

    written = to_otel(requests)
    write(file, jsonlib.dumps(written) + "\n")
    say(f"{file} has {written['span_count']} calls of {len(requests)} requests.")


def _draw_request(
    url: str, key: str | None, id: str, perfetto: Path | None, otel: Path | None
) -> None:
    import asyncio

    from rich.console import Console

    from shell_router.lab.traces import draw_timeline, fetch_trace, to_perfetto

    require_writable(perfetto)
    request = asyncio.run(fetch_trace(url, key, id))
    console = Console()
    if request["duration_s"] is None:
        duration = ""
    else:
        duration = f", {request['duration_s']:.3f} s"
    console.print(f"{request['target']}: {request['state']}{duration}", style="bold")
    for line in draw_timeline(request, columns=min(console.width, 140)):
        console.print(line, no_wrap=True, crop=True)
    if request.get("error"):
        console.print(request["error"], markup=False)
    if perfetto:
        write(perfetto, jsonlib.dumps(to_perfetto(request)) + "\n")
        say(f"Open {perfetto} at https://ui.perfetto.dev or in chrome://tracing.")
    if otel:
        _write_spans(otel, [request])


@app.command(
    epilog=examples("shell-router profile configs/embedded.yaml --out configs/engines/mine.yaml")
)
def profile(
    config: Annotated[Path, argument("CONFIG", "The deployment's YAML file.")],
    out: Annotated[
        Path, option("YAML file of profiles; other profiles in it are kept.", metavar="FILE")
    ],
    models: Annotated[Several, list_option(str, "Measure only these models. Default: all.")] = NONE,
    rounds: Annotated[int, option("Report medians of this many rounds.", least=1)] = 5,
    lengths: Annotated[Several, list_option(int, "Prompt lengths in tokens.", "N,N,…")] = LENGTHS,
    batches: Annotated[Several, list_option(int, "Decode batch sizes.", "N,N,…")] = BATCHES,
    new_tokens: Annotated[
        int, option("Tokens that each sequence of a batch generates.", least=1)
    ] = 64,
    chunk_tokens: Annotated[
        int | None, option("New tokens in one prefill pass. Default: SGLang's 8192.", least=1)
    ] = None,
    prompts_per_pass: Annotated[
        int | None, option("Prompts in one pass. Default: unlimited.", least=1)
    ] = None,
    cache_tokens: Annotated[
        int | None, option("An engine's KV capacity. Default: unlimited.", least=1)
    ] = None,
    max_running: Annotated[
        int | None, option("Largest decode batch. Default: unlimited.", least=1)
    ] = None,
    machine: Annotated[
        str | None, option("Start only engines whose URLs name this host.", metavar="HOST")
    ] = None,
) -> None:
    """Measure what a deployment's engines cost, for `simulate`."""
    from shell_router.lab.simulation.profiling import Amount, run_profile

    amount = Amount(lengths, batches, new_tokens, rounds)
    limits = {
        "chunk_tokens": chunk_tokens,
        "prompts": prompts_per_pass,
        "cache_tokens": cache_tokens,
    }
    limits["max_batch_size"] = max_running
    date = datetime.now(UTC).date().isoformat()
    run(run_profile(config, out, models, amount, limits, machine, date, say))
