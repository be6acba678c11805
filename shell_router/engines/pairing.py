"""Prefill-decode pairs: any prefill server of a model works with any of its decode servers."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shell_router.core.engine import Placement
from shell_router.engines.address import PairAddress
from shell_router.engines.fleet import Fleet, take_slot
from shell_router.engines.legs import Legs
from shell_router.engines.server_client import ServerClient, ServerFailure, Transport
from shell_router.errors import EngineError, EngineRejected, EngineUnavailable
from shell_router.routing.dispatcher import Dispatcher, EngineSlot, SchedulingSettings
from shell_router.routing.failures import RetrySettings
from shell_router.routing.placement import PlacementRequest

log = logging.getLogger(__name__)


class Pairing(Fleet[PairAddress]):
    """The prefill and decode servers of a model.

    Args:
        transport: The parts that all clients share.
        scheduling: The choice of servers, and the queue for them.
        retries: When a failed attempt is repeated.
        room: Gives fresh bootstrap rooms.
        draw: Gives uniform numbers in [0, 1).
    """

    def __init__(
        self,
        transport: Transport,
        scheduling: SchedulingSettings,
        retries: RetrySettings,
        room: Callable[[], int],
        draw: Callable[[], float],
    ) -> None:
        clock = transport.clock
        self.prefills = Dispatcher[ServerClient]([], scheduling, clock, decodes=False)
        self.decodes = Dispatcher[ServerClient]([], scheduling, clock, prefills=False)
        super().__init__(transport, {"prefill": self.prefills, "decode": self.decodes})
        self.limits = transport.limits
        self.retries = retries
        self.room = room
        self.draw = draw
        self._bootstraps: dict[ServerClient, tuple[str, int]] = {}

    def clients_of(self, address: PairAddress) -> tuple[ServerClient, ...]:
        """See `Fleet.clients_of`; the prefill server comes first."""
        prefill, decode = super().clients_of(address)
        self._bootstraps.setdefault(prefill, (address.bootstrap_host, address.bootstrap_port))
        return prefill, decode

    def bootstrap(self, prefill: ServerClient) -> Mapping[str, Any]:
        """Return an attempt's fields by which decode finds this prefill server, with a new room."""
        host, port = self._bootstraps[prefill]
        return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": self.room()}

    def forget(self, servers: Iterable[ServerClient]) -> None:
        """See `Fleet.forget`."""
        for server in servers:
            self._bootstraps.pop(server, None)


@dataclass(slots=True)
class Pair:
    """The slots of one attempt and its legs on both servers; `close` it in the end.

    `bootstrap` has the body's fields by which decode finds prefill.
    """

    prefill: EngineSlot[ServerClient]
    decode: EngineSlot[ServerClient]
    bootstrap: Mapping[str, Any]
    legs: Legs | None = None

    @property
    def placed(self) -> tuple[Placement, Placement]:
        """The servers that it went to, and why."""
        return self.prefill.placement(), self.decode.placement()

    def close_prefill(self) -> None:
        """Free the prefill server's slot, because the prompt is prefilled."""
        self.prefill.close()
        self.decode.prefilled()

    def close(self) -> None:
        """Abort the legs, unless they have ended, and free the slots; idempotent."""
        if self.legs is not None:
            self.legs.close()
        self.prefill.close()
        self.decode.close()


@dataclass(slots=True, eq=False)
class Attempts:
    """The attempts of one request, each on servers that have not failed it, if there are others.

    An error status that each of several attempts gets is the request's fault, and counts on no
    circuit breaker: it would take the servers from all other requests. So the statuses of early
    attempts count once another attempt succeeds, or fails otherwise.
    """

    pairing: Pairing
    request: PlacementRequest
    made: int = 0
    _avoid: set[ServerClient] = field(default_factory=set)
    _last: EngineError | None = None
    _statuses: list[tuple[ServerClient, EngineRejected]] | None = field(default_factory=list)

    def blame(self, server: ServerClient, error: ServerFailure) -> None:
        """Count `error` on the server's breaker, unless it may still be the request's fault."""
        has_several = self.pairing.retries.attempts > 1
        if isinstance(error, EngineRejected) and has_several and self._statuses is not None:
            self._statuses.append((server, error))
        else:
            self.count_statuses()
            server.failed(error)

    def count_statuses(self) -> None:
        """Count earlier and later error statuses as the servers' faults.

        An attempt has succeeded, or has failed in another way.
        """
        for server, error in self._statuses or ():
            server.failed(error)
        self._statuses = None

    async def pick(self) -> Pair:
        """Take slots for the next attempt: on decode first, as SGLang does.

        A request that waits for a slot on prefill so keeps no decode server from its work, and a
        request with both slots waits for nothing more.

        Raises:
            EngineError: No slot came free: the error of the attempt before, or EngineUnavailable.
        """
        pairing = self.pairing
        try:
            pairing.prefills.serving()
            to_decode = await take_slot(pairing.decodes, self.request, self._avoid)
            try:
                to_prefill = await take_slot(pairing.prefills, self.request, self._avoid)
            except BaseException:
                to_decode.close()
                raise
        except EngineUnavailable as refusal:
            raise self._last or refusal from None
        pairing.retried += self.made > 0
        return Pair(to_prefill, to_decode, pairing.bootstrap(to_prefill.engine))

    async def wait_after(self, pair: Pair, error: EngineError) -> None:
        """Return when the attempt after `pair` is due; raise `error` if it was the last."""
        blamed_servers: Collection[ServerClient] = ()
        if pair.legs is not None:
            blamed_servers = pair.legs.blamed_servers
        self.made += 1
        wait_s = self.pairing.retries.wait_s(error, self.made, self.pairing.draw())
        if wait_s is None:
            if (
                self.made < self.pairing.retries.attempts
                or len({status.status for _, status in self._statuses or ()}) > 1
            ):
                self.count_statuses()  # not each of the attempts failed in this way
            raise error
        self._last = error
        self._avoid.update(blamed_servers)
        names = " and the ".join(map(str, blamed_servers)) or "servers"
        log.warning(
            "attempt %d failed at the %s; another is due in %.0f ms: %s",
            self.made,
            names,
            1e3 * wait_s,
            error,
        )
        await asyncio.sleep(wait_s)
