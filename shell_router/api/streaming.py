"""The stream of a run that is read while it goes on."""

import asyncio
import re
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import orjson

from shell_router.api.replies import NO_HEADERS, common_headers, stream_error
from shell_router.api.services import REQUEST_ID, SETTINGS
from shell_router.core.events import Emit, Event
from shell_router.errors import InvalidField, StreamChanged
from shell_router.http.app import ClientGone, Reply, Request, Stream
from shell_router.moa.requests import Answer

PING = b": ping\n\n"
"""A comment, which clients ignore."""
DONE = b"data: [DONE]\n\n"
"""The end of OpenAI's streams."""
LAST_EVENT = "last-event-id"
POSITION = re.compile(r"([0-9]{1,12})-([0-9a-f]{8})")


def data_frame(body: Any) -> bytes:
    """Return an unnamed server-sent event whose data is `body` as JSON."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


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
    """The position of a stream, as event ids say it: the count of its characters, and their CRC.

    With `last`, the id of the last event that the client has, the stream goes on behind it. Raises
    InvalidField where `last` is no such id.
    """

    def __init__(self, last: str | None, after: int = 0) -> None:
        self.at = 0
        self.after = after
        self._check = 0
        self._expected = ""
        if last is not None:
            match = POSITION.fullmatch(last)
            if match is None:
                raise InvalidField(
                    "The header Last-Event-ID is no id of an event of this router's.",
                    field="Last-Event-ID",
                    remedy="Send the last event's id as it came, or leave it out for all of the "
                    "stream.",
                )
            self.after = int(match[1])
            self._expected = match[2]

    @property
    def id(self) -> bytes:
        """The `id` field of the event that ends here."""
        return b"id: %d-%08x\n" % (self.at, self._check)

    def rest(self, text: str) -> tuple[str, str]:
        """Advance by `text`; return the part that the client has, and the rest.

        Raises StreamChanged where the client has another text.
        """
        left = max(0, self.after - self.at)
        had = text[:left]
        rest = text[left:]
        if had:
            self._pass(had)
            if self.at == self.after and self._expected not in ("", f"{self._check:08x}"):
                raise _stream_changed()
        self._pass(rest)
        return had, rest

    def require_reached(self) -> None:
        """Raise StreamChanged where the stream ends before the position that the client has."""
        if self.at < self.after:
            raise _stream_changed()

    def _pass(self, text: str) -> None:
        self.at += len(text)
        self._check = zlib.crc32(text.encode(errors="replace"), self._check)


def _stream_changed() -> StreamChanged:
    return StreamChanged(
        "The repeated stream differs from what came before its Last-Event-ID.",
        remedy="Drop what you have of it, and send the request with its key but no Last-Event-ID.",
    )


class LiveRun:
    """A run, `start(emit)`, in a task of its own while the context is open.

    Events that `sends` accepts wait here for the reader. The run never waits for the reader: agents
    feed each other, so a client that does not read must not slow them. The waiting events are
    bounded by the run's own output. Leaving the context cancels the run and waits until it has
    cleaned up.
    """

    def __init__(
        self, start: Callable[[Emit], Awaitable[Answer]], sends: Callable[[Event], bool]
    ) -> None:
        self._start = start
        self._wanted = sends
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

    async def wait_begun(self, limit_s: float) -> None:
        """Wait for the first event, at most `limit_s`.

        Raises the error of a run that ended before any event.
        """
        if not self._begun:
            await self._some_news(limit_s)
        if self._task.done() and not self._begun:
            self.answer()

    async def take(self, limit_s: float) -> list[Event]:
        """Return all events that wait, or the next to come.

        There is none after `limit_s` of silence, and at the end.
        """
        if not self._waiting:
            await self._some_news(limit_s)
        taken = self._waiting
        self._waiting = []
        return taken

    def answer(self) -> Answer:
        """Return the ended run's answer; raise its error."""
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
    """A route's way to write answers and events."""

    def wants(self, event: Event) -> bool:
        """Return whether the event would be written."""

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return an answer that is not streamed."""

    def events(self, events: Sequence[Event]) -> bytes:
        """Return the frames of `events`; none where there is nothing to say."""

    def answer(self, answer: Answer) -> bytes:
        """Return the last frames of a run that ended well."""

    def error(self, envelope: dict[str, Any]) -> bytes:
        """Return the last frame of a run that failed after the head was sent."""


async def stream_run(
    request: Request,
    run: Callable[[Emit], Awaitable[Answer]],
    frames: Frames,
    require_lease: Callable[[], Awaitable[None]],
) -> Reply:
    """Answer with a run, event by event, as long as `require_lease` raises nothing.

    Its head goes out with the run's first event, so that a request refused before anything
    ran still gets its status. A later failure is sent inside the stream.
    """
    ping_s = request.app[SETTINGS].ping_s
    async with LiveRun(run, frames.wants) as live:
        await live.wait_begun(ping_s)
        out = await open_stream(request)
        try:
            await _pump(live, frames, out, ping_s, require_lease)
            last = frames.answer(live.answer())
        except (asyncio.CancelledError, ClientGone):
            raise
        except Exception as error:
            last = frames.error(stream_error(error, request[REQUEST_ID]))
        await out.send(last)
        return await out.end()


async def _pump(
    run: LiveRun,
    frames: Frames,
    stream: Stream,
    ping_s: float,
    require_lease: Callable[[], Awaitable[None]],
) -> None:
    """Send events as they come, all that wait in one write; after `ping_s` of silence a comment."""
    now_s = asyncio.get_running_loop().time
    quiet_since_s = now_s()
    while not run.drained:
        written = frames.events(await run.take(max(0.0, quiet_since_s + ping_s - now_s())))
        if not written and now_s() - quiet_since_s >= ping_s:
            written = PING
        if written:
            await require_lease()
            await stream.send(written)
            quiet_since_s = now_s()
