"""Which engine and whose turn, on real engines near saturation: policies and orders on the same
stream of requests.

    python benchmarks/under_load.py [--rounds N] [--requests N] [--load SHARE] [--json]
    python benchmarks/under_load.py --engine sglang

Two embedded pairs of each of the tiny models, or two pairs of SGLang on the CPU that serve one tiny
model. Ten users ask questions, go on with long chats, or have documents read, one of them four
times as often as any other; requests come as a Poisson process at `--load` of what the engines
answer when they are never idle. That is measured first. In every round all settings get the same
short stream, one after the other, another one first each time, since a machine's speed drifts; no
round finds another's prompts cached.

    TTFT, TPOT     to the first token, and per token after it
    latency        to the last token
    fairness       Jain's index of how much slower than on idle engines each user's requests are: 1
    is alike
    errors         requests that were not answered

Figures are of all rounds' requests. Ratios are to `least_running` without a queue in the same
round: the median, and in brackets the middle half of the rounds. With a queue an engine gets at
most 8 requests at once.
"""

import argparse
import asyncio
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from report import Row

    from benchmarks.under_load.measure import Round

TITLE = "Under load: which engine, and whose turn"
AMOUNTS = {"embedded": (40, 8, 1.0), "sglang": (40, 8, 0.4)}
"""Requests of a run, rounds, and what lengths are multiplied by; on a CPU, SGLang takes 20 ms per
token.
"""
CLIENTS, TIMES = 32, 4
"""Requests that are under way, and how many times those of a run are asked, to measure what the
engines can do.
"""
WRONG_INPUT = 2


def main() -> int:
    """Measure and print; 2 for an error that says what to do."""
    options = parser().parse_args()
    sys.path.insert(
        0, str(Path(__file__).parents[1])
    )  # `launch` is of this repository, not of the package
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the router's command does
    import uvloop
    from report import report

    from shell_router.errors import ShellRouterError

    try:
        engine, rows = uvloop.run(measured(options))
    except ShellRouterError as error:
        print(f"under_load.py: {error}", file=sys.stderr)
        return WRONG_INPUT
    report(TITLE, rows, engine=engine, simulated=False, as_json=options.json)
    return 0


def parser() -> argparse.ArgumentParser:
    """All options."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--engine", choices=AMOUNTS, default="embedded")
    found.add_argument("--rounds", type=int, help="default 8")
    found.add_argument("--requests", type=int, help="of a run (default 40)")
    found.add_argument(
        "--load", type=float, default=0.85, help="share of what the engines can do (default 0.85)"
    )
    found.add_argument("--policies", nargs="+", metavar="NAME", help="default all four")
    found.add_argument(
        "--orders", nargs="+", metavar="NAME", help="default: no queue and shortest_prefill"
    )
    found.add_argument("--json", action="store_true", help="end with one JSON object")
    return found


async def measured(options: argparse.Namespace) -> "tuple[str, list[Row]]":
    """What ran, in words, and one row per setting. SIGTERM stops all that was started."""
    from benchmarks.under_load.engines import EMBEDDED, SGLANG, embedded, sglang
    from benchmarks.under_load.measure import (
        BASELINE,
        ORDERS,
        POLICIES,
        alone,
        alone_s,
        capacity_per_s,
        run,
        settings,
        stream,
    )

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    count, rounds, scale = AMOUNTS[options.engine]
    count, rounds = options.requests or count, options.rounds or rounds
    models = EMBEDDED if options.engine == "embedded" else SGLANG
    compared = settings(options.policies or POLICIES, options.orders or ORDERS)
    found: dict[str, list[Round]] = {name: [] for name in compared}
    async with (embedded if options.engine == "embedded" else sglang)() as engines:
        async with engines.scheduled(compared[BASELINE]) as pools:
            unloaded = await alone_s(pools, alone(list(models), scale))
            per_s = options.load * await capacity_per_s(
                pools, stream(TIMES * count, models, scale, -1), CLIENTS, "capacity"
            )
        for turn in range(rounds):
            asked, names = stream(count, models, scale, turn), list(compared)
            first = turn * len(names) // rounds
            for name in names[first:] + names[:first]:
                async with engines.scheduled(compared[name]) as pools:
                    found[name].append(await run(pools, asked, per_s, f"{turn} {name}", unloaded))
    words = (
        f"{engines.words}; {per_s:.3g} requests a second, {options.load:.0%} of what they answer"
    )
    return words, [row(name, runs, found[BASELINE]) for name, runs in found.items()]


def row(name: str, runs: "Sequence[Round]", default: "Sequence[Round]") -> "Row":
    """Milliseconds of all the setting's requests, and ratios to the default: by round, but for 99th
    percentiles.
    """
    from benchmarks.under_load.measure import merged

    pooled, usual = merged(runs), merged(default)
    found: Row = {"setting": name}
    for figure, value in pooled.figures.items():
        ratios = [
            one.figures[figure] / other.figures[figure]
            for one, other in zip(runs, default, strict=True)
        ]
        found[f"{figure} ms"] = 1e3 * value
        found[f"{figure} ratio"] = (
            f"{value / usual.figures[figure]:.2f}" if "p99" in figure else spread(ratios)
        )
    found["fairness"] = pooled.fairness
    found["errors"] = len(pooled.errors)
    return found


def spread(ratios: "Sequence[float]") -> str:
    """The median, and the middle half."""
    from shell_router.core.statistics import quantile

    low, high = (quantile(ratios, share) for share in (0.25, 0.75))
    return f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    sys.exit(main())
