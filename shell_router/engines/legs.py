"""Both legs of one request on a prefill-decode pair, supervised as one (B9)."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

from shell_router.engines.http import Exchange
from shell_router.engines.leg_client import HTTP_OK, LegClient
from shell_router.engines.wire import EventSplitter, refuse_errors
from shell_router.errors import EngineError, PromptTooLong

logger = logging.getLogger(__name__)

LegFailure = EngineError | PromptTooLong


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
    nothing of it is a task: what happens to a leg is told by its exchange.
    """

    def __init__(self, client: LegClient, bodies: LegBodies) -> None:
        self._client = client
        self._bodies = bodies
        self._failure: LegFailure | None = None
        self._ended = False
        self._prefill_answer: bytes | None = None
        self._prefill_news: asyncio.Event | None = None
        self._decode = client.begin(
            client.decode, "generate", bodies.decode, quiet_s=bodies.quiet_s, ended=self._decode_ended
        )
        self._prefill = client.begin(
            client.prefill,
            "generate",
            bodies.prefill,
            quiet_s=bodies.quiet_s,
            ended=self._prefill_ended,
            held_bytes=None,
        )

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
            return await self._decode.read()
        except (TimeoutError, OSError) as error:
            raise self._first_failure() from error

    async def settled(self) -> bytes | None:
        """Call once decode has ended well: the prefill leg's answer, or None where it does not come in time.

        Decode cannot start without the prefill's KV, so the answer is normally here already.
        """
        self._ended = True
        try:
            if not self._prefill.over:
                await self._prefill_over()
        finally:
            if self._prefill_answer is None:
                self._drop_prefill()
        return self._prefill_answer

    def settle_later(self) -> None:
        """As `settled`, in the background, for those who have no use for the prefill leg's answer."""
        self._ended = True
        if self._prefill_answer is None:
            self._client.tasks.start(self._settle())

    def close(self) -> None:
        """Stop what still runs. Calling it again changes nothing."""
        if self._ended:
            return
        self._ended = True
        self._decode.close()
        self._prefill.close()
        self._client.abort(self._bodies.rids)

    async def _settle(self) -> None:
        await self.settled()

    async def _prefill_over(self) -> None:
        self._prefill_news = asyncio.Event()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._client.limits.settle_s):
                await self._prefill_news.wait()

    def _drop_prefill(self) -> None:
        logger.warning("decode of %s ended without the %s's answer", self._bodies.rids, self._client.prefill)
        self._prefill.close()
        self._client.abort(self._bodies.rids)

    def _decode_ended(self, decode: Exchange) -> None:
        if decode.failure is not None:
            self._fail(self._client.failure(self._client.decode, decode.failure))

    def _prefill_ended(self, prefill: Exchange) -> None:
        try:
            self._prefill_answer = self._checked(prefill)
        except (EngineError, PromptTooLong) as error:
            if not self._decode_refused():
                self._fail(error)
        if self._prefill_news is not None:
            self._prefill_news.set()

    def _checked(self, prefill: Exchange) -> bytes:
        body = self._client.whole(self._client.prefill, prefill)
        if prefill.content_type.startswith("text/event-stream"):
            refuse_errors(str(self._client.prefill), EventSplitter().feed(body))
        return body

    def _decode_refused(self) -> bool:
        """Decode has answered with an error status already: that is the first failure, and it is being read."""
        return self._decode.status not in (0, HTTP_OK)

    def _first_failure(self) -> LegFailure:
        assert self._failure is not None, "decode's failure is told before its reader goes on"
        return self._failure

    def _fail(self, error: LegFailure) -> None:
        """Keep the first failure, make every reader raise it, and stop both legs."""
        if self._failure is None and not self._ended:
            self._failure = error
            self._decode.fail(ConnectionAbortedError("the other leg failed"))
            self.close()
