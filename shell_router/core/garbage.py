"""How often Python looks for garbage that refers to itself."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SERVING = (20_000, 10, 10)
"""Requests leave few cycles: looking at all of them as often as Python does costs a tenth of a request."""


def collect_rarely() -> None:
    """From now on look as rarely as `SERVING` says (see `gc.set_threshold`), and never at what is loaded by now."""
    gc.freeze()
    gc.set_threshold(*SERVING)


@contextmanager
def uncollected() -> Iterator[None]:
    """Do not look while the context is open: thousands of requests at a time live long, and leave no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
