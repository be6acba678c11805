"""The workers of a pool: each starts an engine with one model, and stops it before the next."""

import logging
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from shell_router.config import AdaptersSection, Config, ModelSettings
from shell_router.config.pool import Pool, PoolModel, PoolWorker
from shell_router.core.model import ServedModel
from shell_router.engines.embedded.shared_spawner import SharedSpawner
from shell_router.launching import plan
from shell_router.wiring.adapters import adapted_models, named
from shell_router.wiring.launched import launched_engines
from shell_router.wiring.models import LOOPBACK, RunningModel, running_models

log = logging.getLogger(__name__)


@asynccontextmanager
async def pool_workers(pool: Pool, folder: Path) -> AsyncIterator["PoolWorkers"]:
    """The workers of a pool, on this machine, while the context is open. SGLang's logs lie in `folder`."""
    async with SharedSpawner() as spawner:
        if any(worker.embedded for worker in pool.workers):
            await spawner.launch()  # here, so that the first session is no dearer than the others
        yield PoolWorkers(pool, folder, spawner)


@dataclass(frozen=True, slots=True)
class PoolWorkers:
    """See `batch.sessions.Workers`. `pool_workers` makes it."""

    pool: Pool
    folder: Path
    spawner: SharedSpawner

    @asynccontextmanager
    async def session(self, worker: int, model: str) -> AsyncIterator[ServedModel]:
        """See `Workers`."""
        place, logs = self.pool.workers[worker], self.folder / f"worker-{worker}"
        async with running_session(self.pool, place, model, logs, self.spawner) as running:
            yield _answering(running, self.pool.models[model])


@asynccontextmanager
async def running_session(
    pool: Pool, place: PoolWorker, model: str, logs: Path, spawner: SharedSpawner, host: str = LOOPBACK
) -> AsyncIterator[RunningModel]:
    """The pool's `model`, loaded on the worker `place` of this machine, whose embedded servers listen on `host`.

    Raises ConfigError and EngineError.
    """
    config = _config(pool, place, model)
    async with AsyncExitStack() as stack:
        if place.pair is not None:
            launched = plan(config, folder=logs, python=sys.executable)
            await stack.enter_async_context(launched_engines(launched))
        models = await stack.enter_async_context(running_models(config, log.info, spawner.lend, host))
        yield models[model]


def _config(pool: Pool, place: PoolWorker, model: str) -> Config:
    wanted = pool.models[model]
    pairs = () if place.pair is None else (place.pair,)
    settings = ModelSettings(
        wanted.path,
        embedded=place.embedded,
        pairs=pairs,
        context_length=wanted.context_length,
        adapters=None if wanted.adapter is None else AdaptersSection(wanted.adapter.parent, room=1),
    )
    return Config({model: settings}, limits=pool.limits, launch=pool.launch)


def _answering(running: RunningModel, wanted: PoolModel) -> ServedModel:
    """The model itself, or as its adapter has it, under the name that the pool gives it."""
    base = running.served
    if wanted.adapter is None:
        return base
    adapted, _ = adapted_models(base, running.pool)[named(base.alias, wanted.adapter.name)]
    return replace(adapted, alias=base.alias)
