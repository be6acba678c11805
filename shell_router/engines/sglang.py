"""A model's pairs or undivided servers as an engine: SGLang's, or others with its wire format."""

import random
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import orjson

from shell_router.core.engine import ChatServing, Finish, Generation, Prefilled, Tokens
from shell_router.core.exact_json import Values, write_json
from shell_router.core.sampling import PLAIN
from shell_router.engines.address import (
    DEFAULT_LIMITS,
    PairAddress,
    PairLimits,
    ServerAddress,
)
from shell_router.engines.native_body import ADAPTER, ANY_MODEL, CACHE_KEY, NativeRules
from shell_router.engines.pair_fleet import PairFleet
from shell_router.engines.pairing import Attempts
from shell_router.engines.relay import PairRelay
from shell_router.engines.server_client import Transport, take_slot
from shell_router.engines.wire import leg_bodies, wire_error
from shell_router.errors import EngineError
from shell_router.http.client import HttpClient
from shell_router.http.tasks import TaskOwner
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.failures import (
    DEFAULT_BREAKER,
    DEFAULT_RETRIES,
    BreakerSettings,
    RetrySettings,
)
from shell_router.routing.placement import PlacementRequest

DEFAULT_SCHEDULING = SchedulingSettings()


def random_bootstrap_room() -> int:
    """Draw a bootstrap room, below 2^62 so that a batch may count on from it."""
    return random.getrandbits(62)


def random_rid() -> str:
    """Draw a request id."""
    return f"{random.getrandbits(128):032x}"


class SglangPair:
    """The pairs or the undivided servers of one model as `Engine`, `Relay` and `CallParser`.

    Requests of one affinity keep their prefill server; else `scheduling` says which server takes
    the next request, and when. A request that fails before its first token is sent again, on other
    servers if there are others. Each running request has a connection, which is kept for the next.

    Args:
        addresses: At least one pair, or one undivided server.
        limits: Of waiting for the servers.
        retries: Of requests that fail before their first token.
        breaker: Of each server.
        room: Gives fresh bootstrap rooms below 2^63.
        rid: Gives fresh request ids, none of which begins with another.
        draw: Gives uniform numbers in [0, 1).
        clock: Gives monotonic seconds.
        rules: Check relayed bodies.
        isolates: Each user has a prefix cache of its own.
        scheduling: The choice of servers, and the queue for them.
        adapters: The LoRA adapters with which the servers were started. No relayed body may name
            one: adapters are models of their own.
        folder: The model's folder.
        key: Sent as a bearer.
        tls: For https.
    """

    fleet_type: ClassVar[type[PairFleet]] = PairFleet

    def __init__(
        self,
        *addresses: PairAddress | ServerAddress,
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
        folder: Path = Path(),
        key: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not addresses:
            raise ValueError("name at least one server")
        self.adapters = adapters
        self._limits = limits
        self._tasks = TaskOwner()
        self._http = HttpClient(connect_s=limits.connect_s, tls=tls)
        transport = Transport(self._http, self._tasks, limits, breaker, clock, folder, key)
        undivided = len(addresses[0].servers) == 1
        self.fleet = self.fleet_type(
            transport, scheduling, retries, room, rid, draw, undivided=undivided
        )
        for address in addresses:
            self.fleet.use(address)
        self._isolates = isolates
        chosen = frozenset([ADAPTER] * bool(adapters) + [CACHE_KEY] * isolates)
        rules = replace(rules, fields=rules.fields - chosen)
        self.forward = PairRelay(self.fleet, rid, rules, isolates, chosen).forward
        """See `Relay.forward`, and `PairRelay.forward`."""

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`. Raises PromptTooLong if the engine says so."""
        request = self._isolate(request)
        odd_fields = request.sampling.keys() - PLAIN
        attempts = Attempts(self.fleet, PlacementRequest.of(request), odd_fields)
        sent = request
        while True:
            pair = await attempts.pick()
            begun = False
            try:
                request.on_placed(*pair.placed)
                pair.turn = await self.fleet.begin_prompt(request, pair.prefill.engine)
                bodies = leg_bodies(sent, pair.fields)
                legs = pair.start((sent.rid,), bodies, self._limits.stall_s, attempts.blame)
                while True:
                    event = await legs.next(logprobs=request.logprobs)
                    if not begun:
                        begun = True
                        attempts.count_statuses()
                    if isinstance(event, Finish):
                        pair.decode.note_completion()
                        yield event
                        return
                    pair.decode.note_tokens(len(event.ids))
                    yield event
            except EngineError as error:
                if begun or pair.legs is None:
                    raise
                failure = error
            finally:
                pair.close()
            await attempts.wait_after(pair, failure)
            # engines abort whatever begins with the id of an attempt before, so that stands last
            sent = replace(request, rid=f"{attempts.made}.{request.rid}")

    def _isolate(self, request: Generation) -> Generation:
        if self._isolates:
            return replace(request, cache_key=request.hints.user)
        return request

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`.

        It is sent once: a failure costs no more than the overlap.
        """
        request = self._isolate(request)
        slot = await take_slot(self.fleet.prefills, PlacementRequest.of(request, update=True))
        turn = None
        try:
            turn = await self.fleet.begin_prompt(request, slot.engine)
            done = await self.fleet.prefill_only[slot.engine].prefill(request)
            if turn is not None:
                turn.end(prefilled=True)
            return done
        finally:
            slot.close()
            if turn is not None:
                turn.end(prefilled=False)

    @property
    def chat(self) -> ChatServing | None:
        """See `Relay.chat`."""
        return self.fleet.chat

    @property
    def tool_parser(self) -> str | None:
        """See `CallParser`."""
        return self.chat.tool_parser if self.chat else None

    async def parse_calls(self, text: str, tools: Sequence[Values]) -> tuple[str, list[Any]]:
        """See `CallParser`; a decode server parses by `/parse_function_call`."""
        body = write_json(
            {"text": text, "tools": list(tools), "tool_call_parser": self.tool_parser}
        )
        servers = self.fleet.decodes.engines
        server = next((server for server in servers if server.answers), servers[0])
        answer = await server.post("parse_function_call", body, limit_s=self._limits.stall_s)
        try:
            parsed = orjson.loads(answer)
            calls = [
                {"name": call["name"], "arguments": orjson.loads(call["parameters"])}
                for call in parsed["calls"]
            ]
            return str(parsed["normal_text"]), calls
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise wire_error(server.name, f"{answer[:200]!r}") from error

    async def aclose(self) -> None:
        """End the remaining aborts and legs within the abort limit, and close connections."""
        await self._tasks.aclose(self._limits.abort_s)
        await self._http.aclose(self._limits.abort_s)


class AdaptedModel:
    """One LoRA adapter of a model, as `Engine` and `Relay`."""

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
