"""Time that a test steps, and what is to be done at which time of it."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class SteppedTimer:
    """One call that is to come, unless it is cancelled before."""

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

    @property
    def delays_s(self) -> list[float]:
        """How long from now each call that is not cancelled has to wait, the shortest first."""
        return sorted(timer.due_s - self.now_s for timer in self._waiting if not timer.cancelled)

    def step(self, seconds: float) -> None:
        """Step the clock, and make the calls that are due then, in their order."""
        self.now_s += seconds
        due = sorted((timer for timer in self._waiting if timer.due_s <= self.now_s), key=lambda timer: timer.due_s)
        self._waiting = [timer for timer in self._waiting if timer not in due]
        for timer in due:
            if not timer.cancelled:
                timer.act()
