"""Which prefill and which decode server take an attempt. Any two servers of one model may work together.

Here a request waits for a dispatcher's decision, and engines are asked for the state that it decides by.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shell_router.core.engine import Placement
from shell_router.engines.address import PairAddress
from shell_router.engines.legs import Legs
from shell_router.engines.server_client import ServerClient, ServerFailure, Transport
from shell_router.errors import AdapterMissing, EngineError, EngineRejected, EngineUnavailable
from shell_router.routing.adapter_cache import AdapterSettings
from shell_router.routing.dispatcher import Dispatcher, EngineSlot, SchedulingSettings, TrackedEngine
from shell_router.routing.failures import RetrySettings
from shell_router.routing.placement import EngineReport, PlacementRequest

if TYPE_CHECKING:
    from shell_router.engines.adapter_leases import Adapters, Lease

log = logging.getLogger(__name__)

E = TypeVar("E")

LONGEST_WAIT_S = 30.0


async def engine_slot(dispatcher: Dispatcher[E], request: PlacementRequest, avoid: Collection[E] = ()) -> EngineSlot[E]:
    """A slot on an engine, where the request is sent at once; not on one of `avoid` if another serves.

    Raises EngineUnavailable while the breakers of all are open, or where no slot comes free in time. However it ends
    without a slot, the queue has forgotten the request.
    """
    entry = dispatcher.submit(request, avoid)
    if isinstance(entry, EngineSlot):
        return entry
    decided, wait_s = asyncio.get_running_loop().create_future(), dispatcher.settings.queue.wait_s
    entry.decided = lambda: None if decided.done() else decided.set_result(None)
    try:
        async with asyncio.timeout(wait_s):
            await decided
        if entry.error is not None:
            raise entry.error
    except BaseException as error:
        dispatcher.withdraw(entry)
        if not isinstance(error, TimeoutError):
            raise
        raise EngineUnavailable(
            f"No engine had capacity for the request within {wait_s:g} s.",
            remedy="Ask again later, add engines, or raise scheduling.queue.wait_s.",
        ) from error
    slot: EngineSlot[E] = entry.slot
    return slot


@dataclass(slots=True)
class Pair:
    """The slots of one attempt, its adapter's leases on both servers, and its legs there; `close` it in the end.

    `bootstrap` has the body's fields by which decode finds prefill.
    """

    prefill: EngineSlot[ServerClient]
    decode: EngineSlot[ServerClient]
    bootstrap: Mapping[str, Any]
    leases: "tuple[Lease, Lease] | None" = None
    legs: Legs | None = None

    @property
    def placed(self) -> tuple[Placement, Placement]:
        """Where it went, and why."""
        if self.leases is None:
            return self.prefill.placement(), self.decode.placement()
        prefill, decode = self.leases
        return self.prefill.placement(prefill.waited_s), self.decode.placement(decode.waited_s)

    def prefilled(self) -> None:
        """The prefill server has done its part."""
        if self.leases is not None:
            self.leases[0].close()
        self.prefill.close()
        self.decode.prefilled()

    def close(self) -> None:
        """The attempt is over, however it ended. Calling it again changes nothing."""
        if self.legs is not None:
            self.legs.close()
        for lease in self.leases or ():
            lease.close()
        self.prefill.close()
        self.decode.close()


class Pairing:
    """All servers of a model. One that several addresses name is one server. `draw` is uniform in [0, 1)."""

    def __init__(
        self,
        addresses: Sequence[PairAddress],
        transport: Transport,
        room: Callable[[], int],
        scheduling: SchedulingSettings,
        adapters: AdapterSettings,
        retries: RetrySettings,
        draw: Callable[[], float],
    ) -> None:
        self.limits = transport.limits
        self.retries, self.draw = retries, draw
        self.retried = 0
        self._bootstraps: dict[ServerClient, tuple[str, int]] = {}
        self.adapter_settings = adapters
        self.room = room
        self._transport, clock = transport, transport.clock

        def has_adapter(server: ServerClient, adapter: str) -> bool:
            return self.adapters.leases[server].will_have(adapter)

        self.prefills = Dispatcher[ServerClient]([], scheduling, clock, has_adapter, decodes=False)
        self.decodes = Dispatcher[ServerClient]([], scheduling, clock, has_adapter, prefills=False)
        for address in addresses:
            self.add(*self.clients_of(address))

    @property
    def servers(self) -> tuple[ServerClient, ...]:
        """Prefill servers, then decode servers."""
        return (*self.prefills.engines, *self.decodes.engines)

    def clients_of(self, address: PairAddress) -> tuple[ServerClient, ServerClient]:
        """The clients of its servers; new ones of servers that are not among these get no requests before `add`."""
        known = {client.server: client for client in self.servers}
        prefill, decode = (
            known.get(server) or ServerClient(server, self._transport) for server in (address.prefill, address.decode)
        )
        self._bootstraps.setdefault(prefill, (address.bootstrap_host, address.bootstrap_port))
        return prefill, decode

    def bootstrap(self, prefill: ServerClient) -> Mapping[str, Any]:
        """The body's fields of one attempt by which decode finds this prefill server, with a fresh room."""
        host, port = self._bootstraps[prefill]
        return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": self.room()}

    def forget(self, server: ServerClient) -> None:
        """It was drained, and nothing runs there any more."""
        self._bootstraps.pop(server, None)

    def add(self, prefill: ServerClient, decode: ServerClient) -> None:
        """Requests go to those of these servers, too, that are not among these yet."""
        for dispatcher, one in ((self.prefills, prefill), (self.decodes, decode)):
            if one not in dispatcher.engines:
                dispatcher.add(one, f"{one.server.role}-{dispatcher.ever}", one.breaker)

    @cached_property
    def adapters(self) -> "Adapters":
        """Those on each server, for requests that name one."""
        from shell_router.engines.adapter_leases import Adapters  # noqa: PLC0415 - most models have no adapters

        return Adapters(self.servers, self.adapter_settings, self._transport.tasks, self._transport.clock)


