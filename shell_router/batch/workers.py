"""The workers of a pool: each has an engine with one model, and swaps the next model's weights in
or starts another.

On a Ray cluster each is an actor, which starts engines on its node and says where they are. The
router asks those engines over HTTP, as any others.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock, current_thread, main_thread
from typing import Any

from yarl import URL

from shell_router.app.launching import launched_engines
from shell_router.app.model_files import named
from shell_router.app.models import RunningModel, adapted_models, running_models
from shell_router.app.wings import EngineKind
from shell_router.batch.pool import Pool, PoolWorker
from shell_router.batch.profile import Load
from shell_router.batch.sessions import SPANNING, Workers
from shell_router.config import AdaptersSection, Config, ModelSettings, PairLaunch, PairSettings
from shell_router.core.engine import ServedModel
from shell_router.engines.address import PairAddress
from shell_router.engines.weight_swapping import obstacle_to_swap, swap_weights
from shell_router.errors import ConfigError, EngineError, EngineStalled, EngineUnreachable
from shell_router.launching.plan import plan
from shell_router.launching.supervisor import Engines
from shell_router.standins.embedded.kind import LOOPBACK, Embedded
from shell_router.standins.embedded.servers import Spawner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PoolWorkers:
    """See `batch.sessions.Workers`. `pool_workers` makes it.

    Worker `SPANNING` is the one that spans the GPUs of all others, which are stopped while it is
    up.
    """

    workers: Sequence["LocalWorker | RayWorker"]
    spanning: "LocalWorker | None" = None

    @asynccontextmanager
    async def session(self, worker: int, model: str) -> AsyncIterator[tuple[ServedModel, Load]]:
        """See `Workers`."""
        spans = worker == SPANNING
        await asyncio.gather(
            *(other.stop() for other in (self.workers if spans else [self.spanning]) if other)
        )
        chosen = (self.spanning) if (spans) else (self.workers[worker])
        assert chosen is not None
        async with chosen.session(model) as found:
            yield found

    async def start(self) -> None:
        """Place all that run on a cluster at the same time. Raises the first EngineError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for worker in self.workers:
                    if isinstance(worker, RayWorker):
                        tasks.create_task(worker.start())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def aclose(self) -> None:
        """End all workers, and with them what they still run: whatever happens to one of them."""
        every = [*self.workers, *([self.spanning] if self.spanning else [])]
        ends = await asyncio.gather(*(worker.stop() for worker in every), return_exceptions=True)
        for failed in filter(None, ends):
            raise failed


@asynccontextmanager
async def pool_workers(pool: Pool, folder: Path) -> AsyncIterator[Workers]:
    """The workers of a pool, here or on its Ray cluster. SGLang's logs lie in its `launch.folder`,
    or else in `folder`.

    Raises ConfigError where there is no cluster, and EngineError where a worker does not fit there.
    """
    folder = pool.launch.folder or folder
    async with AsyncExitStack() as stack:
        places = list(enumerate(pool.workers))
        if pool.ray is not None:
            ray = await stack.enter_async_context(joined(pool.ray.address))
            workers = PoolWorkers([RayWorker(ray, pool, number, folder) for number, _ in places])
        else:
            spawner = await stack.enter_async_context(Spawner())
            if any(worker.embedded for worker in pool.workers):
                await (
                    spawner.launch()
                )  # here, so that the first session is no dearer than the others
            workers = PoolWorkers(
                [
                    LocalWorker(pool, place, folder / f"worker-{number}", spawner)
                    for number, place in places
                ],
                LocalWorker(pool, pool.spanning, folder / "spanning", spawner)
                if pool.spanning
                else None,
            )
        await stack.enter_async_context(aclosing(workers))
        await workers.start()
        yield workers


