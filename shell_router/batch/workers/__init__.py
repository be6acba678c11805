"""The workers of a pool, on this machine or on the nodes of a Ray cluster.

A worker holds one model at a time. `local` runs its engines on this machine, `node` is the same
worker inside a Ray actor, and `ray_cluster` drives such actors from the router.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from shell_router.batch.pool import Pool
from shell_router.batch.profile import Load
from shell_router.batch.sessions import SPANNING, Workers
from shell_router.batch.workers.local import LocalWorker
from shell_router.batch.workers.ray_cluster import RayWorker, join_cluster
from shell_router.core.engine import ServedModel


@dataclass(frozen=True, slots=True)
class PoolWorkers:
    """The workers of one pool, as `batch.sessions.Workers` asks for them.

    Worker `SPANNING` uses the GPUs of all others, so either it is up or they are.
    """

    workers: Sequence[LocalWorker | RayWorker]
    spanning: LocalWorker | None = None

    @asynccontextmanager
    async def session(self, worker: int, model: str) -> AsyncIterator[tuple[ServedModel, Load]]:
        """Open a session; see `Workers`."""
        chosen: LocalWorker | RayWorker
        if worker == SPANNING:
            assert self.spanning is not None
            await asyncio.gather(*(other.stop() for other in self.workers))
            chosen = self.spanning
        else:
            if self.spanning is not None:
                await self.spanning.stop()
            chosen = self.workers[worker]
        async with chosen.session(model) as session:
            yield session

    async def start(self) -> None:
        """Start all workers at the same time. Raises the first EngineError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for worker in self.workers:
                    tasks.create_task(worker.start())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def aclose(self) -> None:
        """End all workers and what they run, even if one of them fails to end."""
        workers = list(self.workers)
        if self.spanning is not None:
            workers.append(self.spanning)
        outcomes = await asyncio.gather(
            *(worker.stop() for worker in workers), return_exceptions=True
        )
        for error in filter(None, outcomes):
            raise error


@asynccontextmanager
async def open_workers(pool: Pool, folder: Path) -> AsyncIterator[Workers]:
    """Start the workers of a pool and end them with the context.

    SGLang's logs go to the pool's `launch.folder`, or to `folder` if it names none.

    Raises:
        ConfigError: The pool's Ray cluster cannot be joined.
        EngineError: A worker does not fit on the cluster.
    """
    folder = pool.launch.folder or folder
    async with AsyncExitStack() as stack:
        if pool.ray is not None:
            ray = await stack.enter_async_context(join_cluster(pool.ray.address))
            numbers = range(len(pool.workers))
            workers = PoolWorkers([RayWorker(ray, pool, number, folder) for number in numbers])
        else:
            spanning = None
            if pool.spanning is not None:
                spanning = LocalWorker(pool, pool.spanning, folder / "spanning")
            workers = PoolWorkers(
                [
                    LocalWorker(pool, settings, folder / f"worker-{number}")
                    for number, settings in enumerate(pool.workers)
                ],
                spanning,
            )
        await stack.enter_async_context(aclosing(workers))
        await workers.start()
        yield workers
