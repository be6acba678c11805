"""A count of how much the event loop does at a time."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Turns:
    """A trace function that counts the lines of Python which each turn of the event loop runs."""

    most = now = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> "Turns":
        self.now = 0 if event == "call" and frame.f_code.co_name == "_run_once" else self.now + 1
        self.most = max(self.most, self.now)
        return self


@contextmanager
def counted(turns: Turns) -> Iterator[None]:
    """Have `turns` count in this thread while the context is open; the work of other threads holds
    up no loop.
    """
    sys.settrace(turns)
    try:
        yield
    finally:
        sys.settrace(None)
