"""Requests that wait for a place on an engine."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from shell_router.engines.place import Place, Wanted
from shell_router.errors import EngineUnavailable
from shell_router.scheduling.engine_state import Asked, Choice
from shell_router.scheduling.queue_memory import QueueMemory
from shell_router.scheduling.queue_order import QueueSettings, Waiting, turn

E = TypeVar("E")


@dataclass(slots=True, eq=False)
class Turn(Generic[E]):
    """A request on its way to an engine, and its `place` there, once it has one.

    It goes to the `bound` engine where there is one, else to any that it has not failed on (`shunned`, by index).
    `entered` is how many had been served before it came, `waited` whether it was not served at once. Its `place` is to
    come from the moment it joins a line.
    """

    wanted: Wanted
    asked: Asked
    arrived_s: float
    shunned: frozenset[int]
    bound: Choice | None = None
    entered: int = 0
    waited: bool = False
    place: "asyncio.Future[Place[E]]" = field(init=False)

    @property
    def has_place(self) -> bool:
        """Whether it has one, and not an error instead."""
        return self.place.done() and not self.place.cancelled() and self.place.exception() is None


class WaitingLine(Generic[E]):
    """Who waits, and who is next. Nobody waits here longer than the settings' `wait_s`."""

    def __init__(self, settings: QueueSettings, memory: QueueMemory) -> None:
        self.turns: list[Turn[E]] = []
        self.served = 0
        self._settings = settings
        self._memory = memory

    def join(self, one: Turn[E]) -> None:
        """Wait from now on."""
        one.entered = self.served
        one.place = asyncio.get_running_loop().create_future()
        self.turns.append(one)

    def leave(self, one: Turn[E]) -> None:
        """Wait no longer."""
        self.turns.remove(one)
        self.served += 1

    def first(self, can_go: Callable[[Turn[E]], bool], now_s: float) -> Turn[E] | None:
        """The next, by the settings' order, of those that can go; None where none can."""
        able = [one for one in self.turns if can_go(one)]
        return min(able, key=lambda one: turn(self.as_waiting(one), self._memory, self._settings, now_s), default=None)

    def as_waiting(self, one: Turn[E]) -> Waiting:
        """It as orders see it."""
        return Waiting(one.asked, one.arrived_s, self.served - one.entered)

    async def granted(self, one: Turn[E]) -> Place[E]:
        """Its place, when it has one. Raises EngineUnavailable where that takes too long, or nobody serves any more.

        However it ends without a place, the line has forgotten it, and the place is free.
        """
        try:
            async with asyncio.timeout(self._settings.wait_s):
                return await one.place
        except BaseException as error:
            self._forget(one)
            if not isinstance(error, TimeoutError):
                raise
            raise EngineUnavailable(
                f"No engine had a place for the request within {self._settings.wait_s:g} s.",
                remedy="Ask again later, add engines, or raise scheduling.queue.wait_s.",
            ) from error

    def refuse_all(self, error: EngineUnavailable) -> None:
        """No engine serves any more: nobody has anything to wait for."""
        for one in self.turns:
            if not one.place.done():
                one.place.set_exception(error)
        self.turns.clear()

    def _forget(self, one: Turn[E]) -> None:
        if one in self.turns:
            self.turns.remove(one)
        if one.has_place:
            one.place.result().close()  # it came in the moment in which the request was given up
