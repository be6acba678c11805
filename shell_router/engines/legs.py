"""Both legs of one request on a prefill-decode pair, supervised as one (B9)."""

import asyncio
import logging
from dataclasses import dataclass

import aiohttp

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
    on both servers unless the answer had ended. Nothing of this waits for the prefill leg before decode's end.
    """

    def __init__(self, client: LegClient, bodies: LegBodies) -> None:
        self._client = client
        self._bodies = bodies
        self._response: aiohttp.ClientResponse | None = None
        self._failure: LegFailure | None = None
        self._ended = False
        self._head: asyncio.Future[aiohttp.ClientResponse] = asyncio.get_running_loop().create_future()
        self._prefill_answer: bytes | None = None
        self._decode_task = client.tasks.start(self._open_decode())
        self._prefill_task = client.tasks.start(self._run_prefill())

    async def head(self) -> aiohttp.ClientResponse:
        """Decode's response head, whatever its status; raises the first failure of either leg."""
        return await self._head

    async def read(self) -> bytes:
        """The next bytes of decode's answer as they came, empty at its end; raises the first failure of either leg."""
        response = self._head.result()
        try:
            return await response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._fail(self._client.failure(self._client.decode, error)) from error

    async def settled(self) -> bytes | None:
        """Call once decode has ended well: the prefill leg's answer, or None where it does not come in time.

        Decode cannot start without the prefill's KV, so the answer is normally here already.
        """
        self._ended = True
        self._head.result().release()
        if not self._prefill_task.done():
            await asyncio.wait((self._prefill_task,), timeout=self._client.limits.settle_s)
        if self._prefill_answer is None:
            self._drop_prefill()
        return self._prefill_answer

    def settle_later(self) -> None:
        """As `settled`, in the background, for those who have no use for the prefill leg's answer."""
        self._ended = True
        self._client.tasks.start(self._settle())

    async def _settle(self) -> None:
        await self.settled()

    def close(self) -> None:
        """Stop what still runs. Calling it again changes nothing."""
        if not self._ended:
            self._stop()

    def _stop(self) -> None:
        self._ended = True
        self._decode_task.cancel()
        self._prefill_task.cancel()
        self._head.cancel()
        if self._response is not None:
            self._response.close()
        self._client.abort(self._bodies.rids)

    def _drop_prefill(self) -> None:
        logger.warning("decode of %s ended without the %s's answer", self._bodies.rids, self._client.prefill)
        self._prefill_task.cancel()
        self._client.abort(self._bodies.rids)

    def _fail(self, error: LegFailure) -> LegFailure:
        """Keep the first failure, make every reader raise it, and stop both legs."""
        if self._failure is not None:
            return self._failure
        self._failure = error
        if not self._head.done():
            self._head.set_exception(error)
            self._head.exception()  # marks it as seen: a caller that has just gone away never asks
        self.close()  # closing decode's response wakes its reader, which then raises the first failure
        return error

    async def _open_decode(self) -> None:
        try:
            response = await self._client.post(
                self._client.decode, "generate", self._bodies.decode, quiet_s=self._bodies.quiet_s
            )
        except EngineError as error:
            self._fail(error)
            return
        self._response = response
        if self._head.done():
            response.close()
        else:
            self._head.set_result(response)

    async def _run_prefill(self) -> None:
        try:
            response = await self._client.post(self._client.prefill, "generate", self._bodies.prefill)
            body = await self._client.read_all(self._client.prefill, response)
            if response.content_type == "text/event-stream":
                refuse_errors(str(self._client.prefill), EventSplitter().feed(body))
            self._prefill_answer = body
        except (EngineError, PromptTooLong) as error:
            if not self._decode_refused():
                self._fail(error)

    def _decode_refused(self) -> bool:
        """Decode has answered with an error status already: that is the first failure, and it is being read."""
        return self._response is not None and self._response.status != HTTP_OK
