"""Measure this router with others' clients, beside others' routers, on a real model.

    python -m benchmarks.neutral [--rounds N] [--sessions N] [--at-once 1,4] [--traces FOLDER ...]

README.md says what it needs, how long it takes and what each row means.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from operator import sub
from pathlib import Path

import aiohttp

from benchmarks.neutral.clients import CLIENTS, OUTPUT_TOKENS, PROMPT_TOKENS, Ask, Client, Measured
from benchmarks.neutral.environments import Installed, UnavailableError, install
from benchmarks.neutral.servers import (
    CPU_KINDS,
    FORMS,
    SERVED_NAME,
    Engines,
    Server,
    count_prompts,
    cpu_engines,
    name_topology,
    running_engines,
    serve,
)
from benchmarks.neutral.table import Cell, Round, build_rows
from benchmarks.neutral.traces import OWN, Trace, load_trace, write_own
from benchmarks.report import report
from benchmarks.servers import flush

TITLE = "Sessions of public clients at this router, at others and at the engines"
CHATS = f"chats {PROMPT_TOKENS}+{OUTPUT_TOKENS}"
SECONDS_PER_MINUTE = 60


@dataclass(frozen=True, slots=True)
class Run:
    """One row's client, server and workload."""

    cell: Cell
    client: Client
    installed: Installed
    server: Server
    trace: Trace | None


def main() -> int:
    """Measure and print; 1 if no client could be had, or not all rounds could be measured."""
    options = parse_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all it started ends, too
    results = options.out or Path("runs", f"neutral-{datetime.now():%Y%m%d-%H%M%S}")
    results = results.absolute()  # the clients have other current folders
    results.mkdir(parents=True)
    notes: dict[str, str] = {}
    clients = install_clients(options.clients, notes)
    if not clients:
        print_notes(notes)
        return 1
    found = asyncio.run(running_engines(options.engine)) if options.engine else []
    model = found[0].model if found else SERVED_NAME
    traces = load_traces(options, results, model, notes)
    with ExitStack() as stack:
        if not found:
            names, logs = options.engines.split(","), results / "engines"
            found = stack.enter_context(cpu_engines(names, logs, drafts=options.drafts))
        forms = [form for form in FORMS if options.drafts or not FORMS[form]["drafts"]]
        servers: list[Server] = []
        for engines in found:
            place = results / "servers" / engines.name
            servers += stack.enter_context(serve(engines, traces, forms, place, notes))
        runs = list(plan_runs(options, clients, servers, traces))
        measure = partial(measure_round, runs, options=options, results=results)
        rounds = measure_rounds(measure, options.rounds + 1, notes)
    rows = build_rows([run.cell for run in runs], rounds[1:] or rounds) if rounds else []
    engine = f"{model}, {max(len(rounds) - 1, 0)} rounds"
    if rows:
        report(
            TITLE, rows, engine=engine, simulated=False, as_json=False, markdown=options.markdown
        )
    print_notes(notes)
    print(f"Raw results: {results}")
    if options.json:
        print(json.dumps({"title": TITLE, "engine": engine, "simulated": False, "rows": rows}))
    return int(len(rounds) <= options.rounds)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """All options, those of the command without `arguments`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.neutral",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=int, default=6, help="after one that warms up; 0: only that"
    )
    parser.add_argument(
        "--sessions", type=int, default=4, help="of each run, at least one for each at once"
    )
    parser.add_argument("--at-once", default="4", help="sessions at a time, by comma")
    parser.add_argument(
        "--own", default="tree-3-1,tool-loop", help=f"of {', '.join(OWN)}, by comma"
    )
    parser.add_argument(
        "--traces", type=Path, nargs="*", default=[], help="folders or files of others'"
    )
    parser.add_argument("--clients", default=",".join(client.program.name for client in CLIENTS))
    parser.add_argument("--engines", default="undivided,pair", help="which to start on the CPU")
    parser.add_argument(
        "--engine", action="append", help="URL of a running SGLang server, in place of those"
    )
    parser.add_argument(
        "--drafts", action="store_true", help="engines that draft, and a row for it"
    )
    parser.add_argument("--out", type=Path, help="a new folder for the raw results")
    parser.add_argument("--markdown", action="store_true", help="print the table for the docs")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args(arguments)
    for option, named, known in (
        ("--own", filter(None, options.own.split(",")), OWN),
        ("--engines", options.engines.split(","), CPU_KINDS),
    ):
        wrong = ", ".join(name for name in named if name not in known)
        if wrong or named == [""]:
            parser.error(f"{option} {wrong}: choose from {', '.join(known)}")
    return options


def install_clients(names: str, notes: dict[str, str]) -> list[tuple[Client, Installed]]:
    """Those of the names that can be had; the others are in `notes`."""
    found = []
    for client in CLIENTS:
        if client.program.name not in names.split(","):
            continue
        try:
            found.append((client, install(client.program)))
        except UnavailableError as error:
            notes[f"client {client.program.requirement}"] = str(error)
    known = [client.program.name for client in CLIENTS]
    for name in names.split(","):
        if name not in known:
            notes[f"client {name}"] = f"is none of {', '.join(known)}"
    return found


def load_traces(
    options: argparse.Namespace, results: Path, model: str, notes: dict[str, str]
) -> list[Trace]:
    """Our traces that were named, and all of the others'; SystemExit for a file that is none."""
    own, whole = results / "traces", results / "traces-whole"
    write_own(own)
    whole.mkdir()
    files = [own / f"{name}.json" for name in options.own.split(",") if name]
    for place in map(Path.absolute, options.traces):
        files += sorted(place.glob("*.json")) if place.is_dir() else [place]
    traces = []
    for file in files:
        try:
            trace = load_trace(file, whole, model)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise SystemExit(f"{file} is no trace: {type(error).__name__}: {error}") from error
        if trace.note:
            notes[f"{trace.name} as a topology"] = trace.note
        traces.append(trace)
    return traces


