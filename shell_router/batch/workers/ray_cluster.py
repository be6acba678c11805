"""Workers on a Ray cluster, as the router drives them.

Each is an actor on some node. The router reaches the actor's engines over HTTP, as any others.
"""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock, current_thread, main_thread
from typing import Any

from shell_router.app.models import run_models
from shell_router.batch.pool import Pool
from shell_router.batch.profile import Load
from shell_router.batch.workers.node import NodeWorker, list_gpus
from shell_router.config import Config, ModelSettings, PairSettings
from shell_router.core.engine import ServedModel
from shell_router.engines.address import PairAddress
from shell_router.errors import ConfigError, EngineError, EngineStalled, EngineUnreachable

log = logging.getLogger(__name__)

CONNECT_LIMIT_S = 5.0
CLOSE_LIMIT_S = 30.0
REMEDY = (
    "See `ray status` and the logs of Ray there. Every node needs the same Python, Ray and "
    "shell-router, and the models in the same folders."
)

_USERS: list[str] = []
"""The cluster's address, once per pool that uses it. Ray joins one cluster per process."""
_JOINING = Lock()


@asynccontextmanager
async def join_cluster(address: str) -> AsyncIterator[Any]:
    """Yield the module `ray`, connected to the cluster at `address`. Raises ConfigError."""
    # without it a call that comes late starts a cluster of its own
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    try:
        import ray  # noqa: PLC0415 - an extra, and heavy
    except ImportError as error:
        raise ConfigError(
            "ray names a cluster, and Ray is not installed.",
            remedy="pip install 'shell-router[ray]'",
        ) from error
    # Ray's init warns when it runs in a thread
    logging.getLogger("ray").setLevel(logging.ERROR)
    await _require_listening(address)
    try:
        # in a thread Ray does not replace the handler of SIGTERM
        await asyncio.to_thread(_join, ray, address)
    except (OSError, RuntimeError, ValueError) as error:
        raise _not_joined(address, error) from error
    _restore_sigterm()
    try:
        yield ray
    finally:
        await asyncio.to_thread(_leave, ray, address)


def _join(ray: Any, address: str) -> None:
    with _JOINING:
        if _USERS and _USERS[0] != address:
            raise ConfigError(
                f"A pool runs on the Ray cluster at {_USERS[0]} now, so that no other can be "
                "joined.",
                remedy="Give all pools of a router the same ray.address.",
            )
        if not _USERS:
            # Ray's driver log would mix the logs of all workers into the progress bar
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        _USERS.append(address)


def _leave(ray: Any, address: str) -> None:
    with _JOINING:
        _USERS.remove(address)
        if not _USERS:
            ray.shutdown()


def _restore_sigterm() -> None:
    """Give SIGTERM back to Python.

    From `init` on Ray handles it in C++ and aborts a process that takes over 3 s to end.
    """
    if current_thread() is main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


