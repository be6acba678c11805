"""The adapters that lie on one server: what is loaded, what leaves for it, and what takes no further requests."""

import logging
from collections.abc import Callable, Iterator

from shell_router.engines.adapters.lease import AdapterCounts
from shell_router.engines.adapters.settings import AdapterSettings
from shell_router.expert_pools.counted_usage import CountedUsage
from shell_router.expert_pools.draining import drained, overdue
from shell_router.expert_pools.experts import Loader
from shell_router.expert_pools.foresight import Ahead, next_to_load, turns
from shell_router.expert_pools.memory import Memory
from shell_router.expert_pools.shelf import Shelf
from shell_router.expert_pools.values import Expert
from shell_router.expert_pools.waiting import WaitingLine

log = logging.getLogger(__name__)


class Stock:
    """At most `settings.room` adapters, for those who use them and for those who wait in `line`.

    An adapter is loaded while others are in use, one at a time. `counts` are told of loads; `failing` says that the
    server itself failed at the last one.
    """

    def __init__(
        self, place: str, loader: Loader, settings: AdapterSettings, line: WaitingLine, clock: Callable[[], float]
    ) -> None:
        self.counts = AdapterCounts()
        self.failing = False
        self._place = place
        self._window_s = settings.window_s
        self._line = line
        self._clock = clock
        memory = Memory(place, settings.room)
        self._shelf = Shelf(place, memory, settings.room, settings.evict, loader, self._outlook)
        self._usage = CountedUsage()
        self._draining: tuple[str, ...] = ()
        self._loading: str | None = None

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._shelf

    def __iter__(self) -> Iterator[str]:
        return iter(self._shelf)

    def asked(self, adapter: str) -> None:
        """A request wants it."""
        self._usage.asked(adapter)

    def is_coming(self, adapter: str) -> bool:
        """Whether it is here, or being loaded."""
        return adapter in self._shelf or adapter == self._loading

    def serves(self, adapter: str) -> bool:
        """Whether it is here, and takes further requests, by what `drain` found last."""
        return adapter in self._shelf and adapter not in self._draining

    def drain(self) -> None:
        """Who has waited for too long gets the next place: some of what is here takes nobody further until then."""
        late = overdue(self._line.groups, self.is_coming, self._clock(), self._window_s)
        if not late:
            self._draining = ()
            return
        ahead = next_to_load(self._line.groups, self.is_coming, ())
        self._learn()
        order = self._shelf.leaving_order(None if ahead is None else ahead.turn)
        self._draining = drained(order, late - self._shelf.room_bytes, self._draining)

    def take(self, adapter: str) -> tuple[int, Callable[[], None]]:
        """It is in use, and stays, until what is returned is called; and the number of its load."""
        number = self._shelf.load_number(adapter)
        assert number is not None, "what is taken is here"
        return number, self._shelf.pin(adapter)

    async def bring(self, ahead: Ahead, coming: Callable[[str], None]) -> bool:
        """Load it, and tell `coming` when that begins. False where there is no room for it now.

        Raises what the loader raises; then it takes no room.
        """
        self._loading = ahead.expert
        try:
            async with self._shelf.lock:
                self._learn()
                expert = self._expert(ahead.expert)
                if not await self._shelf.make_room(expert, ahead.turn):
                    return False
                coming(ahead.expert)
                await self._load(expert)
        finally:
            self._loading = None
        return True

    async def _load(self, expert: Expert) -> None:
        begun_s = self._clock()
        await self._shelf.load(expert)
        took_s = self._clock() - begun_s
        self.failing = False
        self.counts.loads += 1
        self.counts.load_s += took_s
        log.info("the %s has the adapter %r after %.0f ms", self._place, expert.name, 1e3 * took_s)

    async def missing(self, adapter: str, number: int) -> None:
        """The server does not have that load of it any more; nothing happens where that was noticed before."""
        async with self._shelf.lock:
            if self._shelf.load_number(adapter) == number:
                self.counts.missing += 1
                log.warning("the %s has lost the adapter %r: it is loaded again", self._place, adapter)
                await self._shelf.drop(adapter)

    def _expert(self, name: str) -> Expert:
        """Adapters of a model are alike; what they differ in is how often they are asked for."""
        return Expert(name, "adapter", 1, self._usage.share(name))

    def _learn(self) -> None:
        for name in self._shelf:
            self._shelf.learn(self._expert(name))

    def _outlook(self, experts: list[Expert]) -> list[tuple[int | None, bool]]:
        waited_for = turns(self._line.groups)
        return [(waited_for.get(expert.name), False) for expert in experts]
