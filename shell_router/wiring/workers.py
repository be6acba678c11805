"""The workers of a pool: each starts an engine with one model, and stops it before the next."""

import logging
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from shell_router.config import Config, ModelSettings
from shell_router.config.pool import Pool, PoolWorker
from shell_router.core.model import ServedModel
from shell_router.launching import plan
from shell_router.wiring.launching import launched_engines
from shell_router.wiring.models import running_models

log = logging.getLogger(__name__)


class PoolWorkers:
    """The `batch.Workers` of a pool. Engines' logs lie in `folder`."""

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool = pool
        self._folder = folder

    @asynccontextmanager
    async def session(self, worker: int, model: str) -> AsyncIterator[ServedModel]:
        """See `batch.Workers`."""
        place = self._pool.workers[worker]
        config = self._config(place, model)
        async with AsyncExitStack() as stack:
            if place.pair is not None:
                launched = plan(config, folder=self._folder / f"worker-{worker}", python=sys.executable)
                await stack.enter_async_context(launched_engines(launched))
            models = await stack.enter_async_context(running_models(config, log.info))
            yield models[model].served

    def _config(self, place: PoolWorker, model: str) -> Config:
        wanted = self._pool.models[model]
        pairs = () if place.pair is None else (place.pair,)
        settings = ModelSettings(
            wanted.path, embedded=place.embedded, pairs=pairs, context_length=wanted.context_length
        )
        return Config({model: settings}, limits=self._pool.limits, launch=self._pool.launch)
