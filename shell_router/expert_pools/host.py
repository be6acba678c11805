"""Host memory: a cache in front of the disk, with a budget of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shell_router.expert_pools.shelf import Shelf
from shell_router.expert_pools.values import Expert, Tier


class HostTier:
    """What is read from disk stays in host memory for as long as the policy of its shelf keeps it.

    One read at a time: a disk gives two of them no more than one.
    """

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def tier(self, name: str) -> Tier:
        """Where a load would find the expert."""
        return Tier.HOST if name in self.shelf else Tier.DISK

    @asynccontextmanager
    async def through(self, expert: Expert) -> AsyncIterator[Tier]:
        """The expert is in host memory while the context is open; where it finds no room, it has to come from disk.

        Yields where it lay before. Raises what reading it raises.
        """
        found = self.tier(expert.name)
        if found is Tier.DISK and self.shelf.fits(expert):
            found = await self._read(expert)
        if expert.name in self.shelf:
            with self.shelf.pinned(expert.name):
                yield found
        else:
            yield found

    async def _read(self, expert: Expert) -> Tier:
        async with self.shelf.lock:
            if expert.name in self.shelf:  # somebody else read it while this one waited
                return Tier.HOST
            if await self.shelf.make_room(expert):
                await self.shelf.load(expert)
            return Tier.DISK
