"""One attempt of a request: the prefill and the decode server that take it, and its legs there,
supervised as one.

Any two servers of one model may work together.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

from shell_router.core.engine import Finish, Placement, Tokens, error_message
from shell_router.engines.address import PairAddress
from shell_router.engines.server_client import HTTP_OK, ServerClient, ServerFailure, Transport
from shell_router.engines.wire import OutputReader, read_prefilled, rejected, require_not_aborted
from shell_router.errors import (
    EngineError,
    EngineRejected,
    EngineStalled,
    EngineUnavailable,
    EngineUnreachable,
    PromptTooLong,
)
from shell_router.http.client import Exchange
from shell_router.routing.dispatcher import Dispatcher, EngineSlot, SchedulingSettings
from shell_router.routing.failures import RetrySettings
from shell_router.routing.placement import PlacementRequest

log = logging.getLogger(__name__)

E = TypeVar("E")


async def engine_slot(
    dispatcher: Dispatcher[E], request: PlacementRequest, avoid: Collection[E] = ()
) -> EngineSlot[E]:
    """A slot on an engine, where the request is sent at once; not on one of `avoid` if another
    serves.

    Raises EngineUnavailable while the breakers of all are open, or where no slot comes free in
    time. However it ends without a slot, the queue has forgotten the request.
    """
    entry = dispatcher.submit(request, avoid)
    if isinstance(entry, EngineSlot):
        return entry
    decided = asyncio.get_running_loop().create_future()
    wait_s = dispatcher.settings.queue.wait_s
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


_TRANSFER_FAILED = "transfer failed"  # in SGLang's own words, on either server


class Legs:
    """One request running on both servers. The first failure on either ends and aborts both.

    Make it, then call `next` for the answer; or read `decode` until it is empty and call
    `settle_later`. Always end with `close`, which aborts on both servers unless the answer had
    ended. The prefill leg is not awaited before decode's end, and no leg is a task: its exchange
    reports what happens to it. A failure counts on the breaker of the server that caused it, and on
    no other, or is given to `blame`; `blamed_servers` then holds that server. `prefilled` is called
    when the prefill leg is over. The engines are sent `bodies`, prefill's first, to `route`, and
    abort by `rids`.
    """

    def __init__(
        self,
        prefill: ServerClient,
        decode: ServerClient,
        rids: Sequence[str],
        bodies: tuple[bytes, bytes],
        read_timeout_s: float,
        prefilled: Callable[[], None] | None = None,
        blame: Callable[[ServerClient, ServerFailure], None] = ServerClient.failed,
        route: str = "generate",
    ) -> None:
        self.prefill_server = prefill
        self.decode_server = decode
        self.blamed_servers: tuple[ServerClient, ...] = ()
        self._rids = rids
        self._prefilled = prefilled
        self._blame = blame
        self._failure: ServerFailure | None = None
        self._ended = False
        self._prefill_answer: bytes | None = None
        self._prefill_over: asyncio.Event | None = None
        self._output: OutputReader | None = None
        self._begun = False
        self.decode = decode.begin(
            route,
            bodies[1],
            read_timeout_s=read_timeout_s,
            streamed=True,
            ended=self._decode_ended,
        )
        """Decode's answer. Its reader raises the first failure of either leg."""
        self._prefill = prefill.begin(
            route,
            bodies[0],
            read_timeout_s=read_timeout_s,
            ended=self._prefill_ended,
        )

    async def next(self, *, logprobs: bool) -> Tokens | Finish:
        """The tokens that decode streams next, and in the end one Finish. Raises the first failure
        of either leg.
        """
        decode = self.decode
        reader = self._output
        try:
            if reader is None:
                reader = self._output = OutputReader(self.decode_server.name, logprobs=logprobs)
                await decode.head()
                if decode.status != HTTP_OK:
                    await self.refused()
            while reader.error is None and (chunk := await decode.read()):
                if (tokens := reader.feed(chunk)) is not None:
                    if not self._begun:
                        self._begun = True
                        self.decode_server.succeeded()
                    return tokens
            if reader.error is not None:
                raise reader.error
            if reader.finish is None:
                raise EngineUnreachable(
                    f"The {self.decode_server.name} closed its stream before the answer ended."
                )
            return self._with_cached_tokens(reader.finish, await self.settled())
        except (EngineError, PromptTooLong) as error:
            self.failed(error)
            raise

    async def refused(self) -> NoReturn:
        """Read decode's error answer, and raise EngineRejected or PromptTooLong with its words."""
        error = rejected(
            self.decode_server.name, self.decode.status, error_message(await self.decode.read_all())
        )
        self.failed(error)
        raise error

    async def prefilled(self) -> bytes:
        """The prefill leg's answer, awaited before decode's. Raises the first failure of either
        leg.
        """
        await self._wait_for_prefill(self.prefill_server.limits.answer_s)
        if self._prefill_answer is None:
            raise self._failure or self.prefill_server.failure(TimeoutError())
        return self._prefill_answer

    async def settled(self) -> bytes | None:
        """Call once decode has ended well: the prefill leg's answer, or None where it does not come
        in time.

        Decode cannot start without the prefill's KV, so the answer is normally here already.
        """
        self._ended = True
        try:
            if not self._prefill.over:
                await self._wait_for_prefill(self.prefill_server.limits.settle_s)
        finally:
            if self._prefill_answer is None:
                log.warning(
                    "decode of %s ended without the %s's answer", self._rids, self.prefill_server
                )
                self._prefill.close()
                self._abort()
        return self._prefill_answer

    def settle_later(self) -> None:
        """As `settled`, in the background, where the prefill leg's answer is not needed."""
        self._ended = True
        if self._prefill_answer is None:
            self.prefill_server.tasks.start(self.settled())

    def failed(self, error: ServerFailure) -> None:
        """Call where what was read is no answer but `error`. It counts on decode unless a leg had
        failed before.
        """
        self._fail(self.decode_server, error)

    def close(self) -> None:
        """Stop what still runs. Calling it again changes nothing."""
        if self._ended:
            return
        self._ended = True
        self.decode.close()
        self._prefill.close()
        self._abort()

    async def _wait_for_prefill(self, limit_s: float) -> None:
        if self._prefill.over:
            return
        self._prefill_over = asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._prefill_over.wait()

    def _with_cached_tokens(self, finish: Finish, prefill_answer: bytes | None) -> Finish:
        """Decode repeats the prefill's `cached_tokens`, but adds its own hits where it has a prefix
        cache too.
        """
        if prefill_answer is None:
            return finish
        cached_tokens = read_prefilled(self.prefill_server.name, prefill_answer).cached_tokens
        if cached_tokens == finish.cached_tokens:
            return finish
        return replace(finish, cached_tokens=cached_tokens)

    def _abort(self) -> None:
        for server in (self.prefill_server, self.decode_server):
            server.abort(self._rids)

    def _decode_ended(self, decode: Exchange) -> None:
        if isinstance(decode.failure, EngineError):
            self._fail(self.decode_server, decode.failure)

    def _prefill_ended(self, prefill: Exchange) -> None:
        if self._prefilled is not None:
            self._prefilled()
        server = self.prefill_server
        try:
            body = server.check_answer(prefill, prefill.held())
            if b"abort" in body or b"error" in body:
                streamed = prefill.content_type.startswith("text/event-stream")
                require_not_aborted(server.name, body, streamed=streamed)
            self._prefill_answer = body
            server.succeeded()
        except (EngineError, PromptTooLong) as error:
            # an error status of decode is the first failure already, and is being read
            if self.decode.status in (0, HTTP_OK):
                self._fail(server, error)
        if self._prefill_over is not None:
            self._prefill_over.set()

    def _fail(self, server: ServerClient, error: ServerFailure) -> None:
        """Keep the first failure, make every reader raise it, and stop both legs."""
        if self._failure is None and not self._ended:
            self._failure, self.blamed_servers = error, self._blamed(server, error)
            for blamed in self.blamed_servers:
                self._blame(blamed, error)
            self.decode.fail(error)
            self.close()

    def _blamed(self, server: ServerClient, error: ServerFailure) -> tuple[ServerClient, ...]:
        """The server that failed; both where either may be at fault. The next request that one
        serves clears it.

        Before the first token a stalled server stalls its partner as well, and a failed transfer is
        reported by both.
        """
        silent = (
            isinstance(error, EngineStalled)
            and not self.decode.began
            and self._prefill_answer is None
        )
        transfer = isinstance(error, EngineRejected) and _TRANSFER_FAILED in str(error).lower()
        if silent or transfer:
            return (self.prefill_server, self.decode_server)
        return (server,)


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
        """Where it went, and why."""
        return self.prefill.placement(), self.decode.placement()

    def prefilled(self) -> None:
        """The prefill server has done its part."""
        self.prefill.close()
        self.decode.prefilled()

    def close(self) -> None:
        """The attempt is over, however it ended. Calling it again changes nothing."""
        if self.legs is not None:
            self.legs.close()
        self.prefill.close()
        self.decode.close()


