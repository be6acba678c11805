"""The attempts of one request, each on a pair of servers or an undivided one."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shell_router.core.engine import Placement
from shell_router.engines.legs import Leg, Legs
from shell_router.engines.pair_fleet import PairFleet
from shell_router.engines.server_client import ServerClient, ServerFailure, take_slot
from shell_router.engines.shared_prefixes import PrefixTurn
from shell_router.errors import EngineError, EngineRejected, EngineUnavailable
from shell_router.http.client import AnswerBroken
from shell_router.routing.dispatcher import EngineSlot
from shell_router.routing.placement import PlacementRequest

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Pair:
    """The slots of one attempt and its legs on both servers; `close` it in the end.

    An undivided server has one slot, which is both. `fields` has the router's fields of the body,
    by which decode finds prefill, `turn` the prompt's place among those that share its beginning.
    """

    prefill: EngineSlot[ServerClient]
    decode: EngineSlot[ServerClient]
    fields: Mapping[str, Any]
    legs: Leg | None = None
    turn: PrefixTurn | None = None

    @property
    def placed(self) -> tuple[Placement, ...]:
        """The servers that it went to, and why."""
        slots = dict.fromkeys((self.prefill, self.decode))
        return tuple(slot.placement() for slot in slots)

    def start(
        self,
        rids: Sequence[str],
        bodies: tuple[bytes, bytes],
        read_timeout_s: float,
        blame: Callable[[ServerClient, ServerFailure], None],
        route: str = "generate",
    ) -> Leg:
        """Send the bodies for prefill and decode; an undivided server gets the latter alone."""
        prefill = self.prefill.engine
        decode = self.decode.engine
        if self.prefill is self.decode:
            self.legs = Leg(
                decode, rids, bodies[1], read_timeout_s, self.close_prefill, blame, route
            )
        else:
            self.legs = Legs(
                prefill, decode, rids, bodies, read_timeout_s, self.close_prefill, blame, route
            )
        return self.legs

    def close_prefill(self) -> None:
        """Free the prefill server's slot, because the prompt is prefilled."""
        if self.prefill is not self.decode:
            self.prefill.close()
        self.decode.note_prefill()
        if self.turn is not None:
            self.turn.end(prefilled=True)

    def close(self) -> None:
        """Abort the legs, unless they have ended, and free the slots; idempotent."""
        if self.legs is not None:
            self.legs.close()
        if self.turn is not None:
            self.turn.end(prefilled=False)
        self.prefill.close()
        self.decode.close()


@dataclass(slots=True, eq=False)
class Attempts:
    """The attempts of one request, each on servers that have not failed it, if there are others.

    An error status that each of several attempts gets is the request's fault, and counts on no
    circuit breaker: it would take the servers from all other requests. So the statuses of early
    attempts count once another attempt succeeds, or fails otherwise.
    """

    fleet: PairFleet
    request: PlacementRequest
    odd_fields: Collection[str] = ()
    """With any of these fields a request whose server broke its connection is not sent again: it
    might end the next server, too.
    """
    made: int = 0
    _avoid: set[ServerClient] = field(default_factory=set)
    _last: EngineError | None = None
    _statuses: list[tuple[ServerClient, EngineRejected]] | None = field(default_factory=list)

    def blame(self, server: ServerClient, error: ServerFailure) -> None:
        """Count `error` on the server's breaker, unless it may still be the request's fault."""
        has_several = self.fleet.retries.attempts > 1
        if isinstance(error, EngineRejected) and has_several and self._statuses is not None:
            self._statuses.append((server, error))
        else:
            self.count_statuses()
            server.note_failure(error)

    def count_statuses(self) -> None:
        """Count earlier and later error statuses as the servers' faults.

        An attempt has succeeded, or has failed in another way.
        """
        for server, error in self._statuses or ():
            server.note_failure(error)
        self._statuses = None

    async def pick(self) -> Pair:
        """Take slots for the next attempt: on decode first, as SGLang does.

        A request that waits for a slot on prefill so keeps no decode server from its work, and a
        request with both slots waits for nothing more.

        Raises:
            EngineError: No slot came free: the error of the attempt before, or EngineUnavailable.
        """
        fleet = self.fleet
        try:
            fleet.prefills.serving()
            to_decode = await take_slot(fleet.decodes, self.request, self._avoid)
            if fleet.undivided:
                return self._pair(to_decode, to_decode)
            try:
                to_prefill = await take_slot(fleet.prefills, self.request, self._avoid)
            except BaseException:
                to_decode.close()
                raise
        except EngineUnavailable as refusal:
            raise self._last or refusal from None
        return self._pair(to_prefill, to_decode)

    def _pair(
        self, to_prefill: EngineSlot[ServerClient], to_decode: EngineSlot[ServerClient]
    ) -> Pair:
        fleet = self.fleet
        fleet.retried += self.made > 0
        bootstrap = fleet.prefill_only[to_prefill.engine].draw_bootstrap()
        tier = fleet.tier_fields(self.request.hints.tier)
        return Pair(to_prefill, to_decode, {**bootstrap, **tier})

    async def wait_after(self, pair: Pair, error: EngineError) -> None:
        """Return when the attempt after `pair` is due; raise `error` if it was the last."""
        blamed_servers: Collection[ServerClient] = ()
        if pair.legs is not None:
            blamed_servers = pair.legs.blamed_servers
        self.made += 1
        if self.odd_fields and isinstance(error.__cause__, AnswerBroken):
            names = ", ".join(sorted(self.odd_fields))
            log.error("not sent again, as a server may die of its %s: %s", names, error)
            raise error
        wait_s = self.fleet.retries.wait_s(error, self.made, self.fleet.draw())
        if wait_s is None:
            if (
                self.made < self.fleet.retries.attempts
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
