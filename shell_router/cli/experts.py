"""`shell-router experts`: record, place; and `shell-router components profile`."""

import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shell_router.cli.options import (
    NONE,
    KeyVariable,
    Several,
    argument,
    examples,
    listed,
    option,
    print_table,
    require_writable,
    run,
    say,
    secret,
    takes,
    write,
)
from shell_router.errors import ConfigError, DataError

if TYPE_CHECKING:
    from shell_router.experts.placement import ExpertRecord, Placement
    from shell_router.experts.server_control import ExpertRecorder

app = typer.Typer(help="Place the experts of a model on GPUs.", no_args_is_help=True)

components = typer.Typer(help="Measure a pool of components.", no_args_is_help=True)

Algorithm = Literal["swap", "gimbal", "eplb", "contiguous"]
POOL_BATCHES = Several((1, 2, 3, 4, 6, 8, 12, 16, 24, 32))

Record = Annotated[Path, argument("RECORD", "What `experts record` wrote.")]
PlacementFile = Annotated[Path, option("The placement, as SGLang's JSON.", "--out", metavar="FILE")]
Chosen = Annotated[
    Algorithm, option("Placement algorithm; `eplb` and `contiguous` are baselines.", "--algorithm")
]


@dataclass(frozen=True)
class Server:
    """An SGLang server, the environment variable that holds its key, and the limit for a
    request."""

    url: Annotated[str, argument("URL", "An SGLang server that records experts.")]
    api_key_env: KeyVariable = None
    timeout_s: Annotated[float, option("Limit for one request, in seconds.", "--timeout-s")] = 600.0

    @asynccontextmanager
    async def recorder(self) -> "AsyncIterator[ExpertRecorder]":
        """What has it record while the context is open. Raises ConfigError where it cannot."""
        import aiohttp

        from shell_router.experts.server_control import ExpertRecorder

        key = secret(self.api_key_env)
        async with aiohttp.ClientSession() as session:
            found = ExpertRecorder(session, self.url, api_key=key, limit_s=self.timeout_s)
            await found.require_recording()
            yield found


@app.command(
    epilog=examples(
        "shell-router experts record http://127.0.0.1:30000 --seconds 600 --out record.npz"
    )
)
@takes(server=Server)
def record(
    server: Server,
    out: Annotated[Path, option("The record, as NumPy's .npz.", metavar="FILE")],
    seconds: Annotated[float, option("Record for S seconds what the server serves.", metavar="S")],
) -> None:
    """Have a server record which experts its tokens choose."""
    run(recorded(server, out, seconds))


@app.command(epilog=examples("shell-router experts place record.npz --gpus 8 --out placement.json"))
def place(
    record: Record,
    out: PlacementFile,
    gpus: Annotated[
        int, option("Expert-parallel size: GPUs that share the experts.", metavar="N", least=1)
    ],
    algorithm: Chosen = "swap",
) -> None:
    """Write the placement that SGLang loads with --init-expert-location.

    Prints its balance and its traffic between GPUs, and those of all other algorithms.
    """
    from shell_router.experts.placement import ALGORITHMS
    from shell_router.experts.placement.files import placement_text, read_record

    require_writable(out)
    known = read_record(record)
    found, row = _placed(algorithm, known, gpus)
    write(out, placement_text(found, known))
    rows = [row, *(_placed(name, known, gpus)[1] for name in ALGORITHMS if name != algorithm)]
    print_table(f"{_summary(known)}, on {gpus} GPUs", rows, width=100)
    print(f"{out}: start SGLang with --ep-size {gpus} --init-expert-location {out}")


async def recorded(server: Server, out: Path, seconds: float) -> None:
    """Have the server record for `seconds`, and write what it recorded."""
    import asyncio

    require_writable(out)
    async with server.recorder() as recorder:
        found = _kept(out, await recorder.record(partial(asyncio.sleep, seconds)))
    print(f"{out}: {_summary(found)}")


def _kept(file: Path, archive: bytes) -> "ExpertRecord":
    """The record that a server sent, written to `file`. Raises DataError where it holds none."""
    from shell_router.experts.placement.files import read_record

    try:
        file.write_bytes(archive)
    except OSError as error:
        raise DataError(
            f"{file}: {error.strerror}.", remedy="Name a file that you may write."
        ) from error
    return read_record(file)


def _placed(name: str, record: "ExpertRecord", gpus: int) -> tuple["Placement", Mapping[str, str]]:
    """The algorithm's placement, and its row of a table."""
    from shell_router.experts import placement

    started_s = time.perf_counter()
    found = placement.place(name, record, gpus)
    of = placement.measures(record, found)
    row = {
        "placement": name,
        "balance": f"{of.balance:.4f}",
        "worst layer": f"{of.worst_balance:.4f}",
        "D": f"{of.deviation:.2%}",
        "traffic": f"{of.traffic:.2%}" if record.has_transitions else "-",
        "seconds": f"{time.perf_counter() - started_s:.2f}",
    }
    return found, row


def _summary(record: "ExpertRecord") -> str:
    if record.has_transitions:
        followed = "with transitions"
    else:
        followed = "without transitions"
    counted = f"{record.activations.sum():,.0f} activations"
    return f"{len(record.layers)} layers of {record.experts} experts, {counted}, {followed}"


@components.command(
    epilog=examples(
        "shell-router components profile pool.yaml --sample requests.jsonl --devices cuda:0"
    )
)
def profile(
    pool: Annotated[Path, argument("POOL", "The pool's YAML file.")],
    devices: Annotated[Several, listed(str, "Measure only these devices. Default: all.")] = NONE,
    keep_costs: Annotated[
        bool, option("Measure nothing; update only usage and the split of memory.", "--keep-costs")
    ] = False,
    rounds: Annotated[int, option("Report medians of this many rounds.", least=1)] = 5,
    batches: Annotated[Several, listed(int, "Batch sizes to measure.", "N,N,…")] = POOL_BATCHES,
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
    sys.path.insert(
        0, str(Path.cwd())
    )  # where the modules that the pool names lie, unless they are installed
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler logs to stderr otherwise
    from shell_router.experts.components.measuring import Amount
    from shell_router.lab.simulation.components import ProfileOptions, find_split, measure

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