async def load_again(
    blamed: Collection[ServerClient], servers: Sequence[ServerClient], leases: "Sequence[Lease]"
) -> None:
    """Have the adapter loaded again on those of `servers` that lost it; each has its lease."""
    for server, lease in zip(servers, leases, strict=False):
        if server in blamed:
            await lease.missing()


@dataclass(slots=True, eq=False)
class Attempts:
    """The attempts of one request, each on other servers than those before where there are others.

    An error status that every one of several attempts gets is the request's fault, and counts on no circuit breaker: it
    would take the servers from all others. So the statuses of early attempts count once another attempt is `answered`,
    or fails otherwise.
    """

    pairing: Pairing
    request: PlacementRequest
    made: int = 0
    _avoid: set[ServerClient] = field(default_factory=set)
    _last: EngineError | None = None
    _statuses: list[tuple[ServerClient, EngineRejected]] | None = field(default_factory=list)

    def blame(self, server: ServerClient, error: ServerFailure) -> None:
        """Count `error` on the server's breaker, unless it may turn out to be the request's fault."""
        if isinstance(error, EngineRejected) and self._statuses is not None and self.pairing.retries.attempts > 1:
            self._statuses.append((server, error))
        else:
            self.answered()
            server.failed(error)

    def answered(self) -> None:
        """An attempt was answered, so that the statuses of those before it, and what follows, are servers' faults."""
        for server, error in self._statuses or ():
            server.failed(error)
        self._statuses = None

    async def pick(self) -> Pair:
        """Slots for the next attempt, and its adapter there; an attempt that does not get its adapter is one, too.

        The slot on decode comes first, as in SGLang's disaggregation: a request that waits for one on prefill keeps no
        decode server from its work, and one that has that waits for nothing more but an adapter (`Adapters.of_pair`).
        Raises EngineUnavailable, the error of the attempt before, or AdapterFailed.
        """
        pairing, request = self.pairing, self.request
        while True:
            try:
                pairing.prefills.serving()
                to_decode = await engine_slot(pairing.decodes, request, self._avoid)
                try:
                    to_prefill = await engine_slot(pairing.prefills, request, self._avoid)
                except BaseException:
                    to_decode.close()
                    raise
            except EngineUnavailable as refusal:
                raise self._last or refusal from None
            pair = Pair(to_prefill, to_decode, pairing.bootstrap(to_prefill.engine))
            pairing.retried += self.made > 0
            if request.adapter is None:
                return pair
            prefill, decode, adapters = pair.prefill.engine, pair.decode.engine, pairing.adapters
            try:
                pair.leases = await adapters.of_pair(prefill, decode, request.adapter)
                return pair
            except BaseException as error:
                pair.close()
                if not isinstance(error, EngineError):
                    raise
                failure = error
            await self._next_due(failure, [one for one in (prefill, decode) if adapters.leases[one].failing])

    async def failed(self, pair: Pair, error: EngineError) -> None:
        """The attempt on `pair` failed: return when the next is due, or raise `error` if it was the last.

        An adapter that a server of the pair lost is loaded again.
        """
        blamed_servers = () if pair.legs is None else pair.legs.blamed_servers
        if isinstance(error, AdapterMissing) and pair.leases is not None:
            await load_again(blamed_servers, (pair.prefill.engine, pair.decode.engine), pair.leases)
        await self._next_due(error, blamed_servers)

    async def _next_due(self, error: EngineError, blamed_servers: Collection[ServerClient]) -> None:
        self.made += 1
        wait_s = self.pairing.retries.wait_s(error, self.made, self.pairing.draw())
        if wait_s is None:
            if self.made < self.pairing.retries.attempts or len({one.status for _, one in self._statuses or ()}) > 1:
                self.answered()  # not each of the attempts failed in this way
            raise error
        self._last = error
        self._avoid.update(blamed_servers)
        at = " and the ".join(map(str, blamed_servers)) or "servers"
        log.warning("attempt %d failed at the %s; another is due in %.0f ms: %s", self.made, at, 1e3 * wait_s, error)
        await asyncio.sleep(wait_s)


