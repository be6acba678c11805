"""How far simulated answers are from real ones, on three embedded pairs.

    python benchmarks/simulation_error.py [--rounds N] [--clients 1,4] [--json]

Every round profiles each pair alone, times the embedder, and asks every setting for real; so does a
first round that warms up. Then each setting is simulated with the costs of all rounds and the same
workload: as many questions, outputs that are as long, the same clients who ask again when they are
answered. How sure agents are, and how alike two outputs of a cluster, is taken from the real runs:
random weights write random words, of which no simulation knows. CPU times are read from /proc: this
runs on Linux only.

    real_mean_ms, real_p95_ms     from the request to the root's last token
    mean_ms, p95_ms               the same, simulated
    mean_error, p95_error         simulated / real - 1
    decode_error, prefill_error   of the mean length of the agents' decode and prefill spans
    cores                         of the machine, less those that other processes used meanwhile; as
    simulated real_cut_off, cut_off         agents of a request that an early exit ended
"""

import argparse
import asyncio
import logging
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from report import Row

    from benchmarks.simulation_error.real import Measured, Trace, Workload
    from shell_router.config import Config

TITLE = (
    "Simulated against real: three embedded pairs and an embedder that share the machine's cores"
)
PROFILED = ((32, 128, 512, 1536), (1, 3, 9), 32)
"""Lengths, batches and new tokens of the profiles; the longest prompt is that of an agent who reads
nine others.
"""
WRONG_INPUT = 2


def main() -> int:
    """Measure, simulate and print; 2 for an error that says what to do."""
    options = parser().parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the router's command does
    logging.basicConfig(level="WARNING", format="%(message)s")
    import uvloop
    from report import report

    from benchmarks.overlap.engines import embedded_pairs
    from benchmarks.simulation_error.real import Workload
    from shell_router.cli.options import split_values
    from shell_router.errors import ShellRouterError

    workload = Workload(
        options.new_tokens,
        options.question_tokens,
        split_values(options.clients, int),
        turns=options.turns,
    )
    try:
        measured, engine = uvloop.run(measure(embedded_pairs(), workload, options.rounds))
    except ShellRouterError as error:
        print(f"simulation_error.py: {error}", file=sys.stderr)
        return WRONG_INPUT
    report(
        TITLE, list(rows(measured, workload)), engine=engine, simulated=True, as_json=options.json
    )
    return 0


def parser() -> argparse.ArgumentParser:
    """All options."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--rounds", type=int, default=4)
    found.add_argument(
        "--turns", type=int, default=2, help="questions of a client in a round (default 2)"
    )
    found.add_argument("--clients", default="1,4", help="how many ask at a time (default 1,4)")
    found.add_argument("--new-tokens", type=int, default=128)
    found.add_argument("--question-tokens", type=int, default=200)
    found.add_argument("--json", action="store_true", help="end with one JSON object")
    return found


async def measure(config: "Config", workload: "Workload", rounds: int) -> tuple["Measured", str]:
    """What was measured, and what ran, in words. SIGTERM stops all that was started."""
    from benchmarks.overlap.engines import engine_words
    from benchmarks.simulation_error.real import Measured, all_settings, running_deployment
    from shell_router.lab.simulation.profiling import Amount

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    settings = all_settings(config.models, workload.new_tokens)
    async with running_deployment(config) as deployment:
        timings = deployment.timings(Amount(*PROFILED))
        measured = Measured(deployment, settings, workload, timings)
        for _ in range(1 + rounds):
            await measured.round()
        return measured, await engine_words(config)


def rows(measured: "Measured", workload: "Workload") -> "Iterator[Row]":
    """A row per setting and number of clients."""
    from benchmarks.simulation_error.simulated import simulated_traces
    from shell_router.lab.simulation.settings import SimulatedEmbedding

    costs, (text_s, token_s) = measured.costs, measured.embedding_s
    for (name, at_once), real in measured.traces.items():
        cores = measured.cores[name, at_once]
        topology = measured.settings[name]
        confidence, alike = judged(real)
        embedder = SimulatedEmbedding(text_s, token_s, same=alike, different=alike)
        found = simulated_traces(topology, costs, workload, at_once, cores, embedder, confidence)
        yield {
            "setting": name,
            "clients": at_once,
            "requests": len(real),
            "cores": statistics.mean(cores),
            **{f"real_{key}_ms": 1e3 * value for key, value in latencies(real).items()},
            **{f"{key}_ms": 1e3 * value for key, value in latencies(found).items()},
            **{
                f"{key}_error": value / latencies(real)[key] - 1
                for key, value in latencies(found).items()
            },
            "decode_error": mean_span_s(found, "decode") / mean_span_s(real, "decode") - 1,
            "prefill_error": mean_span_s(found, "prefill") / mean_span_s(real, "prefill") - 1,
            "real_cut_off": cut_off(real),
            "cut_off": cut_off(found),
        }


def judged(traces: "Sequence[Trace]") -> tuple[float, float]:
    """Mean confidence and similarity of the first two outputs that an early exit judged; anything
    where none was.

    P of two equally confident outputs is (2 + similarity) / 3: see `early_exit.gate.score`.
    """
    pairs = [one for trace in traces for one in trace["exits"] if len(one["completed"]) == 2]
    if not pairs:
        return 0.9, 0.5
    agreement = statistics.mean(one["agreement"] for one in pairs)
    return statistics.mean(one["confidence"] for one in pairs), min(
        1.0, max(0.01, 3 * agreement - 2)
    )


def latencies(traces: "Sequence[Trace]") -> dict[str, float]:
    """Mean and 95th percentile of the requests' seconds."""
    import numpy as np

    seconds = [trace["duration_s"] for trace in traces]
    return {"mean": statistics.mean(seconds), "p95": float(np.percentile(seconds, 95))}


def mean_span_s(traces: "Sequence[Trace]", name: str) -> float:
    """Mean seconds of the agents' spans of that name, of those that ended."""
    return statistics.mean(
        span["end_s"] - span["start_s"]
        for trace in traces
        for agent in trace["agents"].values()
        for span in agent["spans"]
        if span["name"] == name and span["end_s"] is not None
    )


def cut_off(traces: "Sequence[Trace]") -> float:
    """Agents of a request that were cut off, in the mean."""
    return statistics.mean(
        sum(agent["state"] not in ("finished", "skipped") for agent in trace["agents"].values())
        for trace in traces
    )


if __name__ == "__main__":
    sys.exit(main())