class Pairing:
    """All servers of a model. One that several addresses name is one server. `draw` is uniform in
    [0, 1).
    """

    def __init__(
        self,
        addresses: Sequence[PairAddress],
        transport: Transport,
        room: Callable[[], int],
        scheduling: SchedulingSettings,
        retries: RetrySettings,
        draw: Callable[[], float],
    ) -> None:
        self.limits = transport.limits
        self.retries = retries
        self.draw = draw
        self.retried = 0
        self._bootstraps: dict[ServerClient, tuple[str, int]] = {}
        self.room = room
        self._transport = transport
        clock = transport.clock
        self.prefills = Dispatcher[ServerClient]([], scheduling, clock, decodes=False)
        self.decodes = Dispatcher[ServerClient]([], scheduling, clock, prefills=False)
        for address in addresses:
            self.add(*self.clients_of(address))

    @property
    def servers(self) -> tuple[ServerClient, ...]:
        """Prefill servers, then decode servers."""
        return (*self.prefills.engines, *self.decodes.engines)

    def clients_of(self, address: PairAddress) -> tuple[ServerClient, ServerClient]:
        """The clients of its servers; new ones of servers that are not among these get no requests
        before `add`.
        """
        known = {client.server: client for client in self.servers}
        prefill, decode = (
            known.get(server) or ServerClient(server, self._transport)
            for server in (address.prefill, address.decode)
        )
        self._bootstraps.setdefault(prefill, (address.bootstrap_host, address.bootstrap_port))
        return prefill, decode

    def bootstrap(self, prefill: ServerClient) -> Mapping[str, Any]:
        """The body's fields of one attempt by which decode finds this prefill server, with a fresh
        room.
        """
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


