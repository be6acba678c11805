"""How the requests under way end when their server does."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from shell_router.errors import RouterStopping

log = logging.getLogger(__name__)

FAREWELL_S = 5.0
"""What cut requests get to tell their clients."""


class Drain:
    """The running requests of one app: waited for when its server stops, and cut where they take too long."""

    def __init__(self) -> None:
        self.running = 0
        self._limits: set[asyncio.Timeout] = set()
        self._cut = False
        self._idle = asyncio.Event()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """A request runs inside."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    @asynccontextmanager
    async def until_cut(self) -> AsyncIterator[None]:
        """Work that may take long goes inside; where the server ends first, it ends with RouterStopping."""
        if self._cut:
            raise _stopping()
        try:
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                try:
                    yield
                finally:
                    self._limits.discard(limit)
        except TimeoutError:
            if limit.expired():
                raise _stopping() from None
            raise

    async def finish(self, limit_s: float, hurry: asyncio.Event) -> None:
        """Return when no request runs. After `limit_s`, or at once with `hurry`, those that still run are cut."""
        if self.running:
            await self._until_idle(limit_s, hurry)
        if self.running:
            log.warning("%d requests still run and are cut", self.running)
            self._cut_all()
            await self._until_idle(FAREWELL_S, asyncio.Event())

    async def _until_idle(self, limit_s: float, hurry: asyncio.Event) -> None:
        self._idle.clear()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._idle, hurry)]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _cut_all(self) -> None:
        self._cut = True
        now_s = asyncio.get_running_loop().time()
        for limit in self._limits:
            limit.reschedule(now_s)


def _stopping() -> RouterStopping:
    return RouterStopping(
        "The router stopped before this request had ended.",
        remedy="Send it again, to another router or once this one is back.",
    )


DRAIN = web.AppKey("DRAIN", Drain)
