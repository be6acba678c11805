"""The time limit of a block of code, which others may end before its time."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Deadlines:
    """The open deadlines of a server, which its stop ends together."""

    def __init__(self) -> None:
        self.open: set[Deadline] = set()
        self.stopped: Callable[[], Exception] | None = None
        """Makes the error of a deadline that is opened from now on."""

    def end(self, error: Callable[[], Exception]) -> None:
        """End all deadlines, also the ones that are opened later, with what `error` makes."""
        self.stopped = error
        for deadline in self.open:
            deadline.end(error())


class Deadline:
    """A context that cancels its body after `limit_s` and then raises what `late` makes.

    While it is open it is one of `among`, so that a shutdown can end it. It costs a third of
    asyncio's own timeout, which small requests feel.
    """

    __slots__ = ("_among", "_cancelling", "_error", "_late", "_limit_s", "_task", "_timer")

    def __init__(
        self,
        limit_s: float | None = None,
        among: Deadlines | None = None,
        *,
        late: Callable[[], Exception] = TimeoutError,
    ) -> None:
        self._among = among
        self._limit_s = limit_s
        self._late = late
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        if self._among is not None:
            if self._among.stopped is not None:
                raise self._among.stopped()
            self._among.open.add(self)
        if self._limit_s is not None:
            self._timer = task.get_loop().call_later(self._limit_s, self.end)
        return self

    def end(self, error: Exception | None = None) -> None:
        """Cancel the body, after which the context raises `error`; later calls have no effect."""
        if self._error is None:
            self._error = error or self._late()
            self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._among is not None:
            self._among.open.discard(self)
        if self._error is None:
            return
        is_cancelled_by_others = self._task.uncancel() > self._cancelling
        if kind is asyncio.CancelledError and not is_cancelled_by_others:
            raise self._error from None
