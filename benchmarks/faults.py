"""What becomes of requests when something breaks: shell-router and sglang-router 0.3.2, on one real
SGLang pair.

    python benchmarks/faults.py [--only FAULT] [--rounds N] [--smg VENV] [--json]

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

Both routers run with their defaults, retries and circuit breakers on, sglang-router as in
router_overhead.py. But for `decode stalled` our limit for a silent engine is 2 s instead of 60 s;
sglang-router has no such limit, only one for whole requests (1800 s). With --smg also the Shepherd
Model Gateway, sglang-router's successor, of a virtual environment where `pip install smg` was run.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import report

from benchmarks.faults.measured import FAULTS, Row, measured_rows
from benchmarks.faults.servers import ROUTERS, run_engines, smg_in
from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment

TITLE = "Faults: shell-router and sglang-router 0.3.2 in front of one SGLang pair"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    only = f"this fault alone, may be given several times: {', '.join(FAULTS)}"
    parser.add_argument("--only", choices=FAULTS, metavar="FAULT", action="append", help=only)
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all faults (default 1)")
    parser.add_argument(
        "--smg", type=Path, metavar="VENV", help="measure the smg of this environment, too"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    venv = built_environment()
    if venv is None:
        sys.exit(f"The SGLang environment is not built. Build it with: {BUILD_COMMAND}")
    if options.smg is not None:
        ROUTERS["smg"] = smg_in(options.smg)
    rows = asyncio.run(measure(venv, options.only or list(FAULTS), options.rounds))
    report(
        TITLE,
        rows,
        engine="SGLang 0.5.23 on the CPU, random weights",
        simulated=False,
        as_json=options.json,
    )


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