class LocalWorker:
    """A worker of this machine, whose embedded servers listen on `host`; sessions are opened one
    after the other.

    An SGLang pair stays up after a session. It takes the next model's weights if that needs nothing
    else, and is started anew otherwise, or if a request failed by its fault. An embedded pair is
    forked for each session.
    """

    def __init__(
        self, pool: Pool, place: PoolWorker, logs: Path, spawner: Spawner, host: str = LOOPBACK
    ) -> None:
        self._pool = pool
        self._place = place
        self._logs = logs
        self._kinds: Mapping[str, EngineKind] = (
            {"embedded": Embedded(spawner, host)} if place.embedded else {}
        )
        self._stack = AsyncExitStack()
        self._engines: Engines | None = None
        self._started: ModelSettings | None = None
        self._holds: Path | None = None
        """The weights in the engine that is up; None where a swap did not end well."""

    @asynccontextmanager
    async def session(self, model: str) -> AsyncIterator[tuple[ServedModel, Load]]:
        """See `Workers`. A model with an adapter is as its adapter has it, under the name that the
        pool gives it.
        """
        async with self.opened(model) as (running, load):
            served = running.served
            adapter = self._pool.models[model].adapter
            if adapter is not None:
                assert running.pool is not None
                adapted, _ = adapted_models(served, running.pool)[named(served.alias, adapter.name)]
                served = replace(adapted, alias=served.alias)
            yield served, load

    @asynccontextmanager
    async def opened(self, model: str) -> AsyncIterator[tuple[RunningModel, Load]]:
        """The pool's `model`, loaded. Raises ConfigError and EngineError."""
        config = _config(self._pool, self._place, model)
        obstacle = await self._obstacle(config.models[model])
        async with AsyncExitStack() as stack:
            load: Load = (
                "model kept" if self._holds == config.models[model].path else "weights swapped"
            )
            try:
                if obstacle:
                    running = None
                else:
                    running = await self._swapped(config, model, stack)
            except EngineError as error:
                obstacle = str(error)
                running = None
                await stack.aclose()
            if running is None:
                log.info("%s: an engine is started, as %s", model, obstacle)
                await self._start(config, model)
                running = await self._connected(config, model, stack)
                load = "engine started"
            try:
                yield running, load
            finally:
                if running.pool is not None and any(
                    server.failures for server in running.pool.servers
                ):
                    log.warning("%s: the engine failed requests and is not used again", model)
                    await self.stop()

    async def stop(self) -> None:
        """Stop the engine that is up, if one is."""
        self._engines = self._started = self._holds = None
        await self._stack.aclose()

    async def _obstacle(self, wanted: ModelSettings) -> str:
        """Why an engine has to be started for `wanted`; empty where the one that is up may serve
        it.
        """
        if (
            self._engines is None
            or self._started is None
            or not all(one.running for one in self._engines.processes)
        ):
            return "none is up"
        if self._holds is None or replace(wanted, path=self._started.path) != self._started:
            return "the one that is up has other settings"
        return await asyncio.to_thread(obstacle_to_swap, self._started.path, wanted.path)

    async def _start(self, config: Config, model: str) -> None:
        await self.stop()
        if self._place.pair is not None:
            launched = plan(config, folder=self._logs, python=sys.executable)
            self._engines = await self._stack.enter_async_context(launched_engines(launched))
            self._started = config.models[model]
            self._holds = config.models[model].path

    async def _connected(self, config: Config, model: str, stack: AsyncExitStack) -> RunningModel:
        return (await stack.enter_async_context(running_models(config, log.info, self._kinds)))[
            model
        ]

    async def _swapped(self, config: Config, model: str, stack: AsyncExitStack) -> RunningModel:
        """The model on the engine that is up, with its weights. Raises EngineError."""
        running = await self._connected(config, model, stack)
        folder = config.models[model].path
        assert running.pool is not None
        if self._holds != folder:
            self._holds = None  # unless all servers have them
            await swap_weights(running.pool.servers, folder, self._pool.limits.engine_start_s)
            self._holds = folder
        return running


