"""One worker of a pool on a node of a Ray cluster: what runs there, as an actor of its own."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from yarl import URL

from shell_router.config import PairLaunch
from shell_router.config.pool import Pool, PoolWorker
from shell_router.engines.address import PairAddress
from shell_router.engines.embedded.shared_spawner import SharedSpawner
from shell_router.errors import EngineError
from shell_router.wiring.workers import running_session

log = logging.getLogger(__name__)


def gpus_of(place: PoolWorker) -> tuple[int, ...]:
    """The GPUs that the worker's settings name; on Ray as many are reserved, whatever their numbers."""
    if place.pair is not None:
        launch = place.pair.launch or PairLaunch()
        return tuple(dict.fromkeys((*launch.prefill_gpus, *launch.decode_gpus)))
    return (0,) if place.embedded is not None and place.embedded.device.startswith("cuda") else ()


def on_node(place: PoolWorker, host: str, gpus: Sequence[str]) -> PoolWorker:
    """The worker as it runs on the node `host`, with the `gpus` that Ray reserved for it there."""
    if place.embedded is not None:
        device = "cuda" if gpus_of(place) else place.embedded.device
        return replace(place, embedded=replace(place.embedded, device=device))
    assert place.pair is not None and place.pair.launch is not None
    reserved = dict(zip(gpus_of(place), map(int, gpus), strict=True))
    launch = replace(
        place.pair.launch,
        prefill_gpus=tuple(reserved[gpu] for gpu in place.pair.launch.prefill_gpus),
        decode_gpus=tuple(reserved[gpu] for gpu in place.pair.launch.decode_gpus),
    )
    prefill, decode = (str(URL(url).with_host(host)) for url in (place.pair.prefill, place.pair.decode))
    return replace(place, pair=replace(place.pair, prefill=prefill, decode=decode, bootstrap_host=host, launch=launch))


def node_of_actor() -> tuple[str, Sequence[str]]:
    """The address of the node that this actor is on, and the GPUs that Ray reserved for it."""
    import ray  # noqa: PLC0415 - an extra

    return ray.util.get_node_ip_address(), ray.get_runtime_context().get_accelerator_ids()["GPU"]


class NodeWorker:
    """A worker on its node. Its sessions are opened one after the other; its engines end with its process.

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
        self._spawner = SharedSpawner()
        self._stack = AsyncExitStack()
        self._session: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Get ready for sessions; gives the node's address."""
        self._host, gpus = self._node()
        self._place = on_node(self._place, self._host, gpus)
        await self._stack.enter_async_context(self._spawner)
        if self._place.embedded is not None:
            await self._spawner.launch()
        return self._host

    async def stop(self) -> None:
        """End the session, and all else that `start` started."""
        await self.close()
        await self._stack.aclose()

    async def open(self, model: str) -> PairAddress:
        """Load `model`, and tell where it serves until `close`. Raises EngineError, which crosses to the router."""
        opened: asyncio.Future[PairAddress] = asyncio.get_running_loop().create_future()
        self._session = asyncio.create_task(self._hold(model, opened), name=f"session of {model}")
        self._session.add_done_callback(lambda _: opened.cancel())  # it may be closed before it has begun
        return await opened

    async def close(self) -> None:
        """End the session, or its beginning; without one this is no error."""
        session, self._session = self._session, None
        if session is not None:
            session.cancel()
            await asyncio.wait([session])

    async def _hold(self, model: str, opened: asyncio.Future[PairAddress]) -> None:
        """One task enters and leaves the session, as task groups in it demand."""
        try:
            async with running_session(
                self._pool, self._place, model, self._folder, self._spawner, self._host
            ) as running:
                opened.set_result(running.addresses[0])
                await asyncio.Event().wait()  # until `close` cancels this
        except Exception as error:
            if opened.done():
                log.exception("The session of %s did not end in order", model)
            else:  # as one kind: not every error survives being pickled
                opened.set_exception(EngineError(f"On the node {self._host}: {error}"))
