"""The models of a deployment, each with its tokenizer and its running pair."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from shell_router.config import Config, EmbeddedSection, ModelSettings
from shell_router.core.model import ServedModel
from shell_router.engines.address import PairAddress, PairLimits
from shell_router.engines.breaker import BreakerSettings
from shell_router.engines.embedded.launch import EmbeddedFleet, EmbeddedPair
from shell_router.engines.embedded.settings import EmbeddedSettings
from shell_router.engines.embedded.shared_spawner import MakeSpawner
from shell_router.engines.embedded.spawner_client import SpawnerClient
from shell_router.engines.pool import PairPool
from shell_router.engines.retries import RetrySettings
from shell_router.errors import EngineError, EngineStalled
from shell_router.wiring.adapters import adapters_of
from shell_router.wiring.model_files import ModelFiles, address_of, embedded_settings, read_files

log = logging.getLogger(__name__)

RETRY_S = 0.5
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class RunningModel:
    """A model as requests see it, and the pairs behind it."""

    served: ServedModel
    pool: PairPool
    addresses: Sequence[PairAddress]
    engine: str
    """What serves it, in words."""
    vocabulary: int
    """Token ids are below it."""
    restarts: Callable[[], Mapping[str, int]]
    """How often each of its embedded servers was started again, by "alias/mode"."""


@asynccontextmanager
async def running_models(
    config: Config, tell: Callable[[str], None], spawner: MakeSpawner = SpawnerClient, host: str = LOOPBACK
) -> AsyncIterator[Mapping[str, RunningModel]]:
    """Every model by its alias, all started at the same time; `tell` gets a line per step.

    Embedded pairs are forks of `spawner`'s process, and listen on `host`, an address of this machine.

    Raises ConfigError and EngineError.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shell-router-")))
        files = await asyncio.to_thread(read_files, config.models, folder)
        embedded = {
            alias: embedded_settings(model, files[alias], host)
            for alias, model in config.models.items()
            if not model.pairs
        }
        fleet = await _fleet(embedded, config.limits.engine_start_s, stack, tell, spawner)
        addresses = _addresses(config, fleet)
        pools = {alias: await _pool(alias, found, config, files[alias]) for alias, found in addresses.items()}
        for pool in pools.values():
            stack.push_async_callback(pool.aclose)
        await _until_ready(pools, config.limits.engine_start_s, tell)
        for pool in pools.values():
            await stack.enter_async_context(pool.followed())
        engines = {alias: await _engine(model, pools[alias]) for alias, model in config.models.items()}
        yield {
            alias: RunningModel(
                _served(alias, pools[alias], files[alias]),
                pools[alias],
                addresses[alias],
                engines[alias],
                files[alias].vocabulary,
                _restarts(fleet, alias),
            )
            for alias in config.models
        }


async def _fleet(
    embedded: Mapping[str, EmbeddedSettings],
    start_limit_s: float,
    stack: AsyncExitStack,
    tell: Callable[[str], None],
    spawner: MakeSpawner,
) -> EmbeddedFleet:
    """The embedded pairs, started, and ended by `stack`; an empty fleet where there are none."""
    fleet = EmbeddedFleet(embedded, start_limit_s=start_limit_s, on_progress=tell, spawner=spawner)
    return await stack.enter_async_context(fleet) if embedded else fleet


async def _engine(model: ModelSettings, pool: PairPool) -> str:
    """What serves the model, in words; pairs are asked what they are."""
    if not model.pairs:
        kind = f"embedded pair, {(model.embedded or EmbeddedSection()).device}"
    else:
        kind = await _kind_of(pool)
    return f"{kind}, random weights" if model.random else kind


async def _kind_of(pool: PairPool) -> str:
    try:
        return engine_kind(await pool.version())
    except EngineError as error:
        log.warning("an engine does not say what it is: %s", error)
        return "engine of unknown kind"


def engine_kind(version: str) -> str:
    """What a server is that names itself by `version`; one that has a number is SGLang."""
    return {"scripted": "scripted engine", "embedded": "embedded pair"}.get(version, f"SGLang {version}")


def _restarts(fleet: EmbeddedFleet, alias: str) -> Callable[[], Mapping[str, int]]:
    return lambda: {name: times for name, times in fleet.restarts.items() if name.rpartition("/")[0] == alias}


def _addresses(config: Config, fleet: Mapping[str, EmbeddedPair]) -> Mapping[str, Sequence[PairAddress]]:
    """Where each model's pairs are."""
    started = {
        alias: [PairAddress(pair.prefill_url, pair.decode_url, pair.bootstrap_host, pair.bootstrap_port)]
        for alias, pair in fleet.items()
    }
    return started | {alias: [*map(address_of, model.pairs)] for alias, model in config.models.items() if model.pairs}


async def _pool(alias: str, addresses: Sequence[PairAddress], config: Config, files: ModelFiles) -> PairPool:
    limits = config.limits
    return PairPool(
        *addresses,
        limits=PairLimits(stall_s=limits.engine_stall_s),
        retries=RetrySettings(attempts=limits.engine_attempts),
        breaker=BreakerSettings(failures=limits.breaker_failures, open_s=limits.breaker_open_s),
        vocabulary=files.vocabulary,
        scheduling=config.scheduling,
        adapters=await asyncio.to_thread(adapters_of, alias, config.models[alias]),
    )


def _served(alias: str, pool: PairPool, files: ModelFiles) -> ServedModel:
    return ServedModel(alias, pool, files.tokenizer, files.context_length)


async def _until_ready(pools: Mapping[str, PairPool], limit_s: float, tell: Callable[[str], None]) -> None:
    """Return when every server is healthy and its way of prefill-only is known. Raises the first EngineError."""
    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
            for alias, pool in pools.items():
                tasks.create_task(_probe(alias, pool, tell))
    except TimeoutError as error:
        raise EngineStalled(
            f"The engines were not ready within {limit_s:g} s.", remedy="Raise limits.engine_start_s."
        ) from error
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _probe(alias: str, pool: PairPool, tell: Callable[[str], None]) -> None:
    """Wait for the servers, which may still be loading; the caller sets the limit."""
    waiting = False
    while True:
        try:
            await pool.ready()
            break
        except EngineError as error:
            if not waiting:
                tell(f"model {alias}: waiting for its engines ({error})")
            waiting = True
            await asyncio.sleep(RETRY_S)
    ways = await pool.probe()
    tell(f"model {alias} is ready; prefill-only by {' and '.join(sorted(set(ways)))}")
    if "pair" in ways:
        log.warning("model %s: no prefill-only request warms the cache; one-token requests take its place", alias)
