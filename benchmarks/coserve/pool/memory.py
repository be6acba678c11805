"""The components in one memory: what is loaded, what is evicted for another, and how many bytes
that takes.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from benchmarks.coserve.pool.errors import MemoryBudgetExceeded
from benchmarks.coserve.pool.values import Component, Components

log = logging.getLogger(__name__)


class Memory:
    """A budget that cannot be exceeded: what does not fit is refused before it is allocated."""

    def __init__(self, name: str, budget_bytes: int) -> None:
        self._name = name
        self.budget_bytes = budget_bytes
        self.used_bytes = self.peak_bytes = 0

    @property
    def free_bytes(self) -> int:
        """What can still be reserved."""
        return self.budget_bytes - self.used_bytes

    def reserve(self, wanted_bytes: int) -> None:
        """Raises MemoryBudgetExceeded where it does not fit."""
        if wanted_bytes > self.free_bytes:
            raise MemoryBudgetExceeded(
                f"{wanted_bytes} bytes of {self._name} are wanted, where {self.free_bytes} of "
                f"{self.budget_bytes} are"
                " free.",
                remedy=(
                    "This is a defect of the pool: it reserves only what fits. Please report it."
                ),
            )
        self.used_bytes += wanted_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def release(self, held_bytes: int) -> None:
        """Free what was reserved."""
        self.used_bytes -= held_bytes


@dataclass(slots=True, eq=False)
class Resident:
    """A component in a memory. `loaded` and `used` count loads and uses there, so that smaller is
    longer ago.

    `turn` is the index in the queue of the first group that needs it; None where none does. `idle`
    says that it follows on other components none of which is loaded anywhere; in host memory also
    that an executor holds it. With `pins` above 0 it is in use, and stays.
    """

    component: Component
    loaded: int
    used: int
    turn: int | None = None
    idle: bool = False
    pins: int = 0


Order = Callable[[Sequence[Resident]], list[Resident]]
"""In which order components leave a memory until enough is free."""


def two_stage(residents: Sequence[Resident]) -> list[Resident]:
    """The paper's: first successors without a loaded predecessor, the largest first; then the least
    probable.
    """
    successors = sorted(
        (one for one in residents if one.idle), key=lambda one: -one.component.memory_bytes
    )
    others = sorted((one for one in residents if not one.idle), key=lambda one: one.component.usage)
    return [*successors, *others]


def queue_aware(residents: Sequence[Resident]) -> list[Resident]:
    """Ours: the paper's order among those that no request waits for, then the one whose turn comes
    last.

    The queue is known, so it needs no probabilities: that is Belady's choice, as far as the queue
    reaches.
    """
    unneeded = two_stage([one for one in residents if one.turn is None])
    waited_for = sorted(
        (one for one in residents if one.turn is not None), key=lambda one: -(one.turn or 0)
    )
    return [*unneeded, *waited_for]


def victims(order: Iterable[Resident], missing_bytes: int) -> list[str] | None:
    """The first of `order` that free `missing_bytes` together; None where all of them are not
    enough.
    """
    leaving = []
    freed_bytes = 0
    for resident in order:
        if freed_bytes >= missing_bytes:
            break
        leaving.append(resident.component.name)
        freed_bytes += resident.component.memory_bytes
    if freed_bytes >= missing_bytes:
        return leaving
    return None


class Shelf:
    """Components take at most `shelf_bytes` of `memory`. Its owner changes it one task at a time.

    `outlook` gives the `turn` and `idle` of each component's Resident.
    """

    def __init__(
        self,
        place: str,
        memory: Memory,
        shelf_bytes: int,
        order: Order,
        components: Components,
        outlook: Callable[[list[Component]], list[tuple[int | None, bool]]],
    ) -> None:
        self._place = place
        self._memory = memory
        self._shelf_bytes = shelf_bytes
        self._order = order
        self._components = components
        self._outlook = outlook
        self._entries: dict[str, Resident] = {}
        self._clock = count()
        self._taken_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def fits(self, component: Component) -> bool:
        """Whether it would fit here, were nothing else there."""
        return component.memory_bytes <= self._shelf_bytes

    @property
    def free_bytes(self) -> int:
        """What is free for components."""
        return min(self._shelf_bytes - self._taken_bytes, self._memory.free_bytes)

    @contextmanager
    def pinned(self, name: str) -> Iterator[None]:
        """It is used now, and stays while the context is open."""
        entry = self._entries[name]
        entry.pins += 1
        entry.used = next(self._clock)
        try:
            yield
        finally:
            entry.pins -= 1

    async def make_room(self, component: Component, keep_before: int | None = None) -> bool:
        """Evict until `component` fits. False, and nothing is evicted, where what may leave is not
        enough.

        What comes into use while others leave stays; then it may also be False after some have
        left. With `keep_before`, those whose turn comes no later stay, whatever the order says.
        """
        return await self.free(component.memory_bytes - self.free_bytes, keep_before)

    async def free(self, missing_bytes: int, keep_before: int | None = None) -> bool:
        """Evict `missing_bytes`, in the order of the policy. False also where one came to be used
        while others left.
        """
        if missing_bytes <= 0:
            return True
        leaving = victims(self._order(self._residents(keep_before)), missing_bytes)
        for name in leaving or ():
            entry = self._entries[name]
            if entry.pins:  # since the one before it is being unloaded
                return await self.free(missing_bytes, keep_before)
            await self.drop(name)
            missing_bytes -= entry.component.memory_bytes
        return leaving is not None

    async def load(self, component: Component) -> None:
        """Load it into memory that was freed. Raises what loading raises; then it takes no
        memory."""
        self._memory.reserve(component.memory_bytes)
        self._taken_bytes += component.memory_bytes
        try:
            await self._components.load(component, self._place)
        except BaseException:
            self._release(component)
            raise
        now = next(self._clock)
        self._entries[component.name] = Resident(component, now, now)

    async def drop(self, name: str) -> None:
        """Unload it, needed or not. One that cannot be unloaded counts as gone, with a line in the
        log.
        """
        component = self._entries.pop(name).component
        try:
            await self._components.unload(component, self._place)
        except Exception:
            log.exception(
                "%s could not be unloaded from %s: its memory may not be free.", name, self._place
            )
        finally:
            self._release(component)

    def _release(self, component: Component) -> None:
        self._taken_bytes -= component.memory_bytes
        self._memory.release(component.memory_bytes)

    def _residents(self, keep_before: int | None) -> list[Resident]:
        free = [entry for entry in self._entries.values() if not entry.pins]
        for entry, outlook in zip(
            free, self._outlook([entry.component for entry in free]), strict=True
        ):
            entry.turn, entry.idle = outlook
        return [
            entry
            for entry in free
            if keep_before is None or entry.turn is None or entry.turn > keep_before
        ]
