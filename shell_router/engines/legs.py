"""The two legs of one request, on a prefill and a decode server, supervised as one, and the answer read from them."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from shell_router.core.engine import Finish, Tokens, error_message
from shell_router.engines.http_client import Exchange
from shell_router.engines.server_client import HTTP_OK, ServerClient, ServerFailure
from shell_router.engines.wire import OutputReader, read_prefilled, rejected, require_not_aborted
from shell_router.errors import (
    AdapterMissing,
    EngineError,
    EngineRejected,
    EngineStalled,
    EngineUnreachable,
    PromptTooLong,
)

logger = logging.getLogger(__name__)

_TRANSFER_FAILED = "transfer failed"  # in SGLang's own words, on either server


class Legs:
    """One request running on both servers. The first failure on either ends and aborts both.

    Make it, then call `next` for the answer; or read `decode` until it is empty and call `settle_later`. Always end
    with `close`, which aborts on both servers unless the answer had ended. The prefill leg is not awaited before
    decode's end, and no leg is a task: its exchange reports what happens to it. A failure counts on the breaker of the
    server that caused it, and on no other, or is given to `blame`; `blamed_servers` then holds that server. `prefilled`
    is called when the prefill leg is over. The engines are sent `bodies`, prefill's first, to `route`, and abort by
    `rids`.
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
        self.decode = decode.begin(route, bodies[1], read_timeout_s=read_timeout_s, ended=self._decode_ended)
        """Decode's answer. Its reader raises the first failure of either leg."""
        self._prefill = prefill.begin(
            route,
            bodies[0],
            read_timeout_s=read_timeout_s,
            ended=self._prefill_ended,
            max_buffered_bytes=None,
        )

    async def next(self, *, logprobs: bool) -> Tokens | Finish:
        """The tokens that decode streams next, and in the end one Finish. Raises the first failure of either leg."""
        decode, reader = self.decode, self._output
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
                raise EngineUnreachable(f"The {self.decode_server.name} closed its stream before the answer ended.")
            return self._with_cached_tokens(reader.finish, await self.settled())
        except (EngineError, PromptTooLong) as error:
            self.failed(error)
            raise

    async def refused(self) -> NoReturn:
        """Read decode's error answer, and raise EngineRejected or PromptTooLong with its words."""
        error = rejected(self.decode_server.name, self.decode.status, error_message(await self.decode.read_all()))
        self.failed(error)
        raise error

    async def prefilled(self) -> bytes:
        """The prefill leg's answer, awaited before decode's. Raises the first failure of either leg."""
        await self._wait_for_prefill(self.prefill_server.limits.answer_s)
        if self._prefill_answer is None:
            raise self._failure or self.prefill_server.failure(TimeoutError())
        return self._prefill_answer

    async def settled(self) -> bytes | None:
        """Call once decode has ended well: the prefill leg's answer, or None where it does not come in time.

        Decode cannot start without the prefill's KV, so the answer is normally here already.
        """
        self._ended = True
        try:
            if not self._prefill.over:
                await self._wait_for_prefill(self.prefill_server.limits.settle_s)
        finally:
            if self._prefill_answer is None:
                logger.warning("decode of %s ended without the %s's answer", self._rids, self.prefill_server)
                self._prefill.close()
                self._abort()
        return self._prefill_answer

    def settle_later(self) -> None:
        """As `settled`, in the background, where the prefill leg's answer is not needed."""
        self._ended = True
        if self._prefill_answer is None:
            self.prefill_server.tasks.start(self.settled())

    def failed(self, error: ServerFailure) -> None:
        """Call where what was read is no answer but `error`. It counts on decode unless a leg had failed before."""
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
        """Decode repeats the prefill's `cached_tokens`, but adds its own hits where it has a prefix cache too."""
        if prefill_answer is None:
            return finish
        cached_tokens = read_prefilled(self.prefill_server.name, prefill_answer).cached_tokens
        return finish if cached_tokens == finish.cached_tokens else replace(finish, cached_tokens=cached_tokens)

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
            body = server.checked(prefill, prefill.held())
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
        """The server that failed; both where either may be at fault. The next request that one serves clears it.

        Before the first token a stalled server stalls its partner as well, and a failed transfer is reported by both.
        """
        silent = isinstance(error, EngineStalled) and not self.decode.began and self._prefill_answer is None
        transfer = isinstance(error, EngineRejected | AdapterMissing) and _TRANSFER_FAILED in str(error).lower()
        return (self.prefill_server, self.decode_server) if silent or transfer else (server,)