def _config(pool: Pool, place: PoolWorker, model: str) -> Config:
    wanted = pool.models[model]
    pairs = () if place.pair is None else (place.pair,)
    settings = ModelSettings(
        wanted.path.resolve(),
        engine={} if place.embedded is None else {"embedded": place.embedded},
        pairs=pairs,
        context_length=wanted.context_length,
        adapters=None
        if wanted.adapter is None
        else AdaptersSection(wanted.adapter.parent, max_loaded_adapters=1),
    )
    # an engine that started by itself again would have the weights of its first model
    return Config(
        {model: settings}, limits=pool.limits, launch=replace(pool.launch, restart_limit=0)
    )


CONNECT_LIMIT_S = 5.0
_USERS: list[str] = []
"""The address of this process's cluster, once for each pool that uses it: a process is part of one
at a time.
"""
_JOINING = Lock()


def _join(ray: Any, address: str) -> None:
    with _JOINING:
        if _USERS and _USERS[0] != address:
            raise ConfigError(
                (
                    f"A pool runs on the Ray cluster at {_USERS[0]} now, so that no other can be "
                    "joined."
                ),
                remedy="Give all pools of a router the same ray.address.",
            )
        if not _USERS:  # Ray's driver log would mix the logs of all workers into the progress bar
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        _USERS.append(address)


def _leave(ray: Any, address: str) -> None:
    with _JOINING:
        _USERS.remove(address)
        if not _USERS:
            ray.shutdown()


@asynccontextmanager
async def joined(address: str) -> AsyncIterator[Any]:
    """The module `ray`, connected to the cluster at `address` while the context is open. Raises
    ConfigError.
    """
    os.environ.setdefault(
        "RAY_ENABLE_AUTO_CONNECT", "0"
    )  # else a call that comes late starts a cluster of its own
    try:
        import ray  # noqa: PLC0415 - an extra, and heavy
    except ImportError as error:
        raise ConfigError(
            "ray names a cluster, and Ray is not installed.",
            remedy="pip install 'shell-router[ray]'",
        ) from error
    logging.getLogger("ray").setLevel(
        logging.ERROR
    )  # before init, or it warns that it is called in a thread
    await _require_listening(address)
    try:
        # a thread of its own also keeps Ray from replacing the handler of SIGTERM
        await asyncio.to_thread(_join, ray, address)
    except (OSError, RuntimeError, ValueError) as error:
        raise _not_joined(address, error) from error
    _restore_sigterm()
    try:
        yield ray
    finally:
        await asyncio.to_thread(_leave, ray, address)


def _restore_sigterm() -> None:
    """Ray handles SIGTERM in C++ from `init` on, and aborts a process that takes more than 3 s to
    end after it.
    """
    if current_thread() is main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


