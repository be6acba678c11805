"""A request's hold on an adapter, and what is counted of them."""

from collections.abc import Callable
from dataclasses import dataclass


class Lease:
    """The adapter stays on its server from now until `close`, which must be called; calling it again changes nothing.

    It is on load `number` of the adapter there, and was waited for `waited_s`.
    """

    def __init__(self, adapter: str, number: int, waited_s: float, left: Callable[[], None]) -> None:
        self.adapter = adapter
        self.number = number
        self.waited_s = waited_s
        self._left = left
        self._open = True

    def close(self) -> None:
        """The request needs it no longer."""
        if self._open:
            self._open = False
            self._left()


def _nobody() -> None:
    """A request without an adapter holds nothing."""


def no_lease() -> Lease:
    """What a request gets that names no adapter."""
    return Lease("", 0, 0.0, _nobody)


@dataclass(slots=True)
class AdapterCounts:
    """What has happened on one server: adapters loaded and for how long in all, requests that waited for theirs and how
    long, loads that failed, adapters that were missing although they had been loaded."""

    loads: int = 0
    load_s: float = 0.0
    waited: int = 0
    waited_s: float = 0.0
    failures: int = 0
    missing: int = 0
