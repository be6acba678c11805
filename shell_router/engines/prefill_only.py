"""Prefill without decode: by the plugin's route, or by a pair that decodes one token; which of them
warms the cache.

Stock SGLang keeps the KV of requests without a decode partner out of its prefix cache.
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal

import orjson

from shell_router.core.engine import Finish, Generation, PrefillCost, Prefilled
from shell_router.engines.fleet import take_slot
from shell_router.engines.legs import Legs
from shell_router.engines.pairing import Pairing
from shell_router.engines.server_client import HTTP_OK, ServerClient
from shell_router.engines.wire import body_fields, leg_bodies, read_prefilled
from shell_router.errors import EngineError, EngineRejected, PromptTooLong
from shell_router.http.client import Exchange
from shell_router.routing.failures import INTERNAL_ERROR
from shell_router.routing.placement import PlacementRequest

logger = logging.getLogger(__name__)

PrefillWay = Literal["route", "pair"]
PREFILL_WAYS: tuple[PrefillWay, ...] = ("route", "pair")
PROBE_TOKENS = 256
MEASURED_ROUNDS = 3


@dataclass(slots=True, eq=False)
class PrefillOnly:
    """Prefill-only requests to one prefill server, by the way in `way`; `cost` is theirs on an idle
    server.
    """

    server: ServerClient
    pairing: Pairing
    rid: Callable[[], str]
    clock: Callable[[], float]
    way: PrefillWay = "route"
    cost: PrefillCost | None = None

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`. The caller holds a slot on this server."""
        request = replace(
            request, sampling={**request.sampling, "max_new_tokens": 1}, logprobs=False
        )
        if self.way == "pair":
            return await self._by_pair(request)
        return await self._by_route(request)

    async def _by_route(self, request: Generation) -> Prefilled:
        body = orjson.dumps({**body_fields(request), "stream": False})
        async with self.forward(body, (request.rid,)) as response:
            return read_prefilled(self.server.name, await self.server.read_all(response))

    @asynccontextmanager
    async def forward(self, body: bytes, rids: Sequence[str]) -> AsyncIterator[Exchange]:
        """The server's answer to a body by its route, aborted unless it is read to the end."""
        exchange = self.server.begin("prefill_only", body, streamed=True)
        try:
            await exchange.head()
            yield exchange
            if exchange.status == HTTP_OK:
                self.server.succeeded()
            elif exchange.status >= INTERNAL_ERROR:  # a relayed answer; `read_all` raises by itself
                self.server.failed(EngineRejected("", status=exchange.status))
        except (EngineError, PromptTooLong) as error:
            self.server.failed(error)
            raise
        finally:
            if not exchange.complete:
                self.server.abort(rids)
                exchange.close()

    async def _by_pair(self, request: Generation) -> Prefilled:
        """One token by this server and a decode server."""
        # an update is not limited on decode: requests that wait for this prefill server may hold
        # its last slots
        slot = await take_slot(self.pairing.decodes, PlacementRequest.of(request, update=True))
        try:
            bodies = leg_bodies(request, self.pairing.bootstrap(self.server))
            stall_s = self.pairing.limits.stall_s
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
        """Find the first way that warms the prefix cache, use it from now on and measure it; see
        `SglangPair.probe`.

        Without `route` the server's own route is not tried.
        """
        found = []
        for way in PREFILL_WAYS if route else PREFILL_WAYS[1:]:
            self.way = way
            outcome = await self._try(self._fresh())
            if isinstance(outcome, Exception):
                said = str(outcome)
            else:
                said = f"{outcome} of {PROBE_TOKENS} tokens cached"
            found.append(f"{self.way}: {said}")
            if isinstance(outcome, int) and outcome >= PROBE_TOKENS // 2:
                self.cost = await self._measured()
                logger.info(
                    "prefill-only requests to the %s go by %s (%s)",
                    self.server,
                    self.way,
                    "; ".join(found),
                )
                return
        raise EngineRejected(
            f"No prefill-only request of {PROBE_TOKENS} tokens warms the prefix cache of the "
            f"{self.server} "
            f"({'; '.join(found)}).",
            status=501,
            remedy="Start it with its prefix cache on (without --disable-radix-cache).",
        )

    def _fresh(self) -> list[int]:
        """Ids that every vocabulary has, in an order that no cache knows."""
        return [self.pairing.room() % 256 for _ in range(PROBE_TOKENS)]

    async def _measured(self) -> PrefillCost:
        """A line through the shortest times of fresh prompts and of the same prompts once they are
        cached.
        """
        shortest: dict[bool, tuple[float, int]] = {}
        for _ in range(MEASURED_ROUNDS):
            ids = self._fresh()
            for cached in (False, True):
                began_s = self.clock()
                done = await self._once(ids)
                timed = self.clock() - began_s, done.prompt_tokens - done.cached_tokens
                shortest[cached] = min(shortest.get(cached, timed), timed)
        (long_s, many), (short_s, few) = shortest[False], shortest[True]
        return PrefillCost.through(few, short_s, many, long_s)

    async def _once(self, input_ids: Sequence[int]) -> Prefilled:
        return await self.prefill(Generation(rid=self.rid(), input_ids=input_ids))

    async def _try(self, input_ids: Sequence[int]) -> int | EngineRejected:
        """Tokens found cached on the second sending, or the refusal where the server knows no such
        way.
        """
        try:
            await self._once(input_ids)
            return (await self._once(input_ids)).cached_tokens
        except EngineRejected as refusal:
            return refusal
