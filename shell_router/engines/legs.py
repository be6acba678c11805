"""Supervises a request on an undivided server, or on a prefill and a decode server, as one."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from shell_router.core.engine import Finish, Tokens, error_message
from shell_router.engines.server_client import HTTP_OK, ServerClient, ServerFailure
from shell_router.engines.wire import (
    OutputReader,
    read_prefilled,
    refusal_error,
    require_not_aborted,
)
from shell_router.errors import (
    EngineError,
    EngineRejected,
    EngineStalled,
    EngineUnreachable,
    PromptTooLong,
)
from shell_router.http.client import Exchange

log = logging.getLogger(__name__)

_TRANSFER_FAILED = "transfer failed"
"""SGLang's words, on either server."""


class Leg:
    """A request that runs on an undivided server; `Legs` runs it on two.

    Make it, then call `next` for the answer; or read `decode` until it is empty and call
    `settle_later`. Always end with `close`, which aborts unless the answer had ended. No leg is a
    task: its exchange reports its end. A failure is blamed on the server, in `blamed_servers`.

    Args:
        server: The server that decodes.
        rids: The request's ids, by which the servers abort it.
        body: The body.
        read_timeout_s: The longest time without a byte.
        on_begun: Called when `next` has the first tokens.
        blame: Called with each blamed server and the failure; by default its breaker counts it.
        route: The servers' route.
    """

    def __init__(
        self,
        server: ServerClient,
        rids: Sequence[str],
        body: bytes,
        read_timeout_s: float,
        on_begun: Callable[[], None] | None = None,
        blame: Callable[[ServerClient, ServerFailure], None] = ServerClient.note_failure,
        route: str = "generate",
    ) -> None:
        self.decode_server = server
        self.blamed_servers: tuple[ServerClient, ...] = ()
        self._rids = rids
        self._on_begun = on_begun
        self._blame = blame
        self._failure: ServerFailure | None = None
        self._ended = False
        self._output: OutputReader | None = None
        self._begun = False
        self.decode = server.begin(
            route, body, read_timeout_s=read_timeout_s, streamed=True, ended=self._decode_ended
        )
        """Decode's answer. Reading it raises the first failure of any leg."""

    async def next(self, *, logprobs: bool) -> Tokens | Finish:
        """Return the tokens that decode streams next, and at the end one Finish.

        Raises:
            EngineError: The first failure of a leg.
            PromptTooLong: A server refuses the prompt as too long.
        """
        decode = self.decode
        reader = self._output
        try:
            if reader is None:
                reader = self._output = OutputReader(self.decode_server.name, logprobs=logprobs)
                await decode.wait_for_head()
                if decode.status != HTTP_OK:
                    await self.raise_refusal()
            while reader.error is None and (chunk := await decode.read()):
                if (tokens := reader.feed(chunk)) is not None:
                    if not self._begun:
                        self._begun = True
                        self.decode_server.note_success()
                        if self._on_begun is not None:
                            self._on_begun()
                    return tokens
            if reader.error is not None:
                raise reader.error
            if reader.finish is None:
                raise EngineUnreachable(
                    f"The {self.decode_server.name} closed its stream before the answer ended."
                )
            return await self._complete(reader.finish)
        except (EngineError, PromptTooLong) as error:
            self.fail(error)
            raise

    async def raise_refusal(self) -> NoReturn:
        """Read decode's error answer, and raise EngineRejected or PromptTooLong with its words."""
        message = error_message(await self.decode.read_all())
        error = refusal_error(self.decode_server.name, self.decode.status, message)
        self.fail(error)
        raise error

    async def read_prefill(self) -> bytes | None:
        """Return the answer of the prefill server; None where decode's is the whole answer."""
        return None

    def settle_later(self) -> None:
        """Note that the answer has ended well, for callers that read `decode` themselves."""
        self._ended = True

    def fail(self, error: ServerFailure) -> None:
        """Report that decode answered with an error, which counts unless a leg failed first."""
        self._fail(self.decode_server, error)

    def close(self) -> None:
        """Abort every leg, unless the answer has ended; idempotent."""
        if self._ended:
            return
        self._ended = True
        self._stop()

    async def _complete(self, finish: Finish) -> Finish:
        self._ended = True
        return finish

    def _stop(self) -> None:
        self.decode.close()
        self.decode_server.abort(self._rids)

    def _decode_ended(self, decode: Exchange) -> None:
        if isinstance(decode.failure, EngineError):
            self._fail(self.decode_server, decode.failure)

    def _fail(self, server: ServerClient, error: ServerFailure) -> None:
        """Keep the first failure, make every reader raise it, and stop every leg."""
        if self._failure is None and not self._ended:
            self._failure = error
            self.blamed_servers = self._find_blamed(server, error)
            for blamed in self.blamed_servers:
                self._blame(blamed, error)
            self.decode.fail(error)
            self.close()

    def _find_blamed(self, server: ServerClient, error: ServerFailure) -> tuple[ServerClient, ...]:
        """Return the server that failed, or all that may be at fault."""
        return (server,)


