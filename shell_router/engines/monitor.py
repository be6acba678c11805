"""Asks engines for their state, so that choices need not wait for it (Gimbal's asynchronous metrics)."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from shell_router.engines.dispatch import Dispatcher
from shell_router.errors import EngineError
from shell_router.scheduling.engine_state import Reported

log = logging.getLogger(__name__)

E = TypeVar("E")

LONGEST_WAIT_S = 30.0


class Monitor(Generic[E]):
    """Polls every engine of a dispatcher, each apart, so that a slow one delays no other's news.

    `ask` gives an engine's state within a limit of its own, or raises EngineError. One that fails is asked again after
    the double time, up to 30 s, and what it had said grows old meanwhile.
    """

    def __init__(self, dispatcher: Dispatcher[E], ask: Callable[[E], Awaitable[Reported]], poll_s: float) -> None:
        self._dispatcher = dispatcher
        self._ask = ask
        self._poll_s = poll_s
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Monitor[E]":
        self._tasks = [asyncio.create_task(self._follow(at.index)) for at in self._dispatcher.candidates]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, index: int) -> None:
        at, wait_s = self._dispatcher.candidates[index], self._poll_s
        while True:
            try:
                self._dispatcher.heard(index, await self._ask(at.engine))
                wait_s = self._poll_s
            except EngineError as error:
                self._dispatcher.candidates[index].unheard += 1
                if wait_s == self._poll_s:
                    log.warning("%s does not tell its state, and is chosen without it: %s", at.engine, error)
                wait_s = min(2 * wait_s, max(LONGEST_WAIT_S, self._poll_s))
            await asyncio.sleep(wait_s)
