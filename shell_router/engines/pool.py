"""The client of a model's prefill and decode servers: SGLang's, or embedded ones, which speak the same wire format."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial

import orjson

from shell_router.core.generation import Finish, Generation, Prefilled, Tokens
from shell_router.core.relay import NativeRoute, Relayed
from shell_router.engines.adapters.on_servers import Adapters
from shell_router.engines.adapters.settings import AdapterSettings
from shell_router.engines.address import DEFAULT_LIMITS, Bootstrap, PairAddress, PairLimits, random_room
from shell_router.engines.answer import answer
from shell_router.engines.breaker import DEFAULT_BREAKER, BreakerSettings
from shell_router.engines.capabilities import introduced, version_of
from shell_router.engines.dispatch import Dispatcher
from shell_router.engines.engine_priority import learn_priority, rank, ranked
from shell_router.engines.http import HttpClient
from shell_router.engines.legs import LegBodies, Legs
from shell_router.engines.loads import Load, any_healthy, load_of, require_healthy, state_of
from shell_router.engines.monitor import Monitor
from shell_router.engines.native import NativeRules
from shell_router.engines.pairing import Attempts, Pair, Pairing
from shell_router.engines.place import Place, Wanted
from shell_router.engines.prefill_only import PrefillOnly, PrefillWay
from shell_router.engines.relay import PairRelay
from shell_router.engines.retries import DEFAULT_RETRIES, RetrySettings
from shell_router.engines.server_client import ServerClient, Transport
from shell_router.engines.task_owner import TaskOwner
from shell_router.engines.wire import body_fields
from shell_router.errors import AdapterMissing, EngineError
from shell_router.scheduling.settings import SchedulingSettings

DEFAULT_SCHEDULING = SchedulingSettings()
NO_ADAPTERS = AdapterSettings()
HEALTH_LIMIT_S = 10.0


def random_rid() -> str:
    """A fresh request id."""
    return f"{random.getrandbits(128):032x}"


class PairPool:
    """The prefill-decode pairs of one model as an `Engine` and a `Relay`.

    Any prefill server works with any decode server. Requests of one affinity keep their prefill server; else
    `scheduling` says which takes the next, and when. A request that fails before its first token is sent again,
    elsewhere where there is an elsewhere. It opens as many connections as requests run at a time, and keeps them for
    the next ones.

    `room` gives fresh bootstrap rooms below 2^63, `rid` fresh request ids, none of which begins with another; `draw` is
    uniform in [0, 1), `clock` monotonic seconds. With `vocabulary` relayed token ids are checked against it. A request
    that names one of the `adapters` is sent once that is loaded on both its servers.
    """

    def __init__(
        self,
        *addresses: PairAddress,
        limits: PairLimits = DEFAULT_LIMITS,
        retries: RetrySettings = DEFAULT_RETRIES,
        breaker: BreakerSettings = DEFAULT_BREAKER,
        room: Callable[[], int] = random_room,
        rid: Callable[[], str] = random_rid,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
        vocabulary: int | None = None,
        scheduling: SchedulingSettings = DEFAULT_SCHEDULING,
        adapters: AdapterSettings = NO_ADAPTERS,
    ) -> None:
        if not addresses:
            raise ValueError("a pool has at least one pair")
        self.addresses = addresses
        self.retried = 0
        self._limits = limits
        self._retries = retries
        self._draw = draw
        self._scheduling = scheduling
        self._tasks = TaskOwner()
        self._http = HttpClient(connect_s=limits.connect_s)
        transport = Transport(self._http, self._tasks, limits, breaker, clock)
        self._pairing = Pairing(addresses, transport, room, scheduling, adapters)
        self._prefill_only = {
            server: PrefillOnly(server, bootstrap, self._by_pair_with(server), rid)
            for server, bootstrap in self._pairing.bootstraps.items()
        }
        rules = NativeRules(vocabulary, adapters=bool(adapters.folders))
        self._relay = PairRelay(self._pairing, self._prefill_only, self._attempts, rid, rules)

    @property
    def servers(self) -> tuple[ServerClient, ...]:
        """The servers, each with what is known of it: prefill servers first."""
        return self._pairing.servers

    @property
    def dispatchers(self) -> tuple[Dispatcher[ServerClient], Dispatcher[ServerClient]]:
        """Who chooses among the prefill servers, and who among the decode servers."""
        return self._pairing.prefills, self._pairing.decodes

    @property
    def adapters(self) -> Adapters:
        """The model's adapters, server by server."""
        return self._pairing.adapters

    @property
    def prefill_ways(self) -> tuple[PrefillWay, ...]:
        """How each prefill server makes prefill-only requests: `route` until `probe` has found out."""
        return tuple(only.way for only in self._prefill_only.values())

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`. Raises PromptTooLong where the engine says so."""
        attempts, asked = self._attempts(Wanted.of(request)), request
        while True:
            pair = await attempts.pick()
            begun = False
            try:
                request.on_placed(*pair.placed)
                legs = self._legs(asked, pair)
                async with aclosing(answer(legs, logprobs=request.logprobs)) as events:
                    async for event in events:
                        begun = True
                        _note(event, pair)
                        yield event
                return
            except EngineError as error:
                if begun:
                    raise
                failure = error
            finally:
                pair.close()
            if isinstance(failure, AdapterMissing):
                await self._pairing.adapter_missing(pair, legs.suspects)
            await attempts.failed(failure, legs.suspects)
            # engines abort whatever begins with the id of an attempt before, so that stands last
            asked = replace(request, rid=f"{attempts.made}.{request.rid}")

    def _legs(self, request: Generation, pair: Pair) -> Legs:
        ranks = (None, None) if request.priority is not None else (rank(pair.prefill), rank(pair.decode))
        bodies = self._bodies(request, pair.bootstrap, *ranks)
        return Legs(pair.prefill.engine, pair.decode.engine, bodies, pair.prefilled)

    def _bodies(
        self, request: Generation, bootstrap: Bootstrap, prefill_rank: int | None = None, decode_rank: int | None = None
    ) -> LegBodies:
        """The prefill leg is not streamed: its errors then come as HTTP statuses."""
        opened = orjson.dumps({**body_fields(request), **bootstrap.fields()})[:-1]
        prefill, decode = ranked(opened, prefill_rank), ranked(opened, decode_rank)
        bodies = prefill + b',"stream":false}', decode + b',"stream":true}'
        return LegBodies((request.rid,), *bodies, self._limits.stall_s)

    def _attempts(self, wanted: Wanted) -> Attempts:
        return Attempts(self._pairing, wanted, self._retries, self._draw, self._count_retry)

    def _count_retry(self) -> None:
        self.retried += 1

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`. It is made once, in its server's way: a failure costs no more than the overlap."""
        place = await self._pairing.prefills.place(Wanted.of(request, update=True))
        try:
            only = self._prefill_only[place.engine]
            # by a pair it takes decode's lease first, as every pair does
            return await (only.prefill(request) if only.way == "pair" else self._prefill_alone(only, place, request))
        finally:
            place.close()

    async def _prefill_alone(self, only: PrefillOnly, place: Place[ServerClient], request: Generation) -> Prefilled:
        async with self.adapters.leased(place.engine, request.adapter) as lease:
            try:
                return await only.prefill(request)
            except AdapterMissing:
                await self.adapters.missing(place.engine, lease)
                raise

    def _by_pair_with(self, prefill: ServerClient) -> Callable[[Generation], Awaitable[Prefilled]]:
        """The prefill server's place is held by whoever calls it."""

        async def by_pair(request: Generation) -> Prefilled:
            # as an update it waits for nothing: who waits for this prefill server may hold the last place on decode
            decode = await self._pairing.decode_for(Wanted.of(request, update=True))
            try:
                return await self._prefilled_by_pair(request, prefill, decode.engine)
            finally:
                decode.close()

        return by_pair

    async def _prefilled_by_pair(self, request: Generation, prefill: ServerClient, decode: ServerClient) -> Prefilled:
        leases = await self.adapters.of_pair(prefill, decode, request.adapter)
        try:
            legs = Legs(prefill, decode, self._bodies(request, self._pairing.bootstraps[prefill]), leases[0].close)
            async with aclosing(answer(legs, logprobs=False)) as events:
                async for event in events:
                    if isinstance(event, Finish):
                        return Prefilled(event.prompt_tokens, event.cached_tokens)
        except AdapterMissing:
            for server, lease in zip((prefill, decode), leases, strict=True):
                if server in legs.suspects:
                    await self.adapters.missing(server, lease)
            raise
        finally:
            for lease in leases:
                lease.close()
        raise AssertionError("an answer ends with a Finish or raises")

    async def probe(self, *, tokens: int = 256, vocabulary: int = 256) -> tuple[PrefillWay, ...]:
        """Ask every server what it is, and find each prefill server's first way of prefill-only that warms its cache.

        Each way is tried with a prompt of `tokens` fresh random ids below `vocabulary`, sent twice. Raises
        EngineRejected when no way warms anything or a server has another role, EngineUnreachable or EngineStalled when
        one does not serve.
        """
        found = await asyncio.gather(*map(introduced, self.servers))
        await self.adapters.begin()
        if self._scheduling.queue.engine_priority:
            await asyncio.gather(*map(learn_priority, self.servers))
        for server, capabilities in zip(self.servers, found, strict=True):
            if server in self._prefill_only:
                await self._prefill_only[server].probe(tokens, vocabulary, route=capabilities.known)
        return self.prefill_ways

    async def version(self) -> str:
        """The version that the first decode server names itself by. Raises EngineError."""
        return await version_of(self._pairing.decodes.engines[0])

    def forward(
        self, route: NativeRoute, body: bytes, *, affinity: str | None = None, adapter: str | None = None
    ) -> AbstractAsyncContextManager[Relayed]:
        """See `Relay.forward`. The answer relayed is decode's, or for `prefill_only` the prefill server's.

        With `adapter` that one answers. A body may not name one itself, where the model has adapters.
        """
        return self._relay.forward(route, body, affinity, adapter)

    async def loads(self) -> tuple[Load, Load]:
        """The requests that the servers report: prefill's, then decode's. Raises EngineError."""
        pairing = self._pairing
        prefill, decode = await asyncio.gather(load_of(pairing.prefills.engines), load_of(pairing.decodes.engines))
        return prefill, decode

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """While the context is open, every server is asked for its state again and again, for those who choose."""
        poll_s = self._scheduling.poll_s
        ask = partial(state_of, limit_s=self._limits.connect_s)
        prefills, decodes = self.dispatchers
        async with Monitor(prefills, ask, poll_s), Monitor(decodes, ask, poll_s):
            yield

    async def ready(self, *, limit_s: float = HEALTH_LIMIT_S) -> None:
        """Return when every server says that it is healthy; raises EngineError for the first that does not."""
        await asyncio.gather(*(require_healthy(server, limit_s) for server in self.servers))

    async def serves(self, *, limit_s: float = HEALTH_LIMIT_S) -> bool:
        """Whether at least one server of each role says that it is healthy."""
        roles = (self._pairing.prefills.engines, self._pairing.decodes.engines)
        return all(await asyncio.gather(*(any_healthy(servers, limit_s) for servers in roles)))

    async def aclose(self) -> None:
        """Wait, within the abort limit, for the aborts and legs that still end, and close idle connections."""
        await self._tasks.aclose(self._limits.abort_s)
        await self._http.aclose(self._limits.abort_s)


def _note(event: Tokens | Finish, pair: Pair) -> None:
    """Keep what is known of the decode server's load true."""
    if isinstance(event, Tokens):
        pair.decode.wrote(len(event.ids))
    else:
        pair.decode.completed()
