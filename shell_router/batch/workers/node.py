"""A worker on its node of a Ray cluster: the actor that starts engines and says where they are."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from yarl import URL

from shell_router.batch.pool import Pool, PoolWorker
from shell_router.batch.profile import Load
from shell_router.batch.workers.local import LocalWorker
from shell_router.config import PairLaunch
from shell_router.engines.address import PairAddress
from shell_router.errors import EngineError

log = logging.getLogger(__name__)


def list_gpus(worker: PoolWorker) -> tuple[int, ...]:
    """Return the GPUs that the worker's settings name.

    Ray reserves as many on a node, whatever their numbers there.
    """
    if worker.pair is not None:
        launch = worker.pair.launch or PairLaunch()
        return tuple(dict.fromkeys((*launch.prefill_gpus, *launch.decode_gpus)))
    if worker.embedded is not None and worker.embedded.device.startswith("cuda"):
        return (0,)
    return ()


def place_on_node(worker: PoolWorker, host: str, gpus: Sequence[str]) -> PoolWorker:
    """Return the worker's settings on the node `host`, with the `gpus` that Ray reserved there."""
    if worker.embedded is not None:
        if not list_gpus(worker):
            return worker
        return replace(worker, embedded=replace(worker.embedded, device="cuda"))
    pair = worker.pair
    assert pair is not None and pair.launch is not None
    reserved = dict(zip(list_gpus(worker), map(int, gpus), strict=True))
    launch = replace(
        pair.launch,
        prefill_gpus=tuple(reserved[gpu] for gpu in pair.launch.prefill_gpus),
        decode_gpus=tuple(reserved[gpu] for gpu in pair.launch.decode_gpus),
    )
    pair = replace(
        pair,
        prefill=str(URL(pair.prefill).with_host(host)),
        decode=str(URL(pair.decode).with_host(host)),
        bootstrap_host=host,
        launch=launch,
    )
    return replace(worker, pair=pair)


def read_actor_node() -> tuple[str, Sequence[str]]:
    """Return the address of this actor's node and the GPUs that Ray reserved for the actor."""
    import ray  # noqa: PLC0415 - an extra, and heavy

    return ray.util.get_node_ip_address(), ray.get_runtime_context().get_accelerator_ids()["GPU"]


class NodeWorker:
    """A worker on its node. Its sessions are opened one after the other.

    SGLang's logs go to `folder` on the node. All engines end with this process.
    """

    def __init__(
        self,
        pool: Pool,
        settings: PoolWorker,
        folder: Path,
        read_node: Callable[[], tuple[str, Sequence[str]]] = read_actor_node,
    ) -> None:
        self._pool = pool
        self._settings = settings
        self._folder = folder
        self._read_node = read_node
        self._host = ""
        self._worker: LocalWorker | None = None
        self._session: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Get ready for sessions and return the node's address."""
        self._host, gpus = self._read_node()
        settings = place_on_node(self._settings, self._host, gpus)
        self._worker = LocalWorker(self._pool, settings, self._folder, self._host)
        await self._worker.start()
        return self._host

    async def stop(self) -> None:
        """End the session and all that `start` started."""
        await self.close()
        if self._worker is not None:
            await self._worker.stop()

    async def open(self, model: str) -> tuple[PairAddress, Load]:
        """Load `model` and return the address at which it serves until `close`.

        Raises EngineError, which Ray passes to the router.
        """
        address: asyncio.Future[tuple[PairAddress, Load]] = asyncio.Future()
        self._session = asyncio.create_task(
            self._hold_session(model, address), name=f"session of {model}"
        )
        # a session that is closed before it has begun sets no address
        self._session.add_done_callback(lambda _: address.cancel())
        return await address

    async def close(self) -> None:
        """End the session, also while it is being opened. Without a session do nothing."""
        session = self._session
        self._session = None
        if session is not None:
            session.cancel()
            await asyncio.wait([session])

    async def _hold_session(
        self, model: str, address: asyncio.Future[tuple[PairAddress, Load]]
    ) -> None:
        """Enter and leave the session in one task, as the task groups inside it demand."""
        try:
            assert self._worker is not None
            async with self._worker.open_model(model) as (running, load):
                assert running.engine.fleet is not None
                address.set_result((running.engine.fleet.addresses[0], load))
                await asyncio.Event().wait()  # until `close` cancels this task
        except Exception as error:
            if address.done():
                log.exception("The session of %s did not end in order", model)
            else:  # not every error survives being pickled
                address.set_exception(EngineError(f"On the node {self._host}: {error}"))
