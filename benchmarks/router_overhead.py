"""What the router adds to a request, next to sglang-router 0.3.2 and smg in front of the same
scripted engine. smg gets an environment of its own, built once under the user's cache folder.

    python benchmarks/router_overhead.py [--quick] [--rounds N] [--json]
    python benchmarks/router_overhead.py --observed [--rounds N]    # the trees alone, page and OTLP
    on against off

All setups take turns in every round; figures are medians over the rounds, and what is `added` is
the distance to the `direct` setup of the same round, where the load client sends both legs to the
pair itself. The engine has no model and answers at once or at a given pace, so that only the
router's own work and delays are seen.

    request      small /generate requests that are not streamed: per_s with 32 connections, p50 and
    p99 of one
                 request after the other
    first token  64 streams of 64 tokens, one every 20 ms: from the request to its first token
    chunk        the same streams: from the engine's writing a chunk to the client's having it
    tree         9-3-1 agents of 32 tokens, one every 10 ms, 32 trees at a time. shell-router runs
    the tree itself;
                 for the others a client runs the layers, each behind a barrier: as lean as this
                 benchmark's load client with whole answers or streams, or with aiohttp, as people
                 write it

With --observed only trees are measured, at three routers of this project at the same time: one as
it is shipped, and two that send spans to an OTLP receiver and whose live page is open, without and
with asking trees itself. Each round starts new ones. `relative` is each round's CPU per tree over
that of the router as shipped.

    router_us    CPU of the router's process per unit, in microseconds
    client_us    CPU of the client per unit; with shell-router the tree's work is in router_us
    per_core_s   units per second of CPU that router and client spend together
    spans_us     with --observed, CPU of the process that makes and sends the spans, on the client's
    core router_busy  share of its core that the router used; load_busy the same of engine and
    client together

sglang-router leaves Nagle's algorithm on for the connections it accepts, so a client that delays
its acknowledgements, as Linux does, waits 40 ms for small segments. `quick ACKs` is the same router
with a client that does not.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import uvloop
from report import Row, report

from benchmarks.router_overhead.goals import goals
from benchmarks.router_overhead.observed import observed_goals, observed_rows
from benchmarks.router_overhead.rounds import FULL, LIMIT_S, QUICK, Amount, measured_rows
from benchmarks.router_overhead.setups import Cores, running_setups, spread

TITLE = "Router overhead: shell-router, sglang-router 0.3.2 and smg in front of one scripted engine"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one short round, in about a minute")
    parser.add_argument("--rounds", type=int, help=f"rounds of each setup (default {FULL.rounds})")
    parser.add_argument(
        "--observed", action="store_true", help="measure what the live page and OTLP cost instead"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    amount = QUICK if options.quick else FULL
    cores = spread()
    rows = uvloop.run(
        measure(cores, amount, options.rounds or amount.rounds, observed=options.observed)
    )
    for line in (observed_goals if options.observed else goals)(rows):
        print(line)
    report(TITLE, rows, engine=f"scripted engine; {cores}", simulated=False, as_json=options.json)


async def measure(cores: Cores, amount: Amount, rounds: int, *, observed: bool) -> list[Row]:
    """Start everything, measure, stop everything, also after SIGTERM."""
    os.sched_setaffinity(0, {cores.client})
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="router-overhead-") as folder:
        async with asyncio.timeout(LIMIT_S):
            if observed:
                return await observed_rows(cores, Path(folder), amount, rounds)
            async with running_setups(cores, Path(folder), amount.tree_tokens) as setups:
                return await measured_rows(setups, amount, rounds)


if __name__ == "__main__":
    main()
