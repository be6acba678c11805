"""The adapters of a model on all of its servers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from functools import partial

from shell_router.engines.adapters.lease import Lease, no_lease
from shell_router.engines.adapters.leases import AdapterLeases
from shell_router.engines.adapters.loading import ServerLoader
from shell_router.engines.adapters.settings import AdapterSettings
from shell_router.engines.server_client import ServerClient
from shell_router.engines.task_owner import TaskOwner
from shell_router.errors import UnknownModel


class Adapters:
    """Gives requests leases on the servers that they go to."""

    def __init__(
        self,
        servers: Iterable[ServerClient],
        settings: AdapterSettings,
        tasks: TaskOwner,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self._loaders = {one: ServerLoader(one, settings.folders, settings.load_s) for one in servers}
        self.leases = {
            one: AdapterLeases(str(one), loader, settings, tasks, clock) for one, loader in self._loaders.items()
        }

    async def begin(self) -> None:
        """Begin with no adapter on any server. Raises EngineError."""
        if self.settings.folders:
            await asyncio.gather(*(loader.clear() for loader in self._loaders.values()))

    async def lease(
        self, server: ServerClient, adapter: str | None, coming: Callable[[], None] = lambda: None
    ) -> Lease:
        """See `AdapterLeases.lease`; nothing for a request without an adapter. Raises UnknownModel too."""
        if adapter is None:
            return no_lease()
        if adapter not in self.settings.folders:
            raise UnknownModel(f"No adapter is named {adapter!r}.", remedy="Choose from the model's adapters.folder.")
        return await self.leases[server].lease(adapter, coming)

    async def of_pair(self, prefill: ServerClient, decode: ServerClient, adapter: str | None) -> tuple[Lease, Lease]:
        """Leases on both servers of an attempt, prefill's first in what is returned.

        All take decode's first and keep it while they wait for prefill's, as they do with places: who holds a lease
        on prefill waits for nothing more, so that no two requests ever wait for each other. Meanwhile the adapter is
        loaded on prefill as soon as it is on decode.
        """
        if adapter is None:
            return no_lease(), no_lease()
        decode_lease = await self.lease(decode, adapter, partial(self.leases[prefill].load_ahead, adapter))
        try:
            return await self.lease(prefill, adapter), decode_lease
        except BaseException:
            decode_lease.close()
            raise

    @asynccontextmanager
    async def leased(self, server: ServerClient, adapter: str | None) -> AsyncIterator[Lease]:
        """A lease on one server while the context is open."""
        lease = await self.lease(server, adapter)
        try:
            yield lease
        finally:
            lease.close()

    def will_have(self, server: ServerClient, adapter: str) -> bool:
        """Whether the adapter is loaded on the server, or on its way there."""
        return self.leases[server].will_have(adapter)

    def failing(self, *servers: ServerClient) -> Collection[ServerClient]:
        """Those of the servers that failed when they were last to load something."""
        return [one for one in servers if self.leases[one].failing]

    async def missing(self, server: ServerClient, lease: Lease) -> None:
        """The server says that it does not have the adapter of this lease."""
        if lease.adapter:
            await self.leases[server].missing(lease)
