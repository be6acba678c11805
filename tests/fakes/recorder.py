"""Keeps a run's events and lets a test wait for what it is about, instead of for time."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from shell_router.core.events import Event

Kind = TypeVar("Kind")


class Recorder:
    """Pass `recorder.emit` where events are wanted."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._more = asyncio.Event()

    def emit(self, event: Event) -> None:
        """Keep the event and wake whoever waits."""
        self.events.append(event)
        self._more.set()

    def of(self, kind: type[Kind]) -> list[Kind]:
        """The events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, wanted: Callable[["Recorder"], bool], limit_s: float = 10.0) -> None:
        """Return once `wanted` holds; TimeoutError if it never does."""
        async with asyncio.timeout(limit_s):
            while not wanted(self):
                self._more.clear()
                await self._more.wait()