async def _require_listening(address: str) -> None:
    """Otherwise Ray waits minutes for a cluster that is not there, and cannot be interrupted."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return  # auto: found by Ray itself
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, OverflowError) as error:
        raise _not_joined(address, error) from error
    writer.close()
    await writer.wait_closed()


def _not_joined(address: str, error: Exception) -> ConfigError:
    return ConfigError(
        (
            f"There is no Ray cluster at {address} that could be joined: "
            f"{str(error) or 'no answer'}."
        ).replace("..", "."),
        remedy=(
            "Start one here with `ray start --head`, correct ray.address, or set "
            "RAY_AUTH_MODE where it asks so."
        ),
    )


def gpus_of(place: PoolWorker) -> tuple[int, ...]:
    """The GPUs that the worker's settings name; on Ray as many are reserved, whatever their
    numbers.
    """
    if place.pair is not None:
        launch = place.pair.launch or PairLaunch()
        return tuple(dict.fromkeys((*launch.prefill_gpus, *launch.decode_gpus)))
    if place.embedded is not None and place.embedded.device.startswith("cuda"):
        return (0,)
    return ()


def on_node(place: PoolWorker, host: str, gpus: Sequence[str]) -> PoolWorker:
    """The worker as it runs on the node `host`, with the `gpus` that Ray reserved for it there."""
    if place.embedded is not None:
        if gpus_of(place):
            device = "cuda"
        else:
            device = place.embedded.device
        return replace(place, embedded=replace(place.embedded, device=device))
    assert place.pair is not None and place.pair.launch is not None
    reserved = dict(zip(gpus_of(place), map(int, gpus), strict=True))
    launch = replace(
        place.pair.launch,
        prefill_gpus=tuple(reserved[gpu] for gpu in place.pair.launch.prefill_gpus),
        decode_gpus=tuple(reserved[gpu] for gpu in place.pair.launch.decode_gpus),
    )
    prefill, decode = (
        str(URL(url).with_host(host)) for url in (place.pair.prefill, place.pair.decode)
    )
    return replace(
        place,
        pair=replace(
            place.pair, prefill=prefill, decode=decode, bootstrap_host=host, launch=launch
        ),
    )


def node_of_actor() -> tuple[str, Sequence[str]]:
    """The address of the node that this actor is on, and the GPUs that Ray reserved for it."""
    import ray  # noqa: PLC0415

    return ray.util.get_node_ip_address(), ray.get_runtime_context().get_accelerator_ids()["GPU"]


class NodeWorker:
    """A worker on its node. Its sessions are opened one after the other; its engines end with its
    process.

    `folder` takes SGLang's logs, on the node.
    """

    def __init__(
        self,
        pool: Pool,
        place: PoolWorker,
        folder: Path,
        node: Callable[[], tuple[str, Sequence[str]]] = node_of_actor,
    ) -> None:
        self._pool = pool
        self._place = place
        self._folder = folder
        self._node = node
        self._host = ""
        self._spawner = Spawner()
        self._worker: LocalWorker | None = None
        self._session: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Get ready for sessions; gives the node's address."""
        self._host, gpus = self._node()
        self._place = on_node(self._place, self._host, gpus)
        if self._place.embedded is not None:
            await self._spawner.launch()
        self._worker = LocalWorker(self._pool, self._place, self._folder, self._spawner, self._host)
        return self._host

    async def stop(self) -> None:
        """End the session, and all else that `start` started."""
        await self.close()
        if self._worker is not None:
            await self._worker.stop()
        await self._spawner.stop()

    async def open(self, model: str) -> tuple[PairAddress, Load]:
        """Load `model`; gives where it serves until `close`. Raises EngineError, which Ray passes
        to the router.
        """
        opened: asyncio.Future[tuple[PairAddress, Load]] = (
            asyncio.get_running_loop().create_future()
        )
        self._session = asyncio.create_task(self._hold(model, opened), name=f"session of {model}")
        self._session.add_done_callback(
            lambda _: opened.cancel()
        )  # it may be closed before it has begun
        return await opened

    async def close(self) -> None:
        """End the session, or its beginning; without one this is no error."""
        session = self._session
        self._session = None
        if session is not None:
            session.cancel()
            await asyncio.wait([session])

    async def _hold(self, model: str, opened: asyncio.Future[tuple[PairAddress, Load]]) -> None:
        """One task enters and leaves the session, as task groups in it demand."""
        try:
            assert self._worker is not None
            async with self._worker.opened(model) as (running, load):
                assert running.pool is not None
                opened.set_result((running.pool.addresses[0], load))
                await asyncio.Event().wait()  # until `close` cancels this
        except Exception as error:
            if opened.done():
                log.exception("The session of %s did not end in order", model)
            else:  # as one kind: not every error survives being pickled
                opened.set_exception(EngineError(f"On the node {self._host}: {error}"))


CLOSE_LIMIT_S = 30.0
REMEDY = (
    "See `ray status` and the logs of Ray there. Every node needs the same Python, Ray and "
    "shell-router, and the "
    "models in the same folders."
)