@dataclass(slots=True, eq=False)
class Attempts:
    """The attempts of one request, each on other servers than those before where there are others.

    An error status that every one of several attempts gets is the request's fault, and counts on no
    circuit breaker: it would take the servers from all others. So the statuses of early attempts
    count once another attempt is `answered`, or fails otherwise.
    """

    pairing: Pairing
    request: PlacementRequest
    made: int = 0
    _avoid: set[ServerClient] = field(default_factory=set)
    _last: EngineError | None = None
    _statuses: list[tuple[ServerClient, EngineRejected]] | None = field(default_factory=list)

    def blame(self, server: ServerClient, error: ServerFailure) -> None:
        """Count `error` on the server's breaker, unless it may turn out to be the request's
        fault."""
        if (
            isinstance(error, EngineRejected)
            and self._statuses is not None
            and self.pairing.retries.attempts > 1
        ):
            self._statuses.append((server, error))
        else:
            self.answered()
            server.failed(error)

    def answered(self) -> None:
        """An attempt was answered, so that the statuses of those before it, and what follows, are
        servers' faults.
        """
        for server, error in self._statuses or ():
            server.failed(error)
        self._statuses = None

    async def pick(self) -> Pair:
        """Take slots for the next attempt.

        The slot on decode comes first, as in SGLang's disaggregation: a request that waits for a
        slot on prefill keeps no decode server from its work, and a request that has both waits for
        nothing more. Raises EngineUnavailable, or the error of the attempt before.
        """
        pairing = self.pairing
        try:
            pairing.prefills.serving()
            to_decode = await engine_slot(pairing.decodes, self.request, self._avoid)
            try:
                to_prefill = await engine_slot(pairing.prefills, self.request, self._avoid)
            except BaseException:
                to_decode.close()
                raise
        except EngineUnavailable as refusal:
            raise self._last or refusal from None
        pairing.retried += self.made > 0
        return Pair(to_prefill, to_decode, pairing.bootstrap(to_prefill.engine))

    async def failed(self, pair: Pair, error: EngineError) -> None:
        """Return when the attempt after the failed one on `pair` is due; raise `error` if it was
        the last.
        """
        blamed_servers: Collection[ServerClient] = ()
        if pair.legs is not None:
            blamed_servers = pair.legs.blamed_servers
        self.made += 1
        wait_s = self.pairing.retries.wait_s(error, self.made, self.pairing.draw())
        if wait_s is None:
            if (
                self.made < self.pairing.retries.attempts
                or len({one.status for _, one in self._statuses or ()}) > 1
            ):
                self.answered()  # not each of the attempts failed in this way
            raise error
        self._last = error
        self._avoid.update(blamed_servers)
        at = " and the ".join(map(str, blamed_servers)) or "servers"
        log.warning(
            "attempt %d failed at the %s; another is due in %.0f ms: %s",
            self.made,
            at,
            1e3 * wait_s,
            error,
        )
        await asyncio.sleep(wait_s)
