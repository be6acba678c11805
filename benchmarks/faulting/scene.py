"""What a fault may use, and what is seen of it."""

import asyncio
from dataclasses import dataclass
from time import monotonic

from faulting.client import Client, Request
from faulting.engines import Engines
from faulting.refusing import RefusingPrefill

LATER_S = 2.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds until the client was told, None where it was the one that left; and what it was told.

    `held` requests were on the servers LATER_S after the fault, `held_after` LATER_S after the client knew or left.
    """

    error_s: float | None
    told: str
    held: int
    held_after: int


class Scene:
    """The parts of one case. A fault calls `begin` when it strikes, then `told` or `left`."""

    def __init__(self, engines: Engines, refusing: RefusingPrefill, client: Client) -> None:
        self.engines = engines
        self.refusing = refusing
        self.client = client
        self._began_s: float
        self._held: asyncio.Task[int]

    def begin(self) -> None:
        """The fault strikes, or a request that will meet it is sent, now."""
        self._began_s = monotonic()
        self._held = asyncio.create_task(self._held_later())

    async def told(self, request: Request) -> Outcome:
        """What comes of a request whose client waits for it."""
        ended = await request.end()
        return await self._outcome(ended.since(self._began_s), ended.told)

    async def left(self, request: Request) -> Outcome:
        """What comes of a request whose client leaves now."""
        await request.leave()
        return await self._outcome(None, "-")

    async def _outcome(self, error_s: float | None, told: str) -> Outcome:
        self.engines.resume()
        held_after = await self._held_later()
        return Outcome(error_s, told, await self._held, held_after)

    async def _held_later(self) -> int:
        await asyncio.sleep(LATER_S)
        return await self.engines.held()
