"""The end of a server's running requests."""

import asyncio
import logging

from shell_router.errors import RouterStopping
from shell_router.http.app import Key
from shell_router.moa.deadline import Deadlines

log = logging.getLogger(__name__)

FAREWELL_S = 5.0
"""The time that cut requests get to send their clients the error."""


class Drain:
    """The running requests of one application.

    A stop of the server waits for them, and cuts the ones that take too long.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self.running = 0
        self.idle = asyncio.Event()
        """Set when the last running request ends."""
        self._deadlines = deadlines

    async def finish(self, limit_s: float, force_shutdown: asyncio.Event) -> None:
        """Wait until no request runs; cut the ones that still run after `limit_s`.

        They are cut at once when `force_shutdown` is set.
        """
        if self.running:
            await self._wait_idle(limit_s, force_shutdown)
        if self.running:
            log.warning("%d requests still run and are cut", self.running)
            self._deadlines.end(_make_stopping)
            await self._wait_idle(FAREWELL_S, asyncio.Event())

    async def _wait_idle(self, limit_s: float, force_shutdown: asyncio.Event) -> None:
        self.idle.clear()
        waits = [asyncio.ensure_future(event.wait()) for event in (self.idle, force_shutdown)]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


def _make_stopping() -> RouterStopping:
    return RouterStopping(
        "The router stopped before this request had ended.",
        remedy="Send it again, to another router or once this one is back.",
    )


DRAIN = Key[Drain]("DRAIN")
