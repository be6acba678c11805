"""A run whose events are read by someone who may be slower than it."""

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from shell_router.api.services import Emit
from shell_router.core.events import Event
from shell_router.execution import Answer


class LiveRun:
    """Runs `start(emit)` as a task of its own, for as long as the context is open.

    Those events that are `wanted` wait here for the reader. Nobody waits for the reader: agents feed each other, so
    a client that does not read must not slow them. What can pile up is bounded by the run's own output. Leaving the
    context cancels the run and waits until it has cleaned up.
    """

    def __init__(self, start: Callable[[Emit], Awaitable[Answer]], wanted: Callable[[Event], bool]) -> None:
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
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
        """Return with the first event or after `limit_s`; raises what ended the run before any event."""
        if not self._begun:
            await self._some_news(limit_s)
        if self._task.done() and not self._begun:
            self.answer()

    async def take(self, limit_s: float) -> list[Event]:
        """All events that wait, or the next to come; may be empty, after `limit_s` of silence or at the end."""
        if not self._waiting:
            await self._some_news(limit_s)
        taken, self._waiting = self._waiting, []
        return taken

    def answer(self) -> Answer:
        """The ended run's answer; raises its error."""
        return self._task.result()

    def _put(self, event: Event) -> None:
        first, self._begun = not self._begun, True
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
