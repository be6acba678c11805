"""The experts in one memory: an executor's, or the host's."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from shell_router.expert_pools.evicting import EVICTIONS, Resident, victims
from shell_router.expert_pools.experts import Loader
from shell_router.expert_pools.memory import Memory
from shell_router.expert_pools.values import Expert

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Entry:
    """An expert that is loaded; with pins above 0 it is in use, and stays."""

    expert: Expert
    loaded: int
    used: int
    pins: int = 0


class Shelf:
    """Experts take at most `shelf_bytes` of `memory`. Whoever changes what lies here holds `lock`.

    `outlook` tells for an expert the `turn` and `idle` of a Resident.
    """

    def __init__(
        self,
        place: str,
        memory: Memory,
        shelf_bytes: int,
        evict: str,
        experts: Loader,
        outlook: Callable[[list[Expert]], list[tuple[int | None, bool]]],
    ) -> None:
        self.lock = asyncio.Lock()
        self._place = place
        self._memory = memory
        self._shelf_bytes = shelf_bytes
        self._order = EVICTIONS[evict]
        self._experts = experts
        self._outlook = outlook
        self._entries: dict[str, Entry] = {}
        self._clock = count()
        self._taken_bytes = 0

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def fits(self, expert: Expert) -> bool:
        """Whether it would fit here, were nothing else there."""
        return expert.memory_bytes <= self._shelf_bytes

    @property
    def room_bytes(self) -> int:
        """What is free for experts."""
        return min(self._shelf_bytes - self._taken_bytes, self._memory.free_bytes)

    def load_number(self, name: str) -> int | None:
        """Which load brought it, so that it can be told from a later one; None where it is not here."""
        entry = self._entries.get(name)
        return None if entry is None else entry.loaded

    def learn(self, expert: Expert) -> None:
        """More is known of one that is here, such as how often it is used."""
        self._entries[expert.name].expert = expert

    @contextmanager
    def pinned(self, name: str) -> Iterator[None]:
        """It is used now, and stays while the context is open."""
        unpin = self.pin(name)
        try:
            yield
        finally:
            unpin()

    def pin(self, name: str) -> Callable[[], None]:
        """It is used now, and stays until what is returned is called, which is to be done once."""
        entry = self._entries[name]
        entry.pins += 1
        entry.used = next(self._clock)

        def unpin() -> None:
            entry.pins -= 1

        return unpin

    def leaving_order(self, keep_before: int | None = None) -> list[str]:
        """All that may leave some day, in use or not, in the order of the policy; `keep_before` as in `make_room`."""
        return [one.expert.name for one in self._order(self._residents(keep_before, in_use=True))]

    async def make_room(self, expert: Expert, keep_before: int | None = None) -> bool:
        """Evict until `expert` fits. False, and nothing is evicted, where what may leave is not enough.

        What comes into use while others leave stays; then it may also be False after some have left. With
        `keep_before`, those whose turn comes no later stay, whatever the order says.
        """
        return await self.free(expert.memory_bytes - self.room_bytes, keep_before)

    async def free(self, missing_bytes: int, keep_before: int | None = None) -> bool:
        """Evict as many bytes, in the order of the policy. False also where one came to be used while others left."""
        if missing_bytes <= 0:
            return True
        leaving = victims(self._order(self._residents(keep_before)), missing_bytes)
        for name in leaving or ():
            entry = self._entries[name]
            if entry.pins:  # since the one before it is being unloaded
                return await self.free(missing_bytes, keep_before)
            await self.drop(name)
            missing_bytes -= entry.expert.memory_bytes
        return leaving is not None

    async def load(self, expert: Expert) -> None:
        """Load it into room that was made. Raises what loading raises; then it takes no memory."""
        self._memory.reserve(_owner(expert), expert.memory_bytes)
        self._taken_bytes += expert.memory_bytes
        try:
            await self._experts.load(expert, self._place)
        except BaseException:
            self._give_back(expert)
            raise
        now = next(self._clock)
        self._entries[expert.name] = Entry(expert, now, now)

    async def drop(self, name: str) -> None:
        """Unload it, needed or not. One that cannot be unloaded counts as gone, with a line in the log."""
        expert = self._entries.pop(name).expert
        try:
            await self._experts.unload(expert, self._place)
        except Exception:
            log.exception("%s could not be unloaded from %s: its memory may not be free.", name, self._place)
        finally:
            self._give_back(expert)

    def _give_back(self, expert: Expert) -> None:
        self._taken_bytes -= expert.memory_bytes
        self._memory.release(_owner(expert))

    def _residents(self, keep_before: int | None, *, in_use: bool = False) -> list[Resident]:
        free = [entry for entry in self._entries.values() if in_use or not entry.pins]
        outlooks = self._outlook([entry.expert for entry in free])
        return [
            Resident(entry.expert, entry.loaded, entry.used, turn, idle)
            for entry, (turn, idle) in zip(free, outlooks, strict=True)
            if keep_before is None or turn is None or turn > keep_before
        ]


def _owner(expert: Expert) -> str:
    return f"expert {expert.name}"
