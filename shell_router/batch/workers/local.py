"""A worker of this machine: one engine at a time, whose weights are swapped where that suffices."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from shell_router.app.launching import launch_engines
from shell_router.app.models import RunningModel, run_models
from shell_router.app.wings import EngineKind
from shell_router.batch.pool import Pool, PoolWorker
from shell_router.batch.profile import Load
from shell_router.config import Config, ModelSettings
from shell_router.core.engine import ServedModel
from shell_router.errors import EngineError
from shell_router.launching.plan import plan
from shell_router.launching.supervisor import Engines
from shell_router.processes.child import run_in_thread, start_fork_server
from shell_router.standins.embedded.kind import LOOPBACK, Embedded
from shell_router.swapping.weights import obstacle_to_swap, swap_weights

log = logging.getLogger(__name__)


class LocalWorker:
    """A worker of this machine. Its sessions are opened one after the other.

    An SGLang pair stays up after a session. It takes the next model's weights if nothing else
    differs. It is started anew otherwise, or if one of its requests failed. An embedded pair is
    forked for each session and listens on `host`.
    """

    def __init__(self, pool: Pool, settings: PoolWorker, logs: Path, host: str = LOOPBACK) -> None:
        self._pool = pool
        self._settings = settings
        self._logs = logs
        self._kinds: Mapping[str, EngineKind] = {}
        if settings.embedded:
            self._kinds = {"embedded": Embedded(host)}
        self._stack = AsyncExitStack()
        self._engines: Engines | None = None
        self._started: ModelSettings | None = None
        self._held_weights: Path | None = None
        """The weights in the engine that is up; None after a swap that failed."""

    async def start(self) -> None:
        """Import torch before the first session, which then costs no more than later ones."""
        if self._settings.embedded:
            await run_in_thread(start_fork_server)

    @asynccontextmanager
    async def session(self, model: str) -> AsyncIterator[tuple[ServedModel, Load]]:
        """Open a session; see `Workers`. A model with an adapter answers with that adapter."""
        async with self.open_model(model) as (running, load):
            served = running.served
            if self._pool.models[model].adapter is not None:
                ((adapted, _),) = running.list_adapted_models()
                served = replace(adapted, alias=served.alias)
            yield served, load

    @asynccontextmanager
    async def open_model(self, model: str) -> AsyncIterator[tuple[RunningModel, Load]]:
        """Load `model` of the pool. Raises ConfigError and EngineError."""
        config = _build_config(self._pool, self._settings, model)
        async with AsyncExitStack() as stack:
            running, load = await self._load(config, model, stack)
            try:
                yield running, load
            finally:
                servers = running.engine.fleet.servers if running.engine.fleet else ()
                if any(server.failures for server in servers):
                    log.warning("%s: the engine failed requests and is not used again", model)
                    await self.stop()

    async def stop(self) -> None:
        """Stop the engine, if one is up."""
        self._engines = None
        self._started = None
        self._held_weights = None
        await self._stack.aclose()

    async def _load(
        self, config: Config, model: str, stack: AsyncExitStack
    ) -> tuple[RunningModel, Load]:
        """Swap the weights of the engine that is up, or start an engine."""
        settings = config.models[model]
        load: Load = "model kept" if self._held_weights == settings.path else "weights swapped"
        obstacle = await self._find_obstacle(settings)
        if not obstacle:
            try:
                return await self._swap(config, model, stack), load
            except EngineError as error:
                obstacle = str(error)
                await stack.aclose()
        log.info("%s: an engine is started, as %s", model, obstacle)
        await self._start_engine(config, model)
        return await self._connect(config, model, stack), "engine started"

    async def _find_obstacle(self, settings: ModelSettings) -> str:
        """Return why a model needs another engine; empty if the one that is up can serve it."""
        started = self._started
        engines = self._engines
        if engines is None or not engines.running:
            return "none is up"
        assert started is not None
        if self._held_weights is None or replace(settings, path=started.path) != started:
            return "the one that is up has other settings"
        return await asyncio.to_thread(obstacle_to_swap, started.path, settings.path)

    async def _start_engine(self, config: Config, model: str) -> None:
        await self.stop()
        if self._settings.pair is not None:
            launch = plan(config, folder=self._logs, python=sys.executable)
            self._engines = await self._stack.enter_async_context(launch_engines(launch))
            self._started = config.models[model]
            self._held_weights = config.models[model].path

    async def _connect(self, config: Config, model: str, stack: AsyncExitStack) -> RunningModel:
        models = await stack.enter_async_context(run_models(config, log.info, self._kinds))
        return models[model]

    async def _swap(self, config: Config, model: str, stack: AsyncExitStack) -> RunningModel:
        """Put the model's weights into the engine that is up. Raises EngineError."""
        running = await self._connect(config, model, stack)
        weights = config.models[model].path
        assert running.engine.fleet is not None
        if self._held_weights != weights:
            self._held_weights = None  # a swap that fails midway leaves unknown weights
            servers = running.engine.fleet.servers
            await swap_weights(servers, weights, self._pool.limits.engine_start_s)
            self._held_weights = weights
        return running


def _build_config(pool: Pool, worker: PoolWorker, model: str) -> Config:
    """Return the deployment of one model on one worker."""
    pool_model = pool.models[model]
    settings = ModelSettings(
        pool_model.path.resolve(),
        engine={"embedded": worker.embedded} if worker.embedded else {},
        pairs=(worker.pair,) if worker.pair else (),
        context_length=pool_model.context_length,
    )
    if pool_model.adapter is not None:
        adapters = {pool_model.adapter.name: pool_model.adapter.resolve()}
        settings = replace(settings, adapters=adapters)
    # an engine that restarted by itself would have the weights of its first model
    launch = replace(pool.launch, restart_limit=0)
    return Config({model: settings}, limits=pool.limits, launch=launch)
