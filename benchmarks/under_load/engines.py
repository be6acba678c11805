"""Two pairs of every model: embedded ones of the shipped family, or SGLang's on the CPU."""

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.overlap.engines import CPU_DEPLOYMENT, running_deployment
from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
from launch.sglang_cpu.pair import free_ports
from shell_router.app import load_config
from shell_router.config import Config, EmbedderSettings, PairSettings
from shell_router.engines.address import PairAddress
from shell_router.engines.sglang import SglangPair
from shell_router.errors import ConfigError
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.standins.embedded.fleet import EmbeddedFleet
from shell_router.standins.embedded.settings import EmbeddedSettings

MODELS = Path(__file__).parents[2] / "models"
EMBEDDED = {"small": 0.5, "medium": 0.3, "large": 0.2}
"""By model its share of the requests: the larger, the less it can answer."""
SGLANG = {"tiny": 1.0}
PAIRS = 2


@dataclass(frozen=True, slots=True)
class Engines:
    """The pairs of every model, and what they are in words."""

    pairs: Mapping[str, Sequence[PairAddress]]
    words: str

    @asynccontextmanager
    async def scheduled(
        self, scheduling: SchedulingSettings
    ) -> AsyncIterator[Mapping[str, SglangPair]]:
        """The models as a router sees them that schedules so, and follows what the engines tell."""
        async with AsyncExitStack() as stack:
            pools = {}
            for model, addresses in self.pairs.items():
                pools[model] = SglangPair(*addresses, scheduling=scheduling)
                stack.push_async_callback(pools[model].aclose)
                await stack.enter_async_context(pools[model].fleet.follow())
            yield pools


@asynccontextmanager
async def embedded() -> AsyncIterator[Engines]:
    """The tiny models. As pairs of a cluster have GPUs of their own, the first pair of each keeps
    to one core, the second to another.
    """
    cores = os.cpu_count() or 1
    settings = {
        f"{model}-{pair}": EmbeddedSettings(
            str(MODELS / model), cores=(pair % cores,), incremental_streaming_output=True
        )
        for model in EMBEDDED
        for pair in range(PAIRS)
    }
    async with EmbeddedFleet(settings) as fleet:
        pairs = {
            model: [fleet[f"{model}-{pair}"].address for pair in range(PAIRS)] for model in EMBEDDED
        }
        yield Engines(
            pairs, f"{PAIRS} embedded pairs of each of {', '.join(EMBEDDED)}, each pair on one core"
        )


@asynccontextmanager
async def sglang() -> AsyncIterator[Engines]:
    """Two pairs of SGLang on the CPU, of a tiny model of random weights. Raises ConfigError and
    EngineError.
    """
    if built_environment() is None:
        raise ConfigError(
            "the SGLang environment is not built.", remedy=f"Build it with: {BUILD_COMMAND}"
        )
    async with running_deployment(_two_pairs()) as services:
        pools = {model: services.relays[model] for model in SGLANG}
        pairs = {
            model: pool.fleet.addresses
            for model, pool in pools.items()
            if isinstance(pool, SglangPair)
        }
        version = services.engines["tiny"]
        yield Engines(pairs, f"{PAIRS} pairs of {version} on the CPU")


def _two_pairs() -> Config:
    """The deployment of the CPU, its model on two pairs."""
    config = load_config(CPU_DEPLOYMENT, os.environ)
    (model, *_) = config.models.values()
    return replace(
        config,
        models={"tiny": replace(model, pairs=tuple(_pair(model.pairs[0]) for _ in range(PAIRS)))},
        topologies=(),
        embedder=EmbedderSettings(model="none"),
    )


def _pair(pair: PairSettings) -> PairSettings:
    prefill, decode, bootstrap = free_ports(3)
    urls = {"prefill": f"http://127.0.0.1:{prefill}", "decode": f"http://127.0.0.1:{decode}"}
    return replace(pair, bootstrap_port=bootstrap, **urls)
