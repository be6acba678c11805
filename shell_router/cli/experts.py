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
    read_key,
    require_writable,
    run,
    write,
)

if TYPE_CHECKING:
    from shell_router.experts.placement import ExpertPlacement, ExpertRecord
    from shell_router.experts.server_control import ExpertRecorder

app = typer.Typer(help="Place the experts of a model on GPUs.", no_args_is_help=True)

Algorithm = Literal["swap", "gimbal", "eplb", "contiguous"]

Record = Annotated[Path, argument("RECORD", "What `experts record` wrote.")]
PlacementFile = Annotated[Path, option("The placement, as SGLang's JSON.", "--out", metavar="FILE")]
Chosen = Annotated[
    Algorithm, option("Placement algorithm; `eplb` and `contiguous` are baselines.", "--algorithm")
]


@dataclass(frozen=True)
class ExpertServer:
    """An SGLang server that records experts, and how it is reached."""

    url: str
    api_key_env: str | None = None
    timeout_s: float = 600.0

    @asynccontextmanager
    async def recorder(self) -> "AsyncIterator[ExpertRecorder]":
        """Connect to the server. Raises ConfigError if it cannot record."""
        import aiohttp

        from shell_router.experts.server_control import ExpertRecorder

        key = read_key(self.api_key_env)
        async with aiohttp.ClientSession() as session:
            recorder = ExpertRecorder(session, self.url, api_key=key, limit_s=self.timeout_s)
            await recorder.require_recording()
            yield recorder


@app.command(
    epilog=examples(
        "shell-router experts record http://127.0.0.1:30000 --seconds 600 --out record.npz"
    )
)
def record(
    url: Annotated[str, argument("URL", "An SGLang server that records experts.")],
    out: Annotated[Path, option("The record, as NumPy's .npz.", metavar="FILE")],
    seconds: Annotated[float, option("Record for S seconds what the server serves.", metavar="S")],
    api_key_env: KeyVariable = None,
    timeout_s: Annotated[
        float, option("Limit for one request, in seconds.", "--timeout-s")
    ] = 600.0,
) -> None:
    """Have a server record which experts its tokens choose."""
    run(record_experts(ExpertServer(url, api_key_env, timeout_s), out, seconds))


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
    from shell_router.experts.placement.files import format_placement, read_record
    from shell_router.lab.tables import print_table

    require_writable(out)
    counts = read_record(record)
    placement, row = _place(algorithm, counts, gpus)
    write(out, format_placement(placement, counts))
    rows = [row]
    for name in ALGORITHMS:
        if name != algorithm:
            _, row = _place(name, counts, gpus)
            rows.append(row)
    print_table(f"{_summarize(counts)}, on {gpus} GPUs", rows)
    print(f"{out}: start SGLang with --ep-size {gpus} --init-expert-location {out}")


async def record_experts(server: ExpertServer, out: Path, seconds: float) -> None:
    """Have the server record for `seconds`, and write its record to `out`."""
    import asyncio

    from shell_router.experts.placement.files import read_record

    require_writable(out)
    async with server.recorder() as recorder:
        archive = await recorder.record(partial(asyncio.sleep, seconds))
    write(out, archive)
    print(f"{out}: {_summarize(read_record(out))}")


def _place(
    name: str, record: "ExpertRecord", gpus: int
) -> tuple["ExpertPlacement", Mapping[str, str]]:
    """Place by the algorithm; return the placement and its row of a table."""
    from shell_router.experts.placement import measure_placement, place

    started_s = time.perf_counter()
    placement = place(name, record, gpus)
    took_s = time.perf_counter() - started_s
    measures = measure_placement(record, placement)
    row = {
        "placement": name,
        "balance": f"{measures.balance:.4f}",
        "worst layer": f"{measures.worst_balance:.4f}",
        "D": f"{measures.deviation:.2%}",
        "traffic": f"{measures.traffic:.2%}" if record.has_transitions else "-",
        "seconds": f"{took_s:.2f}",
    }
    return placement, row


def _summarize(record: "ExpertRecord") -> str:
    with_or_without = "with" if record.has_transitions else "without"
    activations = f"{record.activations.sum():,.0f} activations"
    return (
        f"{len(record.layers)} layers of {record.experts} experts, {activations}, "
        f"{with_or_without} transitions"
    )
