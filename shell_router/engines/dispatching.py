"""Waiting for a dispatcher's decisions, and asking engines for the state that it decides by."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shell_router.errors import EngineError, EngineUnavailable
from shell_router.routing.dispatcher import Dispatcher, EngineSlot, TrackedEngine
from shell_router.routing.engine_selection import EngineReport, PlacementRequest

log = logging.getLogger(__name__)

E = TypeVar("E")

LONGEST_WAIT_S = 30.0


async def engine_slot(dispatcher: Dispatcher[E], request: PlacementRequest, avoid: Collection[E] = ()) -> EngineSlot[E]:
    """A slot on an engine, where the request is sent at once; not on one of `avoid` if another serves.

    Raises EngineUnavailable while the breakers of all are open, or where no slot comes free in time. However it ends
    without a slot, the queue has forgotten the request.
    """
    entry = dispatcher.submit(request, avoid)
    if isinstance(entry, EngineSlot):
        return entry
    decided, wait_s = asyncio.get_running_loop().create_future(), dispatcher.settings.queue.wait_s
    entry.decided = lambda: None if decided.done() else decided.set_result(None)
    try:
        async with asyncio.timeout(wait_s):
            await decided
        if entry.error is not None:
            raise entry.error
    except BaseException as error:
        dispatcher.withdraw(entry)
        if not isinstance(error, TimeoutError):
            raise
        raise EngineUnavailable(
            f"No engine had capacity for the request within {wait_s:g} s.",
            remedy="Ask again later, add engines, or raise scheduling.queue.wait_s.",
        ) from error
    slot: EngineSlot[E] = entry.slot
    return slot


@dataclass(frozen=True, slots=True, eq=False)
class Monitor(Generic[E]):
    """Polls every engine of a dispatcher, each in a task of its own, so that a slow one delays no other's report.

    `ask` gives an engine's state within a limit of its own, or raises EngineError. One that fails is asked again after
    the double time, up to 30 s, and its last report ages meanwhile.
    """

    dispatcher: Dispatcher[E]
    ask: Callable[[E], Awaitable[EngineReport]]
    _tasks: dict[E, asyncio.Task[None]] = field(default_factory=dict)

    async def __aenter__(self) -> "Monitor[E]":
        self.follow()
        return self

    def follow(self) -> None:
        """Ask those engines that the dispatcher has now, and no others."""
        for gone in self._tasks.keys() - set(self.dispatcher.engines):
            self._tasks.pop(gone).cancel()
        for at in self.dispatcher.tracked:
            if at.engine not in self._tasks:
                self._tasks[at.engine] = asyncio.create_task(self._follow(at))

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _follow(self, at: TrackedEngine[E]) -> None:
        wait_s = 0.0
        while True:
            poll_s = self.dispatcher.poll_s
            try:
                self.dispatcher.report(at.index, await self.ask(at.engine))
                wait_s = poll_s
            except EngineError as error:
                at.failed_polls += 1
                if wait_s <= poll_s:
                    log.warning("%s does not report its state, and is chosen without it: %s", at.engine, error)
                wait_s = min(2 * max(wait_s, poll_s), max(LONGEST_WAIT_S, poll_s))
            await asyncio.sleep(wait_s)
