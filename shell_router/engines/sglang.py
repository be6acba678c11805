"""A model's prefill and decode servers as an engine: SGLang's, or servers that speak its wire
format.
"""

import asyncio
import logging
import random
import ssl
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import orjson

from shell_router.core.engine import ChatServing, Finish, Generation, PrefillCost, Prefilled, Tokens
from shell_router.engines.address import DEFAULT_LIMITS, PairAddress, PairLimits
from shell_router.engines.native_body import ADAPTER, ANY_MODEL, CACHE_KEY, NativeRules
from shell_router.engines.pairing import Attempts, Legs, Pairing, engine_slot
from shell_router.engines.prefill_only import PrefillOnly, PrefillWay
from shell_router.engines.relay import PairRelay
from shell_router.engines.server_client import Monitor, ServerClient, Transport
from shell_router.engines.wire import broken_wire, leg_bodies
from shell_router.errors import EngineError, EngineRejected
from shell_router.http.client import HttpClient
from shell_router.http.tasks import TaskOwner
from shell_router.routing.dispatcher import SchedulingSettings, TrackedEngine
from shell_router.routing.failures import (
    DEFAULT_BREAKER,
    DEFAULT_RETRIES,
    BreakerSettings,
    RetrySettings,
)
from shell_router.routing.placement import PlacementRequest

log = logging.getLogger(__name__)

DEFAULT_SCHEDULING = SchedulingSettings()
HEALTH_LIMIT_S = 10.0


def random_bootstrap_room() -> int:
    """A fresh bootstrap room, below 2^62 so that a batch may count on from it."""
    return random.getrandbits(62)


def random_rid() -> str:
    """A fresh request id."""
    return f"{random.getrandbits(128):032x}"