async def _require_listening(address: str) -> None:
    """Raise ConfigError if no cluster listens; Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return  # `auto`: Ray finds the address
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, OverflowError) as error:
        raise _not_joined(address, error) from error
    writer.close()
    await writer.wait_closed()


def _not_joined(address: str, error: Exception) -> ConfigError:
    reason = str(error) or "no answer"
    return ConfigError(
        f"There is no Ray cluster at {address} that could be joined: {reason.removesuffix('.')}.",
        remedy="Start one here with `ray start --head`, correct ray.address, or set "
        "RAY_AUTH_MODE where it asks so.",
    )


@dataclass(slots=True)
class RayWorker:
    """Worker `number` of the pool: an actor, on the node at the address `node` once it is ready."""

    ray: Any
    pool: Pool
    number: int
    folder: Path
    actor: Any = None
    node: str = ""
    reach_limit_s: float = 30.0
    """Within it the router reaches engines that the actor found ready, or gives them up."""

    async def start(self) -> None:
        """Have Ray choose a node and start the worker there. Raises EngineError."""
        worker = self.pool.workers[self.number]
        settings = self.pool.ray
        limit_s = self.pool.limits.engine_start_s
        assert settings is not None
        gpus = len(list_gpus(worker))
        actor = self.ray.remote(NodeWorker).options(
            num_cpus=settings.cpus,
            num_gpus=gpus,
            resources={f"node:{worker.node}": 0.001} if worker.node else {},
            scheduling_strategy="SPREAD",
        )
        logs = self.folder.absolute() / f"worker-{self.number}"
        self.actor = await asyncio.to_thread(actor.remote, self.pool, worker, logs)
        try:
            self.node = await self._call(limit_s, "start")
        except EngineStalled as error:
            node = f" on the node {worker.node}" if worker.node else ""
            raise EngineStalled(
                f"No node of the Ray cluster could take worker {self.number} within "
                f"{limit_s:g} s: {settings.cpus:g} CPUs and {gpus} GPUs{node}.",
                remedy="See `ray status`; add nodes, lower ray.cpus, or take the worker out of "
                "the pool.",
            ) from error
        log.info("worker %d runs on the node %s", self.number, self.node)

    @asynccontextmanager
    async def session(self, model: str) -> AsyncIterator[tuple[ServedModel, Load]]:
        """Open a session; see `Workers`. A worker whose node was lost is placed again."""
        if self.actor is None:
            await self.start()
        try:
            # the engines' start and their first answers have the limit each
            limit_s = 2 * self.pool.limits.engine_start_s + CLOSE_LIMIT_S
            address, load = await self._call(limit_s, "open", model)
            async with AsyncExitStack() as stack:
                yield await self._connect(model, address, stack), load
        finally:
            await self._call_or_warn("close")

    async def stop(self) -> None:
        """End the actor and what it runs."""
        try:
            if self.node:
                await self._call_or_warn("stop")
        finally:
            await self._kill()

    async def _connect(
        self, model: str, address: PairAddress, stack: AsyncExitStack
    ) -> ServedModel:
        pool_model = self.pool.models[model]
        pair = PairSettings(
            address.prefill_url, address.decode_url, address.bootstrap_port, address.bootstrap_host
        )
        settings = ModelSettings(
            pool_model.path, pairs=(pair,), context_length=pool_model.context_length
        )
        limits = replace(self.pool.limits, engine_start_s=self.reach_limit_s)
        config = Config({model: settings}, limits=limits)
        try:
            models = await stack.enter_async_context(run_models(config, log.info))
        except EngineStalled as error:
            raise EngineUnreachable(
                f"Worker {self.number} on the node {self.node} was lost, or this machine does "
                f"not reach its engines at {address.prefill_url} and {address.decode_url}: "
                f"{self.reach_limit_s:g} s without an answer.",
                remedy=REMEDY,
            ) from error
        return models[model].served

    async def _call(self, limit_s: float, method: str, *arguments: Any) -> Any:
        """Call a method of the actor; kill an actor that is lost or does not answer in time.

        Raises EngineError.
        """
        name = f"Worker {self.number} on the node {self.node or 'that it was meant for'}"
        try:
            async with asyncio.timeout(limit_s):
                return await getattr(self.actor, method).remote(*arguments)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, EngineError):
                raise error.cause from error
            raise EngineError(f"{name} failed: {error.cause!r}.", remedy=REMEDY) from error
        except self.ray.exceptions.RayError as error:
            await self._kill()
            reason = str(error).strip().splitlines()[-1].strip()[:300]  # Ray writes many lines
            raise EngineUnreachable(f"{name} was lost: {reason}", remedy=REMEDY) from error
        except TimeoutError as error:
            await self._kill()
            raise EngineStalled(
                f"{name} did not answer within {limit_s:g} s.", remedy=REMEDY
            ) from error

    async def _call_or_warn(self, method: str) -> None:
        if self.actor is not None:
            try:
                await self._call(CLOSE_LIMIT_S, method)
            except EngineError as error:
                log.warning("%s", error)

    async def _kill(self) -> None:
        """End the actor's process, and with it its engines."""
        actor = self.actor
        self.actor = None
        self.node = ""
        if actor is not None:
            await asyncio.to_thread(self.ray.kill, actor)