@dataclass(frozen=True, slots=True, eq=False)
class Monitor(Generic[E]):
    """Polls every engine of a dispatcher, each in a task of its own, so that a slow one delays no other's report.

    `ask` gives an engine's state within a limit of its own, or raises EngineError. One that fails is asked again after
    the double time, up to 30 s, and its last report ages meanwhile.
    """

    dispatcher: Dispatcher[E]
    ask: Callable[[E], Awaitable[EngineReport]]
    _tasks: dict[E, asyncio.Task[None]] = field(default_factory=dict)

    async def __aenter__(self) -> "Monitor[E]":
        self.follow()
        return self

    def follow(self) -> None:
        """Ask those engines that the dispatcher has now, and no others."""
        for gone in self._tasks.keys() - set(self.dispatcher.engines):
            self._tasks.pop(gone).cancel()
        for at in self.dispatcher.tracked:
            if at.engine not in self._tasks:
                self._tasks[at.engine] = asyncio.create_task(self._follow(at))

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _follow(self, at: TrackedEngine[E]) -> None:
        wait_s = 0.0
        while True:
            poll_s = self.dispatcher.poll_s
            try:
                self.dispatcher.report(at.index, await self.ask(at.engine))
                wait_s = poll_s
            except EngineError as error:
                at.failed_polls += 1
                if wait_s <= poll_s:
                    log.warning("%s does not report its state, and is chosen without it: %s", at.engine, error)
                wait_s = min(2 * max(wait_s, poll_s), max(LONGEST_WAIT_S, poll_s))
            await asyncio.sleep(wait_s)