def plan_runs(
    options: argparse.Namespace,
    clients: Sequence[tuple[Client, Installed]],
    servers: Sequence[Server],
    traces: Sequence[Trace],
) -> Iterator[Run]:
    """Every row of the table, in its order."""
    kinds = list(dict.fromkeys(server.engines.name for server in servers))
    for kind in kinds:
        for client, installed in clients:
            name = f"{client.program.name} {installed.version}"
            for trace in traces if client.replays else [None]:
                workload = trace.name if trace else CHATS
                for at_once in map(int, options.at_once.split(",")):
                    for server in servers:
                        if server.engines.name != kind:
                            continue
                        if server.form and (trace is None or trace.whole is None):
                            continue
                        one = bool(server.form)
                        cell = Cell(kind, name, workload, at_once, server.name, one)
                        yield Run(cell, client, installed, server, trace)


def measure_rounds(
    measure: Callable[[int], Round], count: int, notes: dict[str, str]
) -> list[Round]:
    """Return the rounds up to the first that fails or is interrupted; `notes` gets the reason."""
    rounds: list[Round] = []
    try:
        for number in range(count):
            rounds.append(measure(number))  # noqa: PERF401 - those before an error are kept
    except (KeyboardInterrupt, RuntimeError, OSError, aiohttp.ClientError) as error:
        notes["the other rounds"] = str(error) or type(error).__name__
    return rounds


def measure_round(
    runs: Sequence[Run], number: int, options: argparse.Namespace, results: Path
) -> dict[Cell, Measured]:
    """Run everything once, in random order, each with empty prefix caches."""
    measured: dict[Cell, Measured] = {}
    began_s = time.monotonic()
    for done, run in enumerate(random.sample(runs, len(runs))):
        cell = run.cell
        words = (cell.engines, cell.client, cell.workload, str(cell.at_once), cell.server)
        folder = results / f"round-{number}" / "--".join(words).replace(" ", "-").replace(",", "")
        asyncio.run(flush(run.server.engines.urls))
        before = count_prompts(run.server.engines)
        result = run.client.run(run.installed, build_ask(run, number, options), folder)
        prompts, cached = map(sub, count_prompts(run.server.engines), before)
        measured[cell] = replace(result, prompt_tokens=prompts, cached_tokens=cached)
        summary = json.dumps({**asdict(cell), **asdict(measured[cell])})
        (folder / "measured.json").write_text(summary + "\n", encoding="utf-8")
        minutes = (time.monotonic() - began_s) / SECONDS_PER_MINUTE
        say(
            f"round {number}, {done + 1} of {len(runs)}, {minutes:.0f} min: {', '.join(words)}: "
            f"{len(measured[cell].session_s)} sessions, {measured[cell].failures} failed "
            f"{measured[cell].error}"
        )
    return {run.cell: measured[run.cell] for run in runs}


def build_ask(run: Run, number: int, options: argparse.Namespace) -> Ask:
    """What a client is told; the whole topology has a trace of one call."""
    engines: Engines = run.server.engines
    file = run.trace.file if run.trace else None
    model = engines.model
    if run.trace and run.server.form:
        file, model = run.trace.whole, name_topology(run.trace, run.server.form)
    return Ask(
        run.server.url,
        model,
        engines.tokenizer,
        max(options.sessions, run.cell.at_once),
        run.cell.at_once,
        seed=number,
        trace=file,
        root=run.trace.root if run.trace else "",
    )


def print_notes(notes: dict[str, str]) -> None:
    """Say what was not measured, and why."""
    for name, reason in notes.items():
        print(f"Not measured: {name}: {reason}")


def say(line: str) -> None:
    """Say what happens, apart from the table."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the router's command does
    sys.exit(main())
