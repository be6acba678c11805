"""Where the two servers of a scripted pair meet."""

from collections import OrderedDict
from collections.abc import Callable

_MOST_ROOMS = 65536
"""Rooms kept for a decode that has not come; older ones are those of requests that were abandoned."""


class Rooms:
    """Decode waits here for its prefill, as with a real transfer."""

    def __init__(self) -> None:
        self._arrived: OrderedDict[int, int] = OrderedDict()
        self._waiting: dict[int, Callable[[int], None]] = {}

    def arrive(self, room: int, cached_tokens: int) -> None:
        """The room's prefill has ended."""
        waiting = self._waiting.pop(room, None)
        if waiting is None:
            self._arrived[room] = cached_tokens
            if len(self._arrived) > _MOST_ROOMS:
                self._arrived.popitem(last=False)
        else:
            waiting(cached_tokens)

    def wait(self, room: int, proceed: Callable[[int], None]) -> None:
        """Call `proceed` with the prefill's cached tokens once it has ended, at once if it has."""
        cached_tokens = self._arrived.pop(room, None)
        if cached_tokens is None:
            self._waiting[room] = proceed
        else:
            proceed(cached_tokens)

    def leave(self, room: int) -> None:
        """Nobody will come to this room any more."""
        self._waiting.pop(room, None)
        self._arrived.pop(room, None)
