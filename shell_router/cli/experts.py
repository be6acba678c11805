"""The commands `shell-router experts record` and `shell-router experts place`."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shell_router.cli.options import (
    KeyVariable,
    argument,
    examples,
    option,
    print_table,
    require_writable,
    run,
    secret,
    takes,
    write,
)
from shell_router.errors import DataError

if TYPE_CHECKING:
    from shell_router.experts.placement import ExpertRecord, Placement
    from shell_router.experts.server_control import ExpertRecorder

app = typer.Typer(help="Place the experts of a model on GPUs.", no_args_is_help=True)

Algorithm = Literal["swap", "gimbal", "eplb", "contiguous"]

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
