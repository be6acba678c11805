"""Both legs of one request on a prefill and a decode server, supervised as one (B9)."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from shell_router.engines.http import Exchange
from shell_router.engines.server_client import HTTP_OK, ServerClient, ServerFailure
from shell_router.engines.wire import EventSplitter, refuse_aborted, refuse_errors
from shell_router.errors import AdapterMissing, EngineError, EngineRejected, EngineStalled, PromptTooLong

logger = logging.getLogger(__name__)

_TRANSFER_FAILED = "transfer failed"  # in SGLang's own words, on either server


@dataclass(frozen=True, slots=True)
class LegBodies:
    """What each leg is sent on `/generate`, and the ids by which to abort it."""

    rids: tuple[str, ...]
    prefill: bytes
    decode: bytes
    quiet_s: float


class Legs:
    """One request running on both servers. The first failure on either ends and aborts both.

    Make it, read `head`, then `read` until it is empty, then call `settled`; always end with `close`, which aborts
    on both servers unless the answer had ended. Nothing of this waits for the prefill leg before decode's end, and
    nothing of it is a task: what happens to a leg is told by its exchange. A failure counts on the breaker of the
    server whose it is, and on no other; `suspects` then holds that server. `prefilled` is called when the prefill leg
    is over.
    """

    def __init__(
        self,
        prefill: ServerClient,
        decode: ServerClient,
        bodies: LegBodies,
        prefilled: Callable[[], None] = lambda: None,
    ) -> None:
        self._prefill_server = prefill
        self._decode_server = decode
        self._bodies = bodies
        self._prefilled = prefilled
        self.suspects: tuple[ServerClient, ...] = ()
        self._failure: ServerFailure | None = None
        self._ended = False
        self._begun = False
        self._prefill_answer: bytes | None = None
        self._prefill_news: asyncio.Event | None = None
        self._decode = decode.begin("generate", bodies.decode, quiet_s=bodies.quiet_s, ended=self._decode_ended)
        self._prefill = prefill.begin(
            "generate", bodies.prefill, quiet_s=bodies.quiet_s, ended=self._prefill_ended, held_bytes=None
        )

    @property
    def prefill_name(self) -> str:
        """The prefill server in words."""
        return str(self._prefill_server)

    @property
    def decode_name(self) -> str:
        """The decode server in words."""
        return str(self._decode_server)

    async def head(self) -> Exchange:
        """Decode's answer from its head on, whatever its status; raises the first failure of either leg."""
        try:
            await self._decode.head()
        except (TimeoutError, OSError) as error:
            raise self._first_failure() from error
        return self._decode

    async def read(self) -> bytes:
        """The next bytes of decode's answer as they came, empty at its end; raises the first failure of either leg."""
        try:
            piece = await self._decode.read()
        except (TimeoutError, OSError) as error:
            raise self._first_failure() from error
        self._begun = True
        return piece

    async def prefilled(self) -> bytes:
        """The prefill leg's answer, for those who need it before decode's. Raises the first failure of either leg."""
        await self._prefill_over(self._prefill_server.limits.answer_s)
        if self._prefill_answer is None:
            raise self._failure or self._prefill_server.failure(TimeoutError())
        return self._prefill_answer

    async def settled(self) -> bytes | None:
        """Call once decode has ended well: the prefill leg's answer, or None where it does not come in time.

        Decode cannot start without the prefill's KV, so the answer is normally here already.
        """
        self._ended = True
        try:
            await self._prefill_over(self._prefill_server.limits.settle_s)
        finally:
            if self._prefill_answer is None:
                self._drop_prefill()
        return self._prefill_answer

    def settle_later(self) -> None:
        """As `settled`, in the background, for those who have no use for the prefill leg's answer."""
        self._ended = True
        if self._prefill_answer is None:
            self._prefill_server.tasks.start(self._settle())

    def begun_well(self) -> None:
        """Call when decode's first tokens are there: whatever becomes of this request, it serves."""
        self._decode_server.succeeded()

    def refused(self, error: ServerFailure) -> None:
        """Call where what was read is no answer but `error`: decode's fault, unless it was told already."""
        self._fail(self._decode_server, error)

    def close(self) -> None:
        """Stop what still runs. Calling it again changes nothing."""
        if self._ended:
            return
        self._ended = True
        self._decode.close()
        self._prefill.close()
        self._abort()

    async def _settle(self) -> None:
        await self.settled()

    async def _prefill_over(self, limit_s: float) -> None:
        if self._prefill.over:
            return
        self._prefill_news = asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._prefill_news.wait()

    def _drop_prefill(self) -> None:
        logger.warning("decode of %s ended without the %s's answer", self._bodies.rids, self._prefill_server)
        self._prefill.close()
        self._abort()

    def _abort(self) -> None:
        for server in (self._prefill_server, self._decode_server):
            server.abort(self._bodies.rids)

    def _decode_ended(self, decode: Exchange) -> None:
        if decode.failure is not None:
            self._fail(self._decode_server, self._decode_server.failure(decode.failure))

    def _prefill_ended(self, prefill: Exchange) -> None:
        self._prefilled()
        try:
            self._prefill_answer = self._checked(prefill)
            self._prefill_server.succeeded()
        except (EngineError, PromptTooLong) as error:
            if not self._decode_refused():
                self._fail(self._prefill_server, error)
        if self._prefill_news is not None:
            self._prefill_news.set()

    def _checked(self, prefill: Exchange) -> bytes:
        body = self._prefill_server.whole(prefill)
        if prefill.content_type.startswith("text/event-stream"):
            refuse_errors(str(self._prefill_server), EventSplitter().feed(body))
        else:
            refuse_aborted(str(self._prefill_server), body)
        return body

    def _decode_refused(self) -> bool:
        """Decode has answered with an error status already: that is the first failure, and it is being read."""
        return self._decode.status not in (0, HTTP_OK)

    def _first_failure(self) -> ServerFailure:
        assert self._failure is not None, "decode's failure is told before its reader goes on"
        return self._failure

    def _fail(self, server: ServerClient, error: ServerFailure) -> None:
        """Keep the first failure, make every reader raise it, and stop both legs."""
        if self._failure is None and not self._ended:
            self._failure, self.suspects = error, self._suspects(server, error)
            for suspect in self.suspects:
                suspect.failed(error)
            self._decode.fail(ConnectionAbortedError("the other leg failed"))
            self.close()

    def _suspects(self, server: ServerClient, error: ServerFailure) -> tuple[ServerClient, ...]:
        """Before the first token, silence on one leg is silence on both: a stalled server stalls its partner as well.

        And of a transfer that failed both servers tell, whosever fault it is. Both are then suspected, and the next
        request that one of them serves clears it.
        """
        silent = isinstance(error, EngineStalled) and not self._begun and self._prefill_answer is None
        told = isinstance(error, EngineRejected | AdapterMissing) and _TRANSFER_FAILED in str(error).lower()
        if silent or told:
            return self._prefill_server, self._decode_server
        return (server,)
