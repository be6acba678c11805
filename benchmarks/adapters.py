"""Twelve LoRA adapters, room for three: what is gained by deciding whose turn it is.

    python benchmarks/adapters.py [--requests N] [--clients N] [--adapters N] [--room N] [--rounds
    N] [--json] python benchmarks/adapters.py --engine simulated

The same stream is served under each setting, in turns, by the router's own client of an SGLang
pair. Adapter k of n is wanted as often as 1/k says. Clients ask for the stream's next request as
soon as they have been answered. All settings begin with no adapter loaded.

    first come         who comes first gets the next place (as in Samba-CoE)
    window             within a window requests for what is loaded go first
    adapter by adapter the stream sorted by adapter, as if all requests had been there from the
    start: the outputs that
                       the others have to equal

    per_s              requests answered a second
    p50_s, p95_s       from a request to its last token
    loads, on_prefill  adapters loaded on decode, and on prefill
    fewest             loads of a single server in any order: every adapter once
    fewest_in_order    the same for the stream in its order, one request after the other, by
    Belady's rule load_ms            one load on one server, in the mean
    unequal            (not simulated) outputs that differ from those of the adapter alone

`--engine simulated` is one server in virtual time, whose batches and loads take what
benchmarks/adapters/serving.py says, under several windows.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from report import Row

    from benchmarks.adapters.serving import Amount, Asked, Served
    from shell_router.routing.adapter_cache import AdapterSettings

ALONE = "adapter by adapter"
WRONG_INPUT = 2


def main() -> int:
    """Measure and print; 2 for an error that says what to do."""
    options = parser().parse_args()
    sys.path.insert(
        0, str(Path(__file__).parents[1])
    )  # `launch` is of this repository, not of the package
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the router's command does
    logging.basicConfig(level="WARNING", format="%(message)s")
    import uvloop
    from report import report

    from benchmarks.adapters.serving import Amount
    from shell_router.errors import ShellRouterError

    amount = Amount(options.requests, options.clients, options.adapters, options.room)
    title = (
        f"{amount.requests} requests of {amount.clients} clients for {amount.adapters} "
        f"adapters, room for {amount.room}"
    )
    if options.engine == "simulated":
        from benchmarks.adapters.serving import windows

        report(title, windows(amount), engine="one server", simulated=True, as_json=options.json)
        return 0
    try:
        engine, rows = uvloop.run(measure(amount, options.rounds, options.window_s))
    except ShellRouterError as error:
        print(f"adapters.py: {error}", file=sys.stderr)
        return WRONG_INPUT
    report(title, rows, engine=engine, simulated=False, as_json=options.json)
    return 0


def parser() -> argparse.ArgumentParser:
    """All options."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--engine", choices=("sglang", "simulated"), default="sglang")
    found.add_argument("--requests", type=int, default=300)
    found.add_argument("--adapters", type=int, default=12)
    found.add_argument("--room", type=int, default=3)
    found.add_argument("--clients", type=int, default=24, help="requests at a time (default 24)")
    found.add_argument("--window-s", type=float, default=10.0)
    found.add_argument(
        "--rounds", type=int, default=1, help="each with another stream; means are shown"
    )
    found.add_argument("--json", action="store_true", help="end with one JSON object")
    return found


def settings(window_s: float) -> "Mapping[str, AdapterSettings]":
    """What is compared."""
    from shell_router.routing.adapter_cache import AdapterSettings

    return {
        "first come": AdapterSettings(window_s=0.0, wait_s=600.0),
        "window": AdapterSettings(window_s=window_s, wait_s=600.0),
        ALONE: AdapterSettings(window_s=0.0, wait_s=600.0),
    }


async def measure(amount: "Amount", rounds: int, window_s: float) -> "tuple[str, list[Row]]":
    """What ran, in words, and one row per setting. SIGTERM stops all that was started."""
    from benchmarks.adapters.engines import RANK, make_model, running
    from benchmarks.adapters.made import make_adapter

    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="adapters-") as scratch:
        folder = Path(scratch)
        model = make_model(folder)
        folders = {
            f"adapter-{number}": make_adapter(
                folder / f"adapter-{number}", model, seed=number, rank=RANK
            )
            for number in range(amount.adapters)
        }
        found: dict[str, list[Row]] = {}
        async with running(model, amount.room, folder) as pair:
            for seed in range(rounds):
                named = {
                    name: replace(one, folders=folders, max_loaded_adapters=amount.room)
                    for name, one in settings(window_s).items()
                }
                for name, row in (await _round(pair.address, model, amount, named, seed)).items():
                    found.setdefault(name, []).append(row)
        return pair.words, [{"setting": name, **_means(rows)} for name, rows in found.items()]


async def _round(
    address: object,
    model: Path,
    amount: "Amount",
    named: "Mapping[str, AdapterSettings]",
    seed: int,
) -> "Mapping[str, Row]":
    """The same stream under every setting; which goes first changes from round to round."""
    import json

    from benchmarks.adapters.serving import each_alone, served, stream
    from shell_router.engines.sglang import SglangPair

    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    asked = stream(amount, vocabulary, seed)
    results: dict[str, Served] = {}
    names = list(named)
    for name in (*names[seed % len(names) :], *names[: seed % len(names)]):
        pool = SglangPair(address, adapters=named[name])
        await pool.probe()
        results[name] = await (each_alone if name == ALONE else served)(pool, asked, amount.clients)
        await pool.aclose()
    return {name: _row(results[name], results[ALONE], asked, amount) for name in names}


def _row(run: "Served", alone: "Served", asked: "list[Asked]", amount: "Amount") -> "Row":
    import numpy as np

    from benchmarks.coserve.runs import fewest_switches_in_any_order, fewest_switches_in_this_order

    order = [one.adapter for one in asked]
    return {
        "per_s": len(asked) / run.elapsed_s,
        "p50_s": float(np.percentile(run.latencies_s, 50)),
        "p95_s": float(np.percentile(run.latencies_s, 95)),
        "loads": run.loads[1],
        "on_prefill": run.loads[0],
        "fewest": fewest_switches_in_any_order(order, ()),
        "fewest_in_order": fewest_switches_in_this_order(
            order, (), dict.fromkeys(order, 1), amount.room
        ),
        "load_ms": 1e3 * run.load_s,
        "unequal": sum(one != other for one, other in zip(run.outputs, alone.outputs, strict=True)),
    }


def _means(rows: "list[Row]") -> "Row":
    return {
        key: rows[0][key] if len(rows) == 1 else fmean(row[key] for row in rows) for key in rows[0]
    }


if __name__ == "__main__":
    sys.exit(main())
