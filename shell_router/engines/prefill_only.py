"""Prefill without decode: the ways a server may offer it, and how to find out which one warms its cache."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

import orjson

from shell_router.core.engine import Generation, PrefillCost, Prefilled
from shell_router.engines.address import Bootstrap
from shell_router.engines.http_client import Exchange
from shell_router.engines.native_body import NativeBody
from shell_router.engines.server_client import HTTP_OK, ServerClient
from shell_router.engines.wire import body_fields, read_prefilled
from shell_router.errors import EngineError, EngineRejected, PromptTooLong
from shell_router.routing.failures import INTERNAL_ERROR

logger = logging.getLogger(__name__)

PrefillWay = Literal["route", "fake_host", "pair"]
"""How a prefill-only request is made: its own route, SGLang's fake bootstrap host, or a real pair of one token."""

PREFILL_WAYS: tuple[PrefillWay, ...] = ("route", "fake_host", "pair")
FAKE_BOOTSTRAP_HOST = "2.2.2.2"
"""SGLang's own marker for a prefill without a decode partner (`disaggregation.utils.FAKE_BOOTSTRAP_HOST`)."""

MEASURED_ROUNDS = 3


class PrefillOnly:
    """Prefill-only requests to one prefill server, by the way in `way`; `cost` is theirs on an idle server.

    `by_pair` runs a one-token request on this server and a decode server.
    """

    def __init__(
        self,
        server: ServerClient,
        bootstrap: Bootstrap,
        by_pair: Callable[[Generation], Awaitable[Prefilled]],
        rid: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        self.way: PrefillWay = "route"
        self.cost: PrefillCost | None = None
        self._server = server
        self._bootstrap = bootstrap
        self._by_pair = by_pair
        self._rid = rid
        self._clock = clock

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`."""
        return await self._prefill_by(self.way, request)

    async def _prefill_by(self, way: PrefillWay, request: Generation) -> Prefilled:
        one_token = replace(request, sampling={**request.sampling, "max_new_tokens": 1}, logprobs=False)
        if way == "pair":
            return await self._by_pair(one_token)
        body = orjson.dumps({**body_fields(one_token), **self._fields(way), "stream": False})
        async with self._post(way, body, (request.rid,)) as response:
            return read_prefilled(self._server.name, await self._server.read_all(response))

    def _fields(self, way: PrefillWay) -> dict[str, Any]:
        return {**self._bootstrap.fields(), "bootstrap_host": FAKE_BOOTSTRAP_HOST} if way == "fake_host" else {}

    @asynccontextmanager
    async def forward(self, native: NativeBody) -> AsyncIterator[Exchange]:
        """The prefill server's answer to a client's own body; not for the way `pair`."""
        async with self._post(self.way, native.with_fields(self._fields(self.way)), native.rids) as response:
            yield response

    @asynccontextmanager
    async def _post(self, way: PrefillWay, body: bytes, rids: Sequence[str]) -> AsyncIterator[Exchange]:
        """A request to the prefill server only, aborted unless its answer is read to the end."""
        exchange = self._server.begin("prefill_only" if way == "route" else "generate", body)
        try:
            await exchange.head()
            yield exchange
            if exchange.status == HTTP_OK:
                self._server.succeeded()
            elif exchange.status >= INTERNAL_ERROR:  # a relayed answer; `read_all` raises by itself
                self._server.failed(EngineRejected("", status=exchange.status))
        except (EngineError, PromptTooLong) as error:
            self._server.failed(error)
            raise
        finally:
            if not exchange.complete:
                self._server.abort(rids)
                exchange.close()

    async def probe(self, tokens: int, vocabulary: int, *, route: bool = True) -> PrefillWay:
        """Find the first way that warms the prefix cache, use it from now on and measure it; see `SglangPair.probe`.

        Without `route` the server's own route is not tried.
        """
        found = []
        for way in PREFILL_WAYS if route else PREFILL_WAYS[1:]:
            outcome = await self._try(way, self._fresh(tokens, vocabulary))
            found.append(
                f"{way}: {outcome if isinstance(outcome, Exception) else f'{outcome} of {tokens} tokens cached'}"
            )
            if isinstance(outcome, int) and outcome >= tokens // 2:
                self.way = way
                self.cost = await self._measured(tokens, vocabulary)
                logger.info("prefill-only requests to the %s go by %s (%s)", self._server, way, "; ".join(found))
                return way
        raise EngineRejected(
            f"No prefill-only request of {tokens} tokens warms the prefix cache of the {self._server} "
            f"({'; '.join(found)}).",
            status=501,
            remedy="Start it with its prefix cache on (without --disable-radix-cache).",
        )

    def _fresh(self, tokens: int, vocabulary: int) -> list[int]:
        return [self._bootstrap.room() % vocabulary for _ in range(tokens)]

    async def _measured(self, tokens: int, vocabulary: int) -> PrefillCost:
        """A line through the shortest times of fresh prompts and of the same prompts once they are cached."""
        shortest: dict[bool, tuple[float, int]] = {}
        for _ in range(MEASURED_ROUNDS):
            ids = self._fresh(tokens, vocabulary)
            for cached in (False, True):
                began_s = self._clock()
                done = await self._prefill_by(self.way, Generation(rid=self._rid(), input_ids=ids))
                timed = self._clock() - began_s, done.prompt_tokens - done.cached_tokens
                shortest[cached] = min(shortest.get(cached, timed), timed)
        (long_s, many), (short_s, few) = shortest[False], shortest[True]
        return PrefillCost.through(few, short_s, many, long_s)

    async def _try(self, way: PrefillWay, input_ids: Sequence[int]) -> int | EngineRejected:
        """Tokens found cached on the second sending, or the refusal where the server knows no such way."""
        try:
            await self._prefill_by(way, Generation(rid=self._rid(), input_ids=input_ids))
            return (await self._prefill_by(way, Generation(rid=self._rid(), input_ids=input_ids))).cached_tokens
        except EngineRejected as refusal:
            return refusal
