"""The stream of a run that is read while it goes on."""

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from shell_router.api.replies import NO_HEADERS, common_headers, json_reply, stream_error
from shell_router.api.services import REQUEST_ID, SETTINGS
from shell_router.core.events import Emit, Event
from shell_router.errors import InvalidField, StreamChanged
from shell_router.http.app import ClientGone, Reply, Request, Stream
from shell_router.http.sse import PING
from shell_router.moa.requests import Answer

NO_WARNINGS: Mapping[str, list[str]] = {}
LAST_EVENT = "last-event-id"
POSITION = re.compile(r"([0-9]{1,12})-([0-9a-f]{8})")


async def open_stream(
    request: Request,
    *,
    status: int = 200,
    content_type: str = "text/event-stream; charset=utf-8",
    headers: Mapping[str, str] = NO_HEADERS,
) -> Stream:
    """Begin a streamed reply; a client that takes nothing for `write_timeout_s` is given up."""
    sent = {
        "Content-Type": content_type,
        "Cache-Control": "no-cache",
        "X-Accel-Buffering": "no",  # or nginx would hold the stream back
        **common_headers(request),
        **headers,
    }
    return await request.open_stream(status, sent, request.app[SETTINGS].write_timeout_s)


class StreamPosition:
    """How far a stream has come, as the id of its last event says: its characters, and a check of
    them.

    With `last`, such an id, what its client has already is left out. Raises InvalidField where that
    is none.
    """

    def __init__(self, last: str | None = None, after: int = 0) -> None:
        self.at = 0
        self.after = after
        self._check = 0
        self._expected = ""
        if last is not None:
            if (found := POSITION.fullmatch(last)) is None:
                raise InvalidField(
                    "The header Last-Event-ID is no id of an event of this router's.",
                    field="Last-Event-ID",
                    remedy=(
                        "Send the last event's id as it came, or leave it out for all of the "
                        "stream."
                    ),
                )
            self.after = int(found[1])
            self._expected = found[2]

    @property
    def id(self) -> bytes:
        """The field of the event that ends here."""
        return b"id: %d-%08x\n" % (self.at, self._check)

    def rest(self, text: str) -> tuple[str, str]:
        """Go on by `text`: what of it the client has, and what not. Raises StreamChanged."""
        left = max(0, self.after - self.at)
        had = text[:left]
        rest = text[left:]
        if had:
            self._pass(had)
            if self.at == self.after and self._expected not in ("", f"{self._check:08x}"):
                raise _changed()
        self._pass(rest)
        return had, rest

    def require_reached(self) -> None:
        """Raise StreamChanged where the stream ends before what the client has of it."""
        if self.at < self.after:
            raise _changed()

    def _pass(self, text: str) -> None:
        self.at, self._check = (
            self.at + len(text),
            zlib.crc32(text.encode(errors="replace"), self._check),
        )


def _changed() -> StreamChanged:
    return StreamChanged(
        "The repeated stream differs from what came before its Last-Event-ID.",
        remedy=(
            "Drop what you have of it, and send the request with its key and without Last-Event-ID."
        ),
    )


class LiveRun:
    """Runs `start(emit)` as a task of its own, for as long as the context is open.

    Those events that are `wanted` wait here for the reader. The run never waits for it: agents feed
    each other, so a client that does not read must not slow them. What can pile up is bounded by
    the run's own output. Leaving the context cancels the run and waits until it has cleaned up.
    """

    def __init__(
        self, start: Callable[[Emit], Awaitable[Answer]], wanted: Callable[[Event], bool]
    ) -> None:
        self._start = start
        self._wanted = wanted
        self._begun = False
        self._waiting: list[Event] = []
        self._news = asyncio.Event()

    async def __aenter__(self) -> "LiveRun":
        self._task = asyncio.ensure_future(self._start(self._put))
        self._task.add_done_callback(lambda _: self._news.set())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # read, or asyncio would report it as lost

    @property
    def drained(self) -> bool:
        """Whether the run has ended and all its events have been taken."""
        return self._task.done() and not self._waiting

    async def begun(self, limit_s: float) -> None:
        """Return with the first event or after `limit_s`; raises what ended the run before any
        event.
        """
        if not self._begun:
            await self._some_news(limit_s)
        if self._task.done() and not self._begun:
            self.answer()

    async def take(self, limit_s: float) -> list[Event]:
        """All events that wait, or the next to come; may be empty, after `limit_s` of silence or at
        the end.
        """
        if not self._waiting:
            await self._some_news(limit_s)
        taken = self._waiting
        self._waiting = []
        return taken

    def answer(self) -> Answer:
        """The ended run's answer; raises its error."""
        return self._task.result()

    def _put(self, event: Event) -> None:
        first = not self._begun
        self._begun = True
        if self._wanted(event):
            self._waiting.append(event)
            self._news.set()
        elif first:
            self._news.set()

    async def _some_news(self, limit_s: float) -> None:
        if self._task.done():
            return
        self._news.clear()
        try:
            async with asyncio.timeout(limit_s):
                await self._news.wait()
        except TimeoutError:
            return


class Frames(Protocol):
    """How a route writes what happens."""

    def wants(self, event: Event) -> bool:
        """Whether the event would be written."""
        ...

    def whole(self, answer: Answer) -> dict[str, Any]:
        """An answer that is not streamed."""
        ...

    def events(self, events: Sequence[Event]) -> bytes:
        """Frames for `events`; empty where there is nothing to say."""
        ...

    def answer(self, answer: Answer) -> bytes:
        """The last frames of a run that ended well."""
        ...

    def error(self, envelope: dict[str, Any]) -> bytes:
        """The last frame of a run that failed after the head had gone."""
        ...


async def respond(
    request: Request,
    run: Callable[[Emit | None], Awaitable[Answer]],
    frames: Frames,
    *,
    stream: bool,
    warnings: Mapping[str, list[str]] = NO_WARNINGS,
) -> Reply:
    """The answer of what is `run`: as it is written, or as one object with `warnings`.

    A stream's head goes out with the run's first event, so that a request refused before anything
    ran still gets its status. A later failure is sent inside the stream.
    """
    if not stream:
        return json_reply(request, {**frames.whole(await run(None)), **warnings})
    ping_s = request.app[SETTINGS].ping_s
    async with LiveRun(run, frames.wants) as live:
        await live.begun(ping_s)
        out = await open_stream(request)
        try:
            await _pump(live, frames, out, ping_s)
            last = frames.answer(live.answer())
        except (asyncio.CancelledError, ClientGone):
            raise
        except Exception as error:
            last = frames.error(stream_error(error, request[REQUEST_ID]))
        await out.send(last)
        return await out.end()


async def _pump(run: LiveRun, frames: Frames, stream: Stream, ping_s: float) -> None:
    """Events as they come, all that wait in one write; a comment after `ping_s` in which nothing
    was written.
    """
    now_s = asyncio.get_running_loop().time
    quiet_since_s = now_s()
    while not run.drained:
        written = frames.events(await run.take(max(0.0, quiet_since_s + ping_s - now_s())))
        if not written and now_s() - quiet_since_s >= ping_s:
            written = PING
        if written:
            await stream.send(written)
            quiet_since_s = now_s()
