"""The servers of one model: slots on them, health, reports, and changes while requests run."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Generic, TypeVar

from shell_router.core.engine import PrefillCost
from shell_router.engines.address import Address
from shell_router.engines.server_client import Monitor, ServerClient, Transport
from shell_router.errors import EngineError
from shell_router.routing.dispatcher import Dispatcher, TrackedEngine

A = TypeVar("A", bound=Address)
E = TypeVar("E")

HEALTH_LIMIT_S = 10.0


class Fleet(Generic[A]):
    """The servers of one model by role: `prefill` and `decode`, or one role for undivided engines.

    An engine kind makes a fleet per model, which gives its readiness, metrics and draining.

    Attributes:
        transport: The parts that all clients share.
        dispatchers: The dispatcher of each role.
        addresses: The addresses in use; a server that several of them name is one server.
        retried: Attempts that were not their request's first.
        waited_for_prefix: Requests that waited while another computed their common prefix.
    """

    ready_route = "health"
    """The route that answers well once a server is ready."""

    def __init__(
        self, transport: Transport, dispatchers: Mapping[str, Dispatcher[ServerClient]]
    ) -> None:
        self.transport = transport
        self.dispatchers = dispatchers
        self.addresses: tuple[A, ...] = ()
        self.retried = 0
        self.waited_for_prefix = 0
        self._monitors: list[Monitor[ServerClient]] = []

    @property
    def servers(self) -> tuple[ServerClient, ...]:
        """All servers, by role."""
        return tuple(
            server for dispatcher in self.dispatchers.values() for server in dispatcher.engines
        )

    @property
    def prefill_cost(self) -> PrefillCost | None:
        """The measured cost of a prefill-only request to an idle server."""
        return None

    @property
    def prefill_servers(self) -> int:
        """The number of servers that prefill."""
        first, *_ = self.dispatchers.values()
        return len(first.engines)

    def clients_of(self, address: A) -> tuple[ServerClient, ...]:
        """Return the clients of an address's servers; servers that are not in use get new ones."""
        clients = {client.server: client for client in self.servers}
        return tuple(
            clients.get(server) or ServerClient(server, self.transport)
            for server in address.servers
        )

    def use(self, address: A, clients: Sequence[ServerClient] = ()) -> None:
        """Send requests to the servers of an address, too."""
        for client in clients or self.clients_of(address):
            dispatcher = self.dispatchers[client.server.role]
            if client not in dispatcher.engines:
                name = f"{client.server.role}-{dispatcher.ever}"
                dispatcher.add(client, name, client.breaker)
        self._set_addresses((*self.addresses, address))

    async def add(self, address: A) -> None:
        """Probe the servers of an address and use it; raises EngineError if they do not serve."""
        clients = self.clients_of(address)
        new = [client for client in clients if client not in self.servers]
        try:
            await asyncio.gather(*(server.get("health", limit_s=HEALTH_LIMIT_S) for server in new))
            await self.probe_new(new)
        except BaseException:
            self.forget(new)
            raise
        self.use(address, clients)

    async def probe_new(self, servers: Sequence[ServerClient]) -> None:
        """Check servers that are added while others serve; raises EngineError."""

    def drain(self, address: A) -> list[TrackedEngine[ServerClient]]:
        """Stop using an address.

        Returns:
            Its servers that no other address names; requests still run there.
        """
        left = tuple(other for other in self.addresses if other != address)
        kept = {server for other in left for server in other.servers}
        drained = [
            dispatcher.drain(client)
            for dispatcher in self.dispatchers.values()
            for client in dispatcher.engines
            if client.server not in kept
        ]
        self._set_addresses(left)
        return drained

    def forget(self, servers: Iterable[ServerClient]) -> None:
        """Drop all knowledge of drained servers, where nothing runs any more."""

    def _set_addresses(self, addresses: tuple[A, ...]) -> None:
        self.addresses = addresses
        for monitor in self._monitors:
            monitor.follow()

    @asynccontextmanager
    async def follow(self) -> AsyncIterator[None]:
        """Poll every server's report while the context is open."""
        async with AsyncExitStack() as stack:
            for dispatcher in self.dispatchers.values():
                monitor = Monitor(dispatcher, ServerClient.report)
                self._monitors.append(await stack.enter_async_context(monitor))
            yield
            self._monitors.clear()

    async def ready(self) -> None:
        """Return when every server says that it is healthy; raise EngineError if one does not."""
        await asyncio.gather(
            *(server.get(self.ready_route, limit_s=HEALTH_LIMIT_S) for server in self.servers)
        )

    async def serves(self) -> bool:
        """Ask all servers; tell whether at least one of each role is healthy."""

        async def is_healthy(server: ServerClient) -> bool:
            with suppress(EngineError):
                await server.get(self.ready_route, limit_s=HEALTH_LIMIT_S)
                return True
            return False

        servers = self.servers
        answers = await asyncio.gather(*map(is_healthy, servers))
        healthy = {server for server, answer in zip(servers, answers, strict=True) if answer}
        return all(healthy & set(of.engines) for of in self.dispatchers.values())

    @property
    def seems_up(self) -> bool:
        """Whether a server of each role answered last and its breaker is closed; asks none."""
        return all(
            any(server.answers and not server.breaker.open for server in dispatcher.engines)
            for dispatcher in self.dispatchers.values()
        )
