"""Measure what a pool's components cost: `python -m benchmarks.coserve.pool POOL`."""

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.coserve.pool.measuring import Amount
from benchmarks.coserve.pool.profiling import ProfileOptions, find_split, measure
from shell_router.cli.options import NONE, Several, argument, list_option, option, run, say
from shell_router.errors import ConfigError, ShellRouterError

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

POOL_BATCHES = Several((1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
WRONG_INPUT = 2


@app.command()
def profile(
    pool: Annotated[Path, argument("POOL", "The pool's YAML file.")],
    devices: Annotated[
        Several, list_option(str, "Measure only these devices. Default: all.")
    ] = NONE,
    keep_costs: Annotated[
        bool, option("Measure nothing; update only usage and the split of memory.", "--keep-costs")
    ] = False,
    rounds: Annotated[int, option("Report medians of this many rounds.", least=1)] = 5,
    batches: Annotated[
        Several, list_option(int, "Batch sizes to measure.", "N,N,…")
    ] = POOL_BATCHES,
    warm_files: Annotated[
        bool, option("Time loads of files that the system has in memory.", "--warm-files")
    ] = False,
    sample: Annotated[
        Path | None, option('Requests: JSONL, one {"chain": […]} per line.', metavar="FILE")
    ] = None,
    requests: Annotated[
        int, option("Requests that are drawn from rules to try splits on.", least=1)
    ] = 2000,
    every_s: Annotated[
        float, option("One request each S seconds; 0 sends all at once.", "--every-s", metavar="S")
    ] = 0.0,
) -> None:
    """Measure what a pool's components cost, and split its memory.

    The costs, usages and shares of memory are written to the file that the pool names as its
    profile.
    """
    # the modules that the pool names may lie here without being installed
    sys.path.insert(0, str(Path.cwd()))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler logs to stderr otherwise
    if not every_s >= 0:
        raise ConfigError(f"--every-s is {every_s}.", remedy="Give 0 or more seconds.")
    amount = Amount(batches, rounds)
    date = datetime.now(UTC).date().isoformat()
    options = ProfileOptions(
        pool,
        date,
        devices,
        amount,
        not warm_files,
        not keep_costs,
        sample=sample,
        requests=requests,
        every_s=every_s,
    )

    chains: list[tuple[str, ...]] = []

    async def measured() -> None:
        chains.extend(await measure(options, say))

    run(measured())
    if chains:
        find_split(options, chains, say)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 2 for an error."""
    try:
        app(arguments, prog_name="python -m benchmarks.coserve.pool")
    except ShellRouterError as error:
        print(error, file=sys.stderr)
        return WRONG_INPUT
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