@dataclass(slots=True)
class RayWorker:
    """Worker `number` of the pool: an actor, on the node of this address once it is ready there."""

    ray: Any
    pool: Pool
    number: int
    folder: Path
    actor: Any = None
    node: str = ""
    reach_limit_s: float = (
        30.0  # engines that their worker has found ready answer the router within it, or are lost
    )

    async def start(self) -> None:
        """Have Ray choose a node and start the worker there; it is ready then. Raises
        EngineError."""
        place = self.pool.workers[self.number]
        settings = self.pool.ray
        limit_s = self.pool.limits.engine_start_s
        assert settings is not None
        actor = self.ray.remote(NodeWorker).options(
            num_cpus=settings.cpus,
            num_gpus=len(gpus_of(place)),
            resources={f"node:{place.node}": 0.001} if place.node else {},
            scheduling_strategy="SPREAD",
        )
        logs = self.folder.absolute() / f"worker-{self.number}"
        self.actor = await asyncio.to_thread(actor.remote, self.pool, place, logs)
        try:
            self.node = await self._answer(limit_s, "start")
        except EngineStalled as error:
            needs = f"{settings.cpus:g} CPUs and {len(gpus_of(place))} GPUs"
            if place.node:
                node = f" on the node {place.node}"
            else:
                node = ""
            raise EngineStalled(
                (
                    f"No node of the Ray cluster could take worker {self.number} within "
                    f"{limit_s:g} "
                    f"s: {needs}{node}."
                ),
                remedy=(
                    "See `ray status`; add nodes, lower ray.cpus, or take the worker out of "
                    "the pool."
                ),
            ) from error
        log.info("worker %d runs on the node %s", self.number, self.node)

    @asynccontextmanager
    async def session(self, model: str) -> AsyncIterator[tuple[ServedModel, Load]]:
        """See `Workers`. A worker whose node was lost is placed again, if it fits elsewhere."""
        if self.actor is None:
            await self.start()
        try:
            # engines, and then whether they serve, have the limit each
            limit_s = 2 * self.pool.limits.engine_start_s + CLOSE_LIMIT_S
            address, load = await self._answer(limit_s, "open", model)
            async with AsyncExitStack() as stack:
                yield await self._reached(model, address, stack), load
        finally:
            await self._end("close")

    async def _reached(
        self, model: str, address: PairAddress, stack: AsyncExitStack
    ) -> ServedModel:
        wanted = self.pool.models[model]
        pair = PairSettings(
            address.prefill_url, address.decode_url, address.bootstrap_port, address.bootstrap_host
        )
        settings = ModelSettings(wanted.path, pairs=(pair,), context_length=wanted.context_length)
        config = Config(
            {model: settings}, limits=replace(self.pool.limits, engine_start_s=self.reach_limit_s)
        )
        try:
            return (await stack.enter_async_context(running_models(config, log.info)))[model].served
        except EngineStalled as error:
            raise EngineUnreachable(
                f"Worker {self.number} on the node {self.node} was lost, or this machine does "
                "not reach its engines at"
                f" {address.prefill_url} and {address.decode_url}: {self.reach_limit_s:g} s "
                "without an answer.",
                remedy=REMEDY,
            ) from error

    async def stop(self) -> None:
        """End it, and with it what it still runs."""
        try:
            if self.node:
                await self._end("stop")
        finally:
            await self._give_up()

    async def _answer(self, limit_s: float, method: str, *arguments: Any) -> Any:
        """What the actor answers. Raises EngineError; one that is lost, or that does not answer, is
        given up.
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
            await self._give_up()
            reason = str(error).strip().splitlines()[-1].strip()[:300]  # Ray says many lines
            raise EngineUnreachable(f"{name} was lost: {reason}", remedy=REMEDY) from error
        except TimeoutError as error:
            await self._give_up()
            raise EngineStalled(
                f"{name} did not answer within {limit_s:g} s.", remedy=REMEDY
            ) from error

    async def _end(self, method: str) -> None:
        """Close its session, or stop it; a failure only logs a warning."""
        if self.actor is not None:
            try:
                await self._answer(CLOSE_LIMIT_S, method)
            except EngineError as error:
                log.warning("%s", error)

    async def _give_up(self) -> None:
        """End its process; its engines end with it."""
        actor = self.actor
        self.actor = None
        self.node = ""
        if actor is not None:
            await asyncio.to_thread(self.ray.kill, actor)
