"""What the model's thread tells a request's task."""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Items in order, taken in batches by one reader. One event loop only."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._filled = asyncio.Event()

    def put(self, item: T) -> None:
        self._items.append(item)
        self._filled.set()

    async def take(self) -> list[T]:
        """Everything that came since the last call; waits until there is something."""
        await self._filled.wait()
        self._filled.clear()
        items, self._items = self._items, []
        return items
