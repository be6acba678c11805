"""The workers of a pool on a Ray cluster: an actor each, which starts engines on its node and tells where they are.

The router asks those engines over HTTP, as any others.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shell_router.config import Config, ModelSettings, PairSettings
from shell_router.config.pool import Pool
from shell_router.core.model import ServedModel
from shell_router.engines.address import PairAddress
from shell_router.errors import EngineError, EngineStalled, EngineUnreachable
from shell_router.wiring.models import running_models
from shell_router.wiring.ray_cluster import joined
from shell_router.wiring.ray_node import NodeWorker, gpus_of

log = logging.getLogger(__name__)

CLOSE_LIMIT_S = 30.0
REMEDY = (
    "See `ray status` and the logs of Ray there. Every node needs the same Python, Ray and shell-router, and the "
    "models in the same folders."
)


@asynccontextmanager
async def ray_workers(pool: Pool, folder: Path) -> AsyncIterator["RayWorkers"]:
    """The workers of a pool on its Ray cluster while the context is open, all of them ready.

    Raises ConfigError where there is no cluster, and EngineError where it has no room for a worker.
    """
    assert pool.ray is not None
    async with joined(pool.ray.address) as ray:
        workers = RayWorkers(ray, pool, folder)
        try:
            await workers.start()
            yield workers
        finally:
            await workers.stop()


@dataclass(slots=True)
class _Placed:
    """A worker's actor, and the node that it is on."""

    worker: int
    actor: Any
    node: str = ""
    """Its address; empty until Ray has found one and the worker is ready there."""


@dataclass(frozen=True, slots=True)
class RayWorkers:
    """See `batch.sessions.Workers`. `ray_workers` makes it. `ray` is the module: an extra."""

    ray: Any
    pool: Pool
    folder: Path
    placed: dict[int, _Placed] = field(default_factory=dict)

    async def start(self) -> None:
        """Place all workers at the same time. Raises the first EngineError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for worker in range(len(self.pool.workers)):
                    tasks.create_task(self._place(worker))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def stop(self) -> None:
        """End all workers, and with them what they still run."""
        async with asyncio.TaskGroup() as tasks:  # returns when all have ended, whatever happens to one of them
            for placed in list(self.placed.values()):
                tasks.create_task(self._stop(placed))

    @asynccontextmanager
    async def session(self, worker: int, model: str) -> AsyncIterator[ServedModel]:
        """See `Workers`. A worker whose node was lost is placed again, where there is room."""
        placed = self.placed.get(worker) or await self._place(worker)
        try:
            # engines, and then whether they serve, have the limit each
            limit_s = 2 * self.pool.limits.engine_start_s + CLOSE_LIMIT_S
            address = await self._answer(placed, placed.actor.open.remote(model), limit_s)
            async with running_models(self._config(model, address), log.info) as models:
                yield models[model].served
        finally:
            await self._close(placed)

    def _config(self, model: str, at: PairAddress) -> Config:
        wanted = self.pool.models[model]
        pair = PairSettings(at.prefill_url, at.decode_url, at.bootstrap_port, at.bootstrap_host)
        settings = ModelSettings(wanted.path, pairs=(pair,), context_length=wanted.context_length)
        return Config({model: settings}, limits=self.pool.limits)

    async def _place(self, worker: int) -> _Placed:
        """Have Ray choose a node and start the worker there; it is ready then."""
        placed = _Placed(worker, await asyncio.to_thread(self._actor, worker))
        self.placed[worker] = placed
        limit_s = self.pool.limits.engine_start_s
        try:
            placed.node = await self._answer(placed, placed.actor.start.remote(), limit_s)
        except EngineStalled as error:
            raise EngineStalled(
                f"No node of the Ray cluster had room for worker {worker} within {limit_s:g} s: {self._needs(worker)}.",
                remedy="See `ray status`; add nodes, lower ray.cpus, or take the worker out of the pool.",
            ) from error
        log.info("worker %d runs on the node %s", worker, placed.node)
        return placed

    def _actor(self, worker: int) -> Any:
        assert self.pool.ray is not None
        place = self.pool.workers[worker]
        actor = self.ray.remote(NodeWorker).options(
            num_cpus=self.pool.ray.cpus,
            num_gpus=len(gpus_of(place)),
            resources={f"node:{place.node}": 0.001} if place.node else {},
            scheduling_strategy="SPREAD",
        )
        return actor.remote(self.pool, place, self.folder.absolute() / f"worker-{worker}")

    def _needs(self, worker: int) -> str:
        assert self.pool.ray is not None
        place = self.pool.workers[worker]
        node = f" on the node {place.node}" if place.node else ""
        return f"{self.pool.ray.cpus:g} CPUs and {len(gpus_of(place))} GPUs{node}"

    async def _answer(self, placed: _Placed, call: Awaitable[Any], limit_s: float) -> Any:
        """What the worker answers. Raises EngineError; a worker that is lost, or that does not answer, is given up."""
        name = f"Worker {placed.worker} on the node {placed.node or 'that it was meant for'}"
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except self.ray.exceptions.RayTaskError as error:
            raise _told(name, error.cause) from error
        except self.ray.exceptions.RayError as error:
            await self._give_up(placed)
            raise EngineUnreachable(f"{name} was lost: {_reason(error)}", remedy=REMEDY) from error
        except TimeoutError as error:
            await self._give_up(placed)
            raise EngineStalled(f"{name} did not answer within {limit_s:g} s.", remedy=REMEDY) from error

    async def _close(self, placed: _Placed) -> None:
        """End its session. Whoever was answered need not fail for that."""
        if self.placed.get(placed.worker) is placed:
            try:
                await self._answer(placed, placed.actor.close.remote(), CLOSE_LIMIT_S)
            except EngineError as error:
                log.warning("%s", error)

    async def _stop(self, placed: _Placed) -> None:
        try:
            if placed.node:
                await self._answer(placed, placed.actor.stop.remote(), CLOSE_LIMIT_S)
        except EngineError as error:
            log.warning("%s", error)
        finally:
            await self._give_up(placed)

    async def _give_up(self, placed: _Placed) -> None:
        """End its process; its engines end with it."""
        self.placed.pop(placed.worker, None)
        await asyncio.to_thread(self.ray.kill, placed.actor)


def _told(name: str, cause: Exception) -> EngineError:
    """The error that a worker raised; it names the node itself unless it did not expect it."""
    return cause if isinstance(cause, EngineError) else EngineError(f"{name} failed: {cause!r}.", remedy=REMEDY)


def _reason(error: Exception) -> str:
    """The end of what Ray says, which is many lines long."""
    return str(error).strip().splitlines()[-1].strip()[:300]
