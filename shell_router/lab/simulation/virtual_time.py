"""An event loop whose clock jumps: asyncio code runs unchanged and repeats exactly.

`looptime` does the same for tests, but allows real input and output, which make a run depend on the
machine again. Here there is none: the selector never waits, and executors run in place.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Stuck(RuntimeError):
    """The error that all tasks wait, and nothing is left that could happen."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time starts at 0 and moves only when all tasks wait."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Waits(self._pass))
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run the function here and now: threads would end in an order of their own.

        Computing takes no virtual time.
        """
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _pass(self, seconds: float | None) -> None:
        if seconds is None:
            raise Stuck("all tasks wait, and nothing is due")
        self._now_s += seconds


class _Waits(selectors.SelectSelector):
    """A selector that lets time pass instead of waiting for files.

    The loop registers its own wake-up socket, which stays silent.
    """

    def __init__(self, passing: Callable[[float | None], None]) -> None:
        super().__init__()
        self._passing = passing

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._passing(timeout)
        return []


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end in virtual time. Raises Stuck where it never would."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
