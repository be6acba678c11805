"""Experts that are models on embedded pairs: a load starts the model's pair, an unload ends it."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from shell_router.engines.address import PairAddress
from shell_router.engines.checkpoints import kv_token_bytes, weight_bytes
from shell_router.engines.embedded.launch import START_LIMIT_S, EmbeddedFleet
from shell_router.engines.embedded.settings import EmbeddedSettings
from shell_router.engines.embedded.shared_spawner import MakeSpawner
from shell_router.engines.pool import PairPool
from shell_router.engines.prompted import generate_all, refuse_host_memory
from shell_router.expert_pools.values import Expert

NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
SERVERS, KEPT_KV = 2, 3
"""Both servers hold the weights; tokens are in work on both, and kept by the prefill server's prefix cache."""


def pair_expert(
    name: str, settings: EmbeddedSettings, architecture: str, usage: float = 0.0, after: frozenset[str] = frozenset()
) -> Expert:
    """The expert that a pair with these settings is, with the most memory that its two servers take.

    That is the weights twice, and the KV of three times `max_total_tokens`; what each process takes besides, some
    hundred MB, shared in part, is not in it. Samples take nothing beyond it: their costs have no activation_bytes.

    Raises ConfigError for a folder that is missing or not whole.
    """
    folder, number_bytes = Path(settings.model_path), NUMBER_BYTES[settings.dtype]
    kv_bytes = kv_token_bytes(folder, number_bytes) * settings.max_total_tokens
    memory_bytes = SERVERS * weight_bytes(folder, number_bytes) + KEPT_KV * kv_bytes
    return Expert(name, architecture, memory_bytes, usage, after)


class PairExperts:
    """Meets `expert_pools.Experts`. A sample is a `Prompt`, an output a `Generated`.

    `settings_of` tells the pair of an expert on an executor. Pairs are forks of `spawner`'s process; with a
    `SharedSpawner` a load takes no import. There is no host tier.
    """

    def __init__(
        self,
        settings_of: Callable[[str, str], EmbeddedSettings],
        spawner: MakeSpawner,
        *,
        start_limit_s: float = START_LIMIT_S,
    ) -> None:
        self._settings_of = settings_of
        self._spawner = spawner
        self._start_limit_s = start_limit_s
        self._running: dict[tuple[str, str], tuple[PairPool, AsyncExitStack]] = {}

    async def load(self, expert: Expert, place: str) -> None:
        """Returns when the pair serves. Raises EngineError where it does not start: nothing of it is left then."""
        refuse_host_memory(place)
        settings = self._settings_of(expert.name, place)
        async with AsyncExitStack() as started:
            fleet = EmbeddedFleet({expert.name: settings}, start_limit_s=self._start_limit_s, spawner=self._spawner)
            pair = (await started.enter_async_context(fleet))[expert.name]
            address = PairAddress(pair.prefill_url, pair.decode_url, pair.bootstrap_host, pair.bootstrap_port)
            pool = PairPool(address)
            started.push_async_callback(pool.aclose)
            await pool.ready()
            self._running[expert.name, place] = pool, started.pop_all()

    async def unload(self, expert: Expert, place: str) -> None:
        """Returns when its processes have ended."""
        _, started = self._running.pop((expert.name, place))
        await started.aclose()

    async def run(self, expert: Expert, place: str, samples: Sequence[Any]) -> Sequence[Any]:
        """One `Generated` per `Prompt`; one that the pair refuses has an ExpertFailed in its place."""
        pool, _ = self._running[expert.name, place]
        return await generate_all(pool, expert, samples)
