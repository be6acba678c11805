"""The client of one prefill-decode pair: SGLang, or the embedded pair, which speaks the same wire format."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace

import orjson

from shell_router.core.engine_errors import error_message
from shell_router.core.generation import Finish, Generation, Prefilled, Tokens
from shell_router.core.relay import NativeRoute, Relayed
from shell_router.engines.address import DEFAULT_LIMITS, Bootstrap, PairAddress, PairLimits, Server, random_room
from shell_router.engines.leg_client import HTTP_OK, LegClient
from shell_router.engines.legs import LegBodies, Legs
from shell_router.engines.prefill_only import PrefillOnly, PrefillWay
from shell_router.engines.relay import PairRelay
from shell_router.engines.wire import (
    EventSplitter,
    OutputReader,
    body_fields,
    broken_wire,
    read_prefilled,
    rejected,
)
from shell_router.errors import EngineUnreachable


def random_rid() -> str:
    """A fresh request id."""
    return f"{random.getrandbits(128):032x}"


@dataclass(frozen=True, slots=True)
class LegLoad:
    """Requests on one server of the pair, summed over its data-parallel ranks."""

    running: int
    waiting: int


class SglangPair:
    """One pair as an `Engine` and a `Relay`.

    It opens as many connections as requests run at a time, and keeps them for the next ones. `room` gives fresh
    bootstrap rooms below 2^63, `rid` fresh request ids. With `vocabulary` relayed token ids are checked against it.
    """

    def __init__(
        self,
        address: PairAddress,
        *,
        limits: PairLimits = DEFAULT_LIMITS,
        room: Callable[[], int] = random_room,
        rid: Callable[[], str] = random_rid,
        vocabulary: int | None = None,
    ) -> None:
        self.address = address
        self._limits = limits
        self._bootstrap = Bootstrap(address.bootstrap_host, address.bootstrap_port, room)
        self._client = LegClient(address.prefill, address.decode, limits)
        self._prefill_only = PrefillOnly(self._client, self._bootstrap, self._prefill_by_pair, rid)
        self._relay = PairRelay(self._client, self._bootstrap, self._prefill_only, rid, vocabulary)

    @property
    def prefill_way(self) -> PrefillWay:
        """How prefill-only requests are made: `route` until `probe` has found out."""
        return self._prefill_only.way

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`. Raises PromptTooLong where the engine says so."""
        legs = Legs(self._client, self._bodies(request))
        reader = OutputReader(str(self._client.decode), logprobs=request.logprobs)
        events = EventSplitter()
        try:
            await self._accepted(legs)
            while chunk := await legs.read():
                for payload in events.feed(chunk):
                    tokens = reader.take(payload)
                    if tokens is not None:
                        yield tokens
            if reader.finish is None:
                raise EngineUnreachable(f"The {self._client.decode} closed its stream before the answer ended.")
            yield self._with_cached_tokens(reader.finish, await legs.settled())
        finally:
            legs.close()

    def _bodies(self, request: Generation) -> LegBodies:
        """The prefill leg is not streamed: its errors then come as HTTP statuses."""
        opened = orjson.dumps({**body_fields(request), **self._bootstrap.fields()})[:-1]
        return LegBodies(
            (request.rid,), opened + b',"stream":false}', opened + b',"stream":true}', self._limits.stall_s
        )

    async def _accepted(self, legs: Legs) -> None:
        response = await legs.head()
        if response.status == HTTP_OK:
            return
        body = bytearray()
        while chunk := await legs.read():
            body += chunk
        raise rejected(str(self._client.decode), response.status, error_message(bytes(body)))

    def _with_cached_tokens(self, finish: Finish, prefill_answer: bytes | None) -> Finish:
        """Decode repeats the prefill's `cached_tokens`, but adds its own hits where it has a prefix cache too."""
        if prefill_answer is None:
            return finish
        cached_tokens = read_prefilled(str(self._client.prefill), prefill_answer).cached_tokens
        return replace(finish, cached_tokens=cached_tokens)

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`; it is made in the way that `prefill_way` says."""
        return await self._prefill_only.prefill(request)

    async def _prefill_by_pair(self, request: Generation) -> Prefilled:
        async with aclosing(self.generate(request)) as events:
            async for event in events:
                if isinstance(event, Finish):
                    return Prefilled(event.prompt_tokens, event.cached_tokens)
        raise AssertionError("generate ends with a Finish or raises")

    async def probe(self, *, tokens: int = 256, vocabulary: int = 256) -> PrefillWay:
        """Find the first way of prefill-only that warms the prefix cache, use it from now on, and return it.

        Each way is tried with a prompt of `tokens` fresh random ids below `vocabulary`, sent twice. Raises
        EngineRejected when no way warms anything, EngineUnreachable or EngineStalled when the pair does not serve.
        """
        return await self._prefill_only.probe(tokens, vocabulary)

    def forward(self, route: NativeRoute, body: bytes) -> AbstractAsyncContextManager[Relayed]:
        """See `Relay.forward`. The answer relayed is decode's, or for `prefill_only` the prefill server's."""
        return self._relay.forward(route, body)

    async def loads(self) -> tuple[LegLoad, LegLoad]:
        """The requests that each server reports by `/v1/loads`: prefill's, then decode's. Raises EngineError."""
        prefill, decode = await asyncio.gather(self._load(self._client.prefill), self._load(self._client.decode))
        return prefill, decode

    async def running(self) -> int:
        """Requests that run or wait on either server. Raises EngineError."""
        return sum(load.running + load.waiting for load in await self.loads())

    async def _load(self, server: Server) -> LegLoad:
        answer = await self._client.get(server, "v1/loads", limit_s=self._limits.stall_s)
        try:
            ranks = orjson.loads(answer)["loads"]
            running = sum(rank["num_running_reqs"] for rank in ranks)
            return LegLoad(running, sum(rank["num_waiting_reqs"] for rank in ranks))
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise broken_wire(str(server), f"{answer[:200]!r}") from error

    async def ready(self, *, limit_s: float = 10.0) -> None:
        """Return when both servers say that they are healthy; raises EngineError for the first that does not."""
        both = (self._client.prefill, self._client.decode)
        await asyncio.gather(*(self._client.get(server, "health", limit_s=limit_s) for server in both))

    async def aclose(self) -> None:
        """Wait, within the abort limit, for the aborts and legs that still end, and close idle connections."""
        await self._client.aclose()


__all__ = ["LegLoad", "PairAddress", "PairLimits", "SglangPair"]
