"""What becomes of requests when something breaks: shell-router, sglang-router 0.3.2 and smg, on one
real SGLang pair.

    python benchmarks/faults.py [--only FAULT] [--rounds N] [--json]

The pair runs on this machine's CPU (launch/sglang_cpu/environment.sh builds its environment; 5 GB
of memory). In front of it stands one router at a time, started anew for every fault, and is sent
native streamed requests to /generate. Between faults the pair is made whole: killed servers are
started again, all requests aborted, one request served.

    error_s     from the fault, or from the sending of a request that meets one, until the client
    knows that its
                request has failed; a client that has heard nothing after 30 s leaves
    client_got  what it received: an HTTP status, an error event or an abort in the stream, a broken
    connection held        requests that the servers still hold 2 s after the fault, running or in
    whatever queue; one that is
                killed or stalled then is not asked
    held_after  the same, 2 s after the client knew or left, a stalled server going on
    next        whether the next request is served, all servers running again
    next_s      until a request is served, a new one being sent half a second after one has failed

All routers run with their defaults, retries and circuit breakers on, others' as in
router_overhead.py. But for `decode stalled` our limit for a silent engine is 2 s instead of 60 s;
sglang-router and smg, its successor, have no such limit, only one for whole requests (1800 s).

    python benchmarks/faults.py --table remote|endless

These need no SGLang, and start this router alone, anew for each fault. `remote` puts it before a
played server of OpenAI's API with the fault. Its limit for silence is 2 s instead of 60 s.

    after_s     until the client had all of its reply; asked: how often the server was asked
    held        requests that the router or the server still hold 2 s later
    key_found   whether the server's key is in the replies, the log, the metrics or the traces

`endless` has a decode server send 512 MB without end, and another request of the router stream a
token every 10 ms from a scripted pair. more_memory_mb is by how much the fault raises the peak of
the router's memory, longest_gap_ms the longest time between two pieces of the other stream.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, mode

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import report

from benchmarks.faults.measured import FAULTS, Row, measured_rows
from benchmarks.faults.played import (
    ENDLESS,
    REMOTE_FAULTS,
    measure_endless,
    measure_remote,
)
from benchmarks.faults.servers import run_engines
from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment

TABLES = {"pair": FAULTS, "remote": REMOTE_FAULTS, "endless": ENDLESS}
TITLE = "Faults: shell-router, sglang-router 0.3.2 and smg in front of one SGLang pair"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=TABLES, default="pair", help="default pair")
    known = "; ".join(map(", ".join, TABLES.values()))
    only = f"this fault alone, may be given several times: {known}"
    parser.add_argument("--only", metavar="FAULT", action="append", help=only)
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all faults (default 1)")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    names = options.only or list(TABLES[options.table])
    if not set(names) <= set(TABLES[options.table]):
        parser.error(f"--only takes one of {', '.join(TABLES[options.table])}")
    if options.table != "pair":
        measure_played = {"remote": measure_remote, "endless": measure_endless}[options.table]
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            rounds = [
                asyncio.run(measure_played(names, Path(folder))) for _ in range(options.rounds)
            ]
        rows = [middle_row(rows) for rows in zip(*rounds, strict=True)]
        report(
            f"Faults: {options.table}",
            rows,
            engine="a played server",
            simulated=False,
            as_json=options.json,
        )
        return
    venv = built_environment()
    if venv is None:
        sys.exit(f"The SGLang environment is not built. Build it with: {BUILD_COMMAND}")
    rows = asyncio.run(measure(venv, names, options.rounds))
    report(
        TITLE,
        rows,
        engine="SGLang 0.5.23 on the CPU, random weights",
        simulated=False,
        as_json=options.json,
    )


def middle_row(rows: Sequence[Row]) -> Row:
    """Return the median of each figure, and the most common of each other value."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return {
        key: median(values) if isinstance(values[0], float) else mode(values)
        for key, values in columns.items()
    }


async def measure(venv: Path, names: list[str], rounds: int) -> list[Row]:
    """Start everything, measure, stop everything, also after SIGTERM."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        async with run_engines(venv, Path(folder)) as engines:
            return await measured_rows(
                engines, {name: FAULTS[name] for name in names}, rounds, Path(folder)
            )


if __name__ == "__main__":
    main()
