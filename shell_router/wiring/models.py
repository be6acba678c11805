"""The models of a deployment, each with its tokenizer and its running pair."""

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from shell_router.config import Config, Limits
from shell_router.core.model import ServedModel
from shell_router.engines.address import PairAddress, PairLimits
from shell_router.engines.embedded.launch import EmbeddedFleet, EmbeddedPair
from shell_router.engines.pair import SglangPair
from shell_router.errors import EngineError, EngineStalled
from shell_router.wiring.model_files import ModelFiles, address_of, embedded_settings, read_files

log = logging.getLogger(__name__)

RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class RunningModel:
    """A model as requests see it, and the pair behind it."""

    served: ServedModel
    pair: SglangPair

    async def healthy(self) -> bool:
        """Whether both servers of the pair say so."""
        try:
            await self.pair.ready()
        except EngineError:
            return False
        return True


@asynccontextmanager
async def running_models(config: Config, tell: Callable[[str], None]) -> AsyncIterator[Mapping[str, RunningModel]]:
    """Every model by its alias, all started at the same time; `tell` gets a line per step.

    Raises ConfigError and EngineError.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shell-router-")))
        files = await asyncio.to_thread(read_files, config.models, folder)
        addresses = await _addresses(config, files, stack, tell)
        pairs = {alias: _pair(address, config.limits, files[alias].vocabulary) for alias, address in addresses.items()}
        for pair in pairs.values():
            stack.push_async_callback(pair.aclose)
        await _until_ready(pairs, config.limits.engine_start_s, tell)
        yield {alias: RunningModel(_served(alias, pairs[alias], files[alias]), pairs[alias]) for alias in config.models}


async def _addresses(
    config: Config, files: Mapping[str, ModelFiles], stack: AsyncExitStack, tell: Callable[[str], None]
) -> Mapping[str, PairAddress]:
    """Where each model's pair is; embedded ones are started, and ended by `stack`."""
    embedded = {
        alias: embedded_settings(model, files[alias]) for alias, model in config.models.items() if not model.pairs
    }
    fleet: Mapping[str, EmbeddedPair] = {}
    if embedded:
        limit_s = config.limits.engine_start_s
        fleet = await stack.enter_async_context(EmbeddedFleet(embedded, start_limit_s=limit_s, on_progress=tell))
    started = {
        alias: PairAddress(pair.prefill_url, pair.decode_url, pair.bootstrap_host, pair.bootstrap_port)
        for alias, pair in fleet.items()
    }
    return started | {alias: address_of(model.pairs[0]) for alias, model in config.models.items() if model.pairs}


def _pair(address: PairAddress, limits: Limits, vocabulary: int) -> SglangPair:
    return SglangPair(address, limits=PairLimits(stall_s=limits.engine_stall_s), vocabulary=vocabulary)


def _served(alias: str, pair: SglangPair, files: ModelFiles) -> ServedModel:
    return ServedModel(alias, pair, files.tokenizer, files.context_length)


async def _until_ready(pairs: Mapping[str, SglangPair], limit_s: float, tell: Callable[[str], None]) -> None:
    """Return when every pair is healthy and its way of prefill-only is known. Raises the first EngineError."""
    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as tasks:
            for alias, pair in pairs.items():
                tasks.create_task(_probe(alias, pair, tell))
    except TimeoutError as error:
        raise EngineStalled(
            f"The engines were not ready within {limit_s:g} s.", remedy="Raise limits.engine_start_s."
        ) from error
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _probe(alias: str, pair: SglangPair, tell: Callable[[str], None]) -> None:
    """Wait for the pair, which may still be loading; the caller sets the limit."""
    waiting = False
    while True:
        try:
            await pair.ready()
            break
        except EngineError as error:
            if not waiting:
                tell(f"model {alias}: waiting for its engines ({error})")
            waiting = True
            await asyncio.sleep(RETRY_S)
    way = await pair.probe()
    tell(f"model {alias} is ready; prefill-only by {way}")
    if way == "pair":
        log.warning("model %s: no prefill-only request warms the cache; one-token requests take its place", alias)
