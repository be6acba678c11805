"""What the benchmark runs on: real SGLang on this machine's CPU, with room for some adapters."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.adapters.made import MODULES
from benchmarks.random_checkpoint import RandomWeights, make_random_model
from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
from launch.sglang_cpu.pair import CpuPair, make_pair
from shell_router.engines.address import PairAddress
from shell_router.errors import ConfigError

RANK = 64
WEIGHTS = RandomWeights(hidden=256, layers=4, seed=3)


@dataclass(frozen=True)
class Running:
    """A pair, its model's folder, and what it is in words."""

    address: PairAddress
    model: Path
    words: str


def make_model(folder: Path) -> Path:
    """The model of random weights that the pair serves."""
    return make_random_model(WEIGHTS, folder / "model")


@asynccontextmanager
async def running(model: Path, room: int, folder: Path) -> AsyncIterator[Running]:
    """A pair that serves while the context is open. Raises ConfigError and EngineError."""
    words = f"{WEIGHTS}, adapters of rank {RANK}"
    sglang = _sglang(model, room, folder)
    try:
        await asyncio.to_thread(sglang.start, progress=print)
        address = PairAddress(
            sglang.prefill.url, sglang.decode.url, sglang.bootstrap_host, sglang.bootstrap_port
        )
        yield Running(address, model, f"SGLang pair, cpu, float32; {words}")
    finally:
        await asyncio.to_thread(sglang.stop)


def _sglang(model: Path, room: int, folder: Path) -> CpuPair:
    venv = built_environment()
    if venv is None:
        raise ConfigError(
            "the SGLang environment is not built.", remedy=f"Build it with: {BUILD_COMMAND}"
        )
    places = str(room + 1)  # SGLang counts requests without an adapter as one more
    options = (
        *("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(RANK)),
        *(
            "--max-loras-per-batch",
            places,
            "--max-loaded-loras",
            places,
            "--lora-target-modules",
            *MODULES,
        ),
    )
    return make_pair(model, venv, folder, options=options)
