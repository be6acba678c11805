"""What lies in one memory, when those who use it come while something is being unloaded."""

import asyncio

from shell_router.expert_pools.experts import Loader
from shell_router.expert_pools.memory import Memory
from shell_router.expert_pools.shelf import Shelf
from shell_router.expert_pools.values import Expert


class SlowToUnload(Loader):
    """Unloads when `gate` opens, and notes what."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.unloaded: list[str] = []

    async def load(self, expert: Expert, place: str) -> None:
        """At once."""

    async def unload(self, expert: Expert, place: str) -> None:
        self.unloaded.append(expert.name)
        await self.gate.wait()


def nobody_waits(experts: list[Expert]) -> list[tuple[int | None, bool]]:
    return [(None, False) for _ in experts]


async def test_what_comes_into_use_while_another_leaves_stays_and_a_third_leaves_for_it() -> None:
    loader = SlowToUnload()
    shelf = Shelf("host", Memory("host", 3), 3, "fifo", loader, nobody_waits)
    for name in ("first", "second", "third"):
        await shelf.load(Expert(name, "any", 1))
    making = asyncio.create_task(shelf.make_room(Expert("large", "any", 2)))
    await asyncio.sleep(0)
    with shelf.pinned("second"):
        loader.gate.set()
        assert await making
        assert loader.unloaded == ["first", "third"]
        assert shelf.room_bytes == 2


async def test_room_that_only_the_pinned_could_give_is_not_made() -> None:
    loader = SlowToUnload()
    shelf = Shelf("host", Memory("host", 2), 2, "fifo", loader, nobody_waits)
    for name in ("first", "second"):
        await shelf.load(Expert(name, "any", 1))
    making = asyncio.create_task(shelf.make_room(Expert("large", "any", 2)))
    await asyncio.sleep(0)
    with shelf.pinned("second"):
        loader.gate.set()
        assert not await making
        assert (loader.unloaded, tuple(shelf)) == (["first"], ("second",))