class SglangPair:
    """The prefill-decode pairs of one model as an `Engine` and a `Relay`.

    Any prefill server works with any decode server. Requests of one affinity keep their prefill
    server; else `scheduling` says which takes the next, and when. A request that fails before its
    first token is sent again, on other servers if there are others. It opens as many connections as
    requests run at a time, and keeps them for the next ones.

    `servers` are prefill servers first, `dispatchers` theirs and those of decode.
    `room` gives fresh bootstrap rooms below 2^63, `rid` fresh request ids, none of which begins
    with another; `draw` is uniform in [0, 1), `clock` monotonic seconds. Relayed bodies are checked
    by `rules`, but none may name one of its `adapters`, with which the servers were started, or
    another's cache. If it `isolates`, each user has a prefix cache of its own there. `key` is sent
    as a bearer; `tls` is for https. `ready_route` answers well once a server is ready.
    """

    ready_route = "health"

    def __init__(
        self,
        *addresses: PairAddress,
        limits: PairLimits = DEFAULT_LIMITS,
        retries: RetrySettings = DEFAULT_RETRIES,
        breaker: BreakerSettings = DEFAULT_BREAKER,
        room: Callable[[], int] = random_bootstrap_room,
        rid: Callable[[], str] = random_rid,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
        rules: NativeRules = ANY_MODEL,
        isolates: bool = False,
        scheduling: SchedulingSettings = DEFAULT_SCHEDULING,
        adapters: Collection[str] = (),
        key: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not addresses:
            raise ValueError("name at least one pair")
        self.addresses = addresses
        self._limits = limits
        self._tasks = TaskOwner()
        self._http = HttpClient(connect_s=limits.connect_s, tls=tls)
        transport = Transport(self._http, self._tasks, limits, breaker, clock, key)
        self._pairing = Pairing(addresses, transport, room, scheduling, retries, draw)
        self.servers = self._pairing.servers
        self.dispatchers = self._pairing.prefills, self._pairing.decodes
        self.adapters = adapters
        self.chat: ChatServing | None = None
        """See `Relay.chat`; known after `probe`."""
        self._rid = rid
        self._clock = clock
        self._prefill_only = {
            server: self._prefill_only_of(server) for server in self._pairing.prefills.engines
        }
        self._monitors: list[Monitor[ServerClient]] = []
        self._isolates = isolates
        chosen = frozenset([ADAPTER] * bool(adapters) + [CACHE_KEY] * isolates)
        rules = replace(rules, fields=rules.fields - chosen)
        self.forward = PairRelay(
            self._pairing, self._prefill_only, rid, rules, isolates, chosen
        ).forward
        """See `Relay.forward`, and `PairRelay.forward`."""

    @property
    def retried(self) -> int:
        """Attempts that were not their request's first."""
        return self._pairing.retried

    @property
    def prefill_ways(self) -> tuple[PrefillWay, ...]:
        """How each prefill server makes prefill-only requests: `route` until `probe` has found
        out."""
        return tuple(only.way for only in self._prefill_only.values())

    @property
    def prefill_cost(self) -> PrefillCost | None:
        """What `probe` measured of prefill-only requests to an idle server, the dearest where there
        are several.
        """
        costs = [only.cost for only in self._prefill_only.values() if only.cost is not None]
        return max(costs, key=lambda cost: cost.fixed_s / cost.token_s, default=None)

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`. Raises PromptTooLong where the engine says so."""
        request = self._isolated(request)
        attempts = Attempts(self._pairing, PlacementRequest.of(request))
        sent = request
        while True:
            pair = await attempts.pick()
            begun = False
            try:
                request.on_placed(*pair.placed)
                bodies = leg_bodies(sent, pair.bootstrap)
                prefill = pair.prefill.engine
                decode = pair.decode.engine
                stall_s = self._limits.stall_s
                legs = Legs(
                    prefill, decode, (sent.rid,), bodies, stall_s, pair.prefilled, attempts.blame
                )
                pair.legs = legs
                while True:
                    event = await legs.next(logprobs=request.logprobs)
                    if not begun:
                        begun = True
                        attempts.answered()
                    if isinstance(event, Finish):
                        pair.decode.completed()
                        yield event
                        return
                    pair.decode.wrote(len(event.ids))
                    yield event
            except EngineError as error:
                if begun or pair.legs is None:
                    raise
                failure = error
            finally:
                pair.close()
            await attempts.failed(pair, failure)
            # engines abort whatever begins with the id of an attempt before, so that stands last
            sent = replace(request, rid=f"{attempts.made}.{request.rid}")

    def _isolated(self, request: Generation) -> Generation:
        if self._isolates:
            return replace(request, cache_key=request.hints.user)
        return request

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`. It is made once, in its server's way: a failure costs no more than
        the overlap.
        """
        request = self._isolated(request)
        slot = await engine_slot(self._pairing.prefills, PlacementRequest.of(request, update=True))
        try:
            return await self._prefill_only[slot.engine].prefill(request)
        finally:
            slot.close()

    def _prefill_only_of(self, server: ServerClient) -> PrefillOnly:
        return PrefillOnly(server, self._pairing, self._rid, self._clock)

    async def probe(self) -> tuple[PrefillWay, ...]:
        """Ask every server what it is, and find each prefill server's first way of prefill-only
        that warms its cache.

        Raises EngineRejected when no way warms anything or a server has another role,
        EngineUnreachable or EngineStalled when one does not serve.
        """
        await self._probe(self.servers)
        self.chat = await chat_of(self.servers)
        return self.prefill_ways

    async def _probe(self, servers: Sequence[ServerClient]) -> None:
        routes = await asyncio.gather(*(one.knows_contract() for one in servers))
        for server, route in zip(servers, routes, strict=True):
            if server in self._prefill_only:
                await self._prefill_only[server].probe(route=route)

    async def add(self, address: PairAddress) -> None:
        """Send requests to this pair, too, once its servers are healthy and probed. Raises
        EngineError.
        """
        clients = self._pairing.clients_of(address)
        new = [one for one in clients if one not in self.servers]
        try:
            await asyncio.gather(*(one.get("health", limit_s=HEALTH_LIMIT_S) for one in new))
            if clients[0] in new:
                self._prefill_only[clients[0]] = self._prefill_only_of(clients[0])
            await self._probe(new)
            if self.chat is not None and new:
                chat = await chat_of(
                    new
                )  # those that serve already may be down, and this pair their replacement
                if chat is None or self.chat.tool_parser not in (None, chat.tool_parser):
                    remedy = "Start its engines with the --tool-call-parser of the model's others."
                    raise EngineRejected(
                        "The pair has no chats, or others than the model.",
                        status=400,
                        remedy=remedy,
                    )
        except BaseException:
            self.forget(new)
            raise
        self._pairing.add(*clients)
        self._serve((*self.addresses, address))

    def drain(self, address: PairAddress) -> list[TrackedEngine[ServerClient]]:
        """Send requests to this pair no more, but to those of its servers that others name; gives
        its other ones.
        """
        left = tuple(one for one in self.addresses if one != address)
        keep = {server for one in left for server in (one.prefill, one.decode)}
        drained = [
            of.drain(one) for of in self.dispatchers for one in of.engines if one.server not in keep
        ]
        self._serve(left)
        return drained

    def forget(self, servers: Iterable[ServerClient]) -> None:
        """They were drained, and nothing runs there any more."""
        for one in servers:
            self._prefill_only.pop(one, None)
            self._pairing.forget(one)

    def _serve(self, addresses: tuple[PairAddress, ...]) -> None:
        self.addresses = addresses
        self.servers = self._pairing.servers
        for monitor in self._monitors:
            monitor.follow()

    async def version(self) -> str:
        """The version that the first decode server names itself by. Raises EngineError."""
        server = self._pairing.decodes.engines[0]
        found = await server.info()
        if "version" not in found:
            raise broken_wire(server.name, "server_info without a version")
        return str(found["version"])

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """While the context is open, every server is asked for its state: often where choices
        depend on it.
        """
        async with AsyncExitStack() as stack:
            for one in self.dispatchers:
                self._monitors.append(
                    await stack.enter_async_context(Monitor(one, ServerClient.report))
                )
            yield
            self._monitors.clear()

    async def ready(self) -> None:
        """Return when every server says that it is healthy; raises EngineError for the first that
        does not.
        """
        await asyncio.gather(
            *(server.get(self.ready_route, limit_s=HEALTH_LIMIT_S) for server in self.servers)
        )

    async def serves(self) -> bool:
        """Whether at least one server of each role says that it is healthy."""

        async def is_healthy(server: ServerClient) -> bool:
            with suppress(EngineError):
                await server.get(self.ready_route, limit_s=HEALTH_LIMIT_S)
                return True
            return False

        healthy = dict(
            zip(self.servers, await asyncio.gather(*map(is_healthy, self.servers)), strict=True)
        )
        return all(any(healthy[server] for server in of.engines) for of in self.dispatchers)

    @property
    def tool_parser(self) -> str | None:
        """See `CallParser`."""
        return self.chat.tool_parser if self.chat else None

    async def parse_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[Any]]:
        """See `CallParser`: by the `/parse_function_call` of a decode server."""
        body = orjson.dumps(
            {"text": text, "tools": list(tools), "tool_call_parser": self.tool_parser}
        )
        servers = self._pairing.decodes.engines
        server = next((one for one in servers if one.answers), servers[0])
        answer = await server.post("parse_function_call", body, limit_s=self._limits.stall_s)
        try:
            found = orjson.loads(answer)
            calls = [
                {"name": one["name"], "arguments": orjson.loads(one["parameters"])}
                for one in found["calls"]
            ]
            return str(found["normal_text"]), calls
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise broken_wire(server.name, f"{answer[:200]!r}") from error

    @property
    def seems_up(self) -> bool:
        """Whether at least one server of each role answered when it was last asked, and its breaker
        is closed.
        """
        return all(
            any(one.answers and not one.breaker.open for one in of.engines)
            for of in self.dispatchers
        )

    async def aclose(self) -> None:
        """Wait, within the abort limit, for the aborts and legs that still end, and close idle
        connections.
        """
        await self._tasks.aclose(self._limits.abort_s)
        await self._http.aclose(self._limits.abort_s)


async def chat_of(servers: Sequence[ServerClient]) -> ChatServing | None:
    """What all of `servers` have of SGLang's OpenAI routes; None where one has none, or does not
    answer.

    SGLang's servers name their parser of tool calls, set or not; other servers do not.
    """
    try:
        found = await asyncio.gather(*(one.info() for one in servers))
    except EngineError as error:
        log.warning(
            "chats are not forwarded, as a server does not say whether it has them: %s", error
        )
        return None
    if not all("tool_call_parser" in one for one in found):
        return None
    parsers = {one["tool_call_parser"] for one in found}
    return ChatServing(parsers.pop() if len(parsers) == 1 else None)


class AdaptedModel:
    """Every request is one for the same adapter. Implements `Engine` and `Relay`."""

    def __init__(self, engine: SglangPair, adapter: str) -> None:
        self._engine = engine
        self._adapter = adapter
        self.forward = partial(engine.forward, adapter=adapter)
        """See `Relay.forward`."""

    @property
    def chat(self) -> ChatServing | None:
        """See `Relay`."""
        return self._engine.chat

    def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`."""
        return self._engine.generate(replace(request, adapter=self._adapter))

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`."""
        return await self._engine.prefill(replace(request, adapter=self._adapter))
