"""Time that a test steps, and lines of text that it waits for."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class SteppedTimer:
    """A call that is to come unless it is cancelled before."""

    due_s: float
    act: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class SteppedTimers:
    """A clock that starts at 0, and the calls that wait for it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._waiting: list[SteppedTimer] = []

    def clock(self) -> float:
        """Seconds since the start."""
        return self.now_s

    def later(self, delay_s: float, act: Callable[[], None]) -> SteppedTimer:
        """Have `act` called when the clock has been stepped by `delay_s`."""
        timer = SteppedTimer(self.now_s + delay_s, act)
        self._waiting.append(timer)
        return timer

    async def sleep(self, delay_s: float) -> None:
        """Return when the clock has been stepped by `delay_s`."""
        woken = asyncio.Event()
        timer = self.later(delay_s, woken.set)
        try:
            await woken.wait()
        finally:
            timer.cancel()

    async def until_waiting(self, delay_s: float) -> None:
        """Return once a call waits for the clock to be stepped by `delay_s`."""
        async with asyncio.timeout(LIMIT_S):
            while delay_s not in self.delays_s:  # noqa: ASYNC110 - what waits is under test
                await asyncio.sleep(0)

    @property
    def delays_s(self) -> list[float]:
        """How long from now each call that is not cancelled has to wait, the shortest first."""
        return sorted(timer.due_s - self.now_s for timer in self._waiting if not timer.cancelled)

    def step(self, seconds: float) -> None:
        """Step the clock, and make the calls that are due then, in their order."""
        self.now_s += seconds
        due = sorted(
            (timer for timer in self._waiting if timer.due_s <= self.now_s),
            key=lambda timer: timer.due_s,
        )
        self._waiting = [timer for timer in self._waiting if timer not in due]
        for timer in due:
            if not timer.cancelled:
                timer.act()


LIMIT_S = 60.0


class Lines:
    """Takes a line per call."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[str] = asyncio.Queue()

    def __call__(self, line: str) -> None:
        self._lines.put_nowait(line)

    async def with_words(self, words: str) -> str:
        """The next line that holds `words`; those before it are passed over."""
        async with asyncio.timeout(LIMIT_S):
            while words not in (line := await self._lines.get()):
                pass
        return line


class _Into(logging.Handler):
    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines(record.getMessage())


@contextmanager
def logged(name: str, lines: Lines) -> Iterator[None]:
    """While it is open, what the logger of that name and those below it say goes to `lines` too."""
    into = _Into(lines)
    logging.getLogger(name).addHandler(into)
    try:
        yield
    finally:
        logging.getLogger(name).removeHandler(into)
