"""Prefill without decode: by the plugin's route, or by a request that decodes one token.

An undivided server writes that token in the pass that prefills. A stock prefill server keeps the KV
of requests without a decode partner out of its prefix cache, so a probe finds a way that warms it.
"""

import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

from shell_router.core.engine import Finish, Generation, PrefillCost, Prefilled
from shell_router.engines.legs import Legs
from shell_router.engines.server_client import HTTP_OK, ServerClient, take_slot
from shell_router.engines.shared_prefixes import SharedPrefixes
from shell_router.engines.wire import body_fields, leg_bodies, read_prefilled
from shell_router.errors import EngineError, EngineRejected, PromptTooLong
from shell_router.http.client import Exchange
from shell_router.routing.dispatcher import Dispatcher
from shell_router.routing.failures import INTERNAL_ERROR
from shell_router.routing.increments import UNMEASURED
from shell_router.routing.placement import PlacementRequest

logger = logging.getLogger(__name__)

PrefillWay = Literal["route", "pair", "generate"]
PROBE_TOKENS = 256
MEASURED_ROUNDS = 3

_MOST_SHARED = 1024  # the probe's short prompts make a GPU's tokens look cheaper than a full pass's


@dataclass(slots=True, eq=False)
class PrefillOnly:
    """Prefill-only requests to one prefill server.

    Attributes:
        server: The server that prefills.
        decodes: The decode servers, for requests by a pair; None for an undivided server.
        bootstrap: The fields by which decode finds this server, without a room.
        rid: Gives fresh request ids.
        room: Gives random bootstrap rooms, which also serve as random numbers.
        clock: Gives monotonic seconds.
        way: The way in use.
        cost: The measured cost on an idle server.
        prefixes: The prompts that the server has prefilled or is prefilling.
        overlaps_passes: Whether it schedules a pass before the last one's prefixes are cached.
    """

    server: ServerClient
    decodes: Dispatcher[ServerClient] | None
    bootstrap: Mapping[str, Any]
    rid: Callable[[], str]
    room: Callable[[], int]
    clock: Callable[[], float]
    way: PrefillWay = "route"
    cost: PrefillCost | None = None
    prefixes: SharedPrefixes = field(default_factory=SharedPrefixes)
    overlaps_passes: bool = False

    def draw_bootstrap(self) -> Mapping[str, Any]:
        """Draw a room, and return the fields by which decode finds this server in it."""
        if self.decodes is None:
            return {}
        return {**self.bootstrap, "bootstrap_room": self.room()}

    @property
    def fewest_shared(self) -> float:
        """The common tokens that take longer to compute again than a request costs by itself."""
        if not self.overlaps_passes:
            return math.inf
        cost = self.cost or UNMEASURED
        return min(_MOST_SHARED, cost.fixed_s / cost.token_s)

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`; the caller holds a slot on this server."""
        request = replace(
            request, sampling={**request.sampling, "max_new_tokens": 1}, logprobs=False
        )
        if self.way == "pair" and self.decodes is not None:
            return await self._send_by_pair(request, self.decodes)
        body = orjson.dumps({**body_fields(request), "stream": False})
        async with self.forward(body, (request.rid,)) as response:
            return read_prefilled(self.server.name, await self.server.read_all(response))

    @asynccontextmanager
    async def forward(self, body: bytes, rids: Sequence[str]) -> AsyncIterator[Exchange]:
        """Send a body that decodes one token; abort it unless the answer is read to its end."""
        route = "prefill_only" if self.way == "route" else "generate"
        exchange = self.server.begin(route, body, streamed=True)
        try:
            await exchange.wait_for_head()
            yield exchange
            if exchange.status == HTTP_OK:
                self.server.note_success()
            elif exchange.status >= INTERNAL_ERROR:  # relayed as it is: nothing raised
                self.server.note_failure(EngineRejected("", status=exchange.status))
        except (EngineError, PromptTooLong) as error:
            self.server.note_failure(error)
            raise
        finally:
            if not exchange.complete:
                self.server.abort(rids)
                exchange.close()

    async def _send_by_pair(
        self, request: Generation, decodes: Dispatcher[ServerClient]
    ) -> Prefilled:
        """Decode one token on this server and a decode server."""
        # decode's limit does not hold for an update: requests that wait for this prefill server
        # may fill decode
        slot = await take_slot(decodes, PlacementRequest.of(request, update=True))
        try:
            bodies = leg_bodies(request, self.draw_bootstrap())
            stall_s = self.server.limits.stall_s
            legs = Legs(self.server, slot.engine, (request.rid,), bodies, stall_s)
            try:
                while not isinstance(event := await legs.next(logprobs=False), Finish):
                    pass
                return Prefilled(event.prompt_tokens, event.cached_tokens)
            finally:
                legs.close()
        finally:
            slot.close()

    async def probe(self, *, route: bool) -> None:
        """Find and measure the first way that warms the prefix cache, and use it from now on.

        Args:
            route: Whether the server's own route may be tried.

        Raises:
            EngineRejected: No way warms the cache.
        """
        outcomes = []
        ways: tuple[PrefillWay, ...] = ("route", "generate" if self.decodes is None else "pair")
        for way in ways if route else ways[1:]:
            self.way = way
            outcome = await self._try(self._draw_ids())
            words = str(outcome)
            if isinstance(outcome, int):
                words = f"{outcome} of {PROBE_TOKENS} tokens cached"
            outcomes.append(f"{self.way}: {words}")
            if isinstance(outcome, int) and outcome >= PROBE_TOKENS // 2:
                self.cost = await self._measure()
                logger.debug(
                    "prefill-only requests to the %s go by %s (%s)",
                    self.server,
                    self.way,
                    "; ".join(outcomes),
                )
                return
        raise EngineRejected(
            f"No prefill-only request of {PROBE_TOKENS} tokens warms the prefix cache of the "
            f"{self.server} "
            f"({'; '.join(outcomes)}).",
            status=501,
            remedy="Start it with its prefix cache on (without --disable-radix-cache).",
        )

    def _draw_ids(self) -> list[int]:
        """Draw ids that every vocabulary has, in an order that no cache knows."""
        return [self.room() % 256 for _ in range(PROBE_TOKENS)]

    async def _measure(self) -> PrefillCost:
        """Fit the cost to the shortest times of new prompts, and of the same prompts cached."""
        shortest: dict[bool, tuple[float, int]] = {}
        for _ in range(MEASURED_ROUNDS):
            ids = self._draw_ids()
            for cached in (False, True):
                began_s = self.clock()
                done = await self._send(ids)
                timed = self.clock() - began_s, done.prompt_tokens - done.cached_tokens
                shortest[cached] = min(shortest.get(cached, timed), timed)
        (long_s, many), (short_s, few) = shortest[False], shortest[True]
        return PrefillCost.through(few, short_s, many, long_s)

    async def _send(self, input_ids: Sequence[int]) -> Prefilled:
        return await self.prefill(Generation(rid=self.rid(), input_ids=input_ids))

    async def _try(self, input_ids: Sequence[int]) -> int | EngineRejected:
        """Return the tokens cached at the second sending, or the error of a server that refuses."""
        try:
            await self._send(input_ids)
            return (await self._send(input_ids)).cached_tokens
        except EngineRejected as refusal:
            return refusal
