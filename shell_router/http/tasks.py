"""Tasks with an owner."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class TaskOwner:
    """Starts tasks and keeps each until it has ended.

    Its tasks must not raise: they log what goes wrong.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        """Run `work` as a task of this owner."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def aclose(self, limit_s: float) -> None:
        """Give the tasks `limit_s` to end, then cancel the rest and wait until they have."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        remaining = tuple(self._tasks)
        for task in remaining:
            task.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)