class Legs(Leg):
    """A request that runs on two servers; the first failure on either ends and aborts both.

    The prefill leg is not awaited before decode's end. The first failure is blamed on the server
    that caused it:

        failure                                     blamed
        ------------------------------------------  --------------------------------
        the prefill leg is lost, stalls, or errs    prefill
        the decode leg is lost, stalls, or errs     decode
        a leg stalls before any byte of an answer   both: one stalls the other
        a status says "transfer failed"             both: each reports it
        prefill errs after decode's error status    no server: decode's is first
        a leg fails after the answer's end          no server

    Args:
        prefill: The prefill server.
        decode: The decode server.
        rids: See `Leg`, as for `read_timeout_s`, `blame` and `route`.
        bodies: The bodies for prefill and decode.
        on_prefilled: Called when the prefill leg has ended.
    """

    def __init__(
        self,
        prefill: ServerClient,
        decode: ServerClient,
        rids: Sequence[str],
        bodies: tuple[bytes, bytes],
        read_timeout_s: float,
        on_prefilled: Callable[[], None] | None = None,
        blame: Callable[[ServerClient, ServerFailure], None] = ServerClient.note_failure,
        route: str = "generate",
    ) -> None:
        self.prefill_server = prefill
        self._on_prefilled = on_prefilled
        self._prefill_answer: bytes | None = None
        self._prefill_over: asyncio.Event | None = None
        super().__init__(decode, rids, bodies[1], read_timeout_s, blame=blame, route=route)
        self._prefill = prefill.begin(
            route,
            bodies[0],
            read_timeout_s=read_timeout_s,
            ended=self._prefill_ended,
        )

    async def read_prefill(self) -> bytes:
        """Await the prefill leg's answer before decode's; raise the first failure of either leg."""
        await self._wait_for_prefill(self.prefill_server.limits.answer_s)
        if self._prefill_answer is None:
            raise self._failure or self.prefill_server.failure(TimeoutError())
        return self._prefill_answer

    async def settle(self) -> bytes | None:
        """Return the prefill leg's answer once decode has ended well; None if it failed or is late.

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
                self._stop()
        return self._prefill_answer

    def settle_later(self) -> None:
        """Settle in the background, for callers that do not need the prefill leg's answer."""
        self._ended = True
        if self._prefill_answer is None:
            self.prefill_server.tasks.start(self.settle())

    async def _wait_for_prefill(self, limit_s: float) -> None:
        if self._prefill.over:
            return
        self._prefill_over = asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._prefill_over.wait()

    async def _complete(self, finish: Finish) -> Finish:
        """Take `cached_tokens` from the prefill leg: decode's count adds hits of its own cache."""
        prefill_answer = await self.settle()
        if prefill_answer is None:
            return finish
        cached_tokens = read_prefilled(self.prefill_server.name, prefill_answer).cached_tokens
        if cached_tokens == finish.cached_tokens:
            return finish
        return replace(finish, cached_tokens=cached_tokens)

    def _stop(self) -> None:
        super()._stop()
        self._prefill.close()
        self.prefill_server.abort(self._rids)

    def _prefill_ended(self, prefill: Exchange) -> None:
        if self._on_prefilled is not None:
            self._on_prefilled()
        server = self.prefill_server
        try:
            body = server.check_answer(prefill, prefill.peek())
            if b"abort" in body or b"error" in body:
                streamed = prefill.content_type.startswith("text/event-stream")
                require_not_aborted(server.name, body, streamed=streamed)
            self._prefill_answer = body
            server.note_success()
        except (EngineError, PromptTooLong) as error:
            # an error status of decode is the first failure already, and is being read
            if self.decode.status in (0, HTTP_OK):
                self._fail(server, error)
        if self._prefill_over is not None:
            self._prefill_over.set()

    def _find_blamed(self, server: ServerClient, error: ServerFailure) -> tuple[ServerClient, ...]:
        """Return the server that failed, or both if either may be at fault.

        A server that is blamed wrongly is cleared by the next request that it serves.
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
