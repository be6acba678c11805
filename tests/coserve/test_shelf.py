"""What lies in one memory, when those who use it come while something is being unloaded."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.coserve.pool.memory import Memory, Shelf
from benchmarks.coserve.pool.values import Component, Components
from benchmarks.coserve.runs import first_in_first_out

pytestmark = pytest.mark.slow


class SlowToUnload(Components):
    """Unloads when `gate` opens, and notes what."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.unloaded: list[str] = []

    async def load(self, component: Component, place: str) -> None:
        """At once."""

    async def unload(self, component: Component, place: str) -> None:
        self.unloaded.append(component.name)
        await self.gate.wait()

    async def run(self, component: Component, place: str, samples: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError


def no_requests_wait(components: list[Component]) -> list[tuple[int | None, bool]]:
    return [(None, False) for _ in components]


async def test_what_comes_into_use_while_another_leaves_stays_and_a_third_leaves_for_it() -> None:
    loader = SlowToUnload()
    shelf = Shelf("host", Memory("host", 3), 3, first_in_first_out, loader, no_requests_wait)
    for name in ("first", "second", "third"):
        await shelf.load(Component(name, "any", 1))
    making = asyncio.create_task(shelf.make_room(Component("large", "any", 2)))
    await asyncio.sleep(0)
    with shelf.pinned("second"):
        loader.gate.set()
        assert await making
        assert loader.unloaded == ["first", "third"]
        assert shelf.free_bytes == 2


async def test_room_that_only_the_pinned_could_give_is_not_made() -> None:
    loader = SlowToUnload()
    shelf = Shelf("host", Memory("host", 2), 2, first_in_first_out, loader, no_requests_wait)
    for name in ("first", "second"):
        await shelf.load(Component(name, "any", 1))
    making = asyncio.create_task(shelf.make_room(Component("large", "any", 2)))
    await asyncio.sleep(0)
    with shelf.pinned("second"):
        loader.gate.set()
        assert not await making
        assert (loader.unloaded, tuple(shelf)) == (["first"], ("second",))
