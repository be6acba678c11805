"""The adapters of one server: which are loaded, who uses them, and who waits."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from shell_router.engines.adapters.lease import AdapterCounts, Lease
from shell_router.engines.adapters.settings import AdapterSettings
from shell_router.engines.task_owner import TaskOwner
from shell_router.errors import AdapterFailed, EngineError, EngineUnavailable
from shell_router.expert_pools.draining import drained, overdue
from shell_router.expert_pools.experts import Loader
from shell_router.expert_pools.foresight import Ahead, next_to_load, turns
from shell_router.expert_pools.memory import Memory
from shell_router.expert_pools.shelf import Shelf
from shell_router.expert_pools.counted_usage import CountedUsage
from shell_router.expert_pools.values import Costs, Expert, Request, Stage
from shell_router.expert_pools.waiting import Group, WaitingLine

log = logging.getLogger(__name__)

UNPREDICTED = Costs(0.0, 0.0, 1, 0, 0.0, 0.0)
"""Nobody predicts how long requests for an adapter take: engines run those of several adapters together."""


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A request that waits; `coming` is called when its adapter begins to load."""

    lease: "asyncio.Future[Lease]"
    coming: Callable[[], None]


class AdapterLeases:
    """Gives leases on the adapters of one server, and loads and unloads them so that all get theirs.

    Any number of requests may hold the same adapter. It stays while one of them does. An adapter is loaded while others
    are in use, one at a time. `place` names the server in words, `clock` gives monotonic seconds. `failing` says that
    the server itself failed at the last load.
    """

    def __init__(
        self, place: str, loader: Loader, settings: AdapterSettings, tasks: TaskOwner, clock: Callable[[], float]
    ) -> None:
        self.counts = AdapterCounts()
        self.failing = False
        self._place = place
        self._settings = settings
        self._tasks = tasks
        self._clock = clock
        self._line = WaitingLine(settings.window_s)
        memory = Memory(place, settings.room)
        self._shelf = Shelf(place, memory, settings.room, settings.evict, loader, self._outlook)
        self._usage = CountedUsage()
        self._ids = count()
        self._draining: tuple[str, ...] = ()
        self._ahead: dict[str, None] = {}
        self._loading: str | None = None
        self._at_work = False

    @property
    def loaded(self) -> tuple[str, ...]:
        """The adapters that are here."""
        return tuple(self._shelf)

    @property
    def waiting(self) -> int:
        """Requests that wait for theirs."""
        return len(self._line)

    def will_have(self, adapter: str) -> bool:
        """Whether it is here, or on its way here."""
        return adapter in self._shelf or adapter == self._loading or self._line.waits_for(adapter)

    async def lease(self, adapter: str, coming: Callable[[], None] = lambda: None) -> Lease:
        """The adapter, loaded, until the lease is closed. `coming` is called when it begins to be loaded.

        Raises AdapterFailed where it does not load, EngineError where the server fails, EngineUnavailable where no
        place for it comes free within `wait_s`.
        """
        now_s = self._clock()
        self._usage.asked(adapter)
        self._drain(now_s)
        if adapter in self._shelf and adapter not in self._draining:
            return self._granted(adapter, 0.0)
        waiter = _Waiter(asyncio.get_running_loop().create_future(), coming)
        stage = Stage(Request(str(next(self._ids)), (adapter,), waiter), adapter, waiter, now_s)
        self._line.add(stage, UNPREDICTED, 0.0)
        self._advance()
        try:
            async with asyncio.timeout(self._settings.wait_s):
                return await waiter.lease
        except BaseException as error:
            self._forget(stage)
            if not isinstance(error, TimeoutError):
                raise
            raise EngineUnavailable(
                f"No place for the adapter {adapter!r} came free on the {self._place} within"
                f" {self._settings.wait_s:g} s.",
                remedy="Ask again later, add engines, or raise the model's adapters.room or adapters.wait_s.",
            ) from error

    def load_ahead(self, adapter: str) -> None:
        """A request is about to want it: load it now if nobody who waits needs the room."""
        if not self.will_have(adapter):
            self._ahead[adapter] = None
            self._advance()

    async def missing(self, lease: Lease) -> None:
        """The server says that it does not have the adapter of this lease: it is to be loaded again."""
        async with self._shelf.lock:
            if self._shelf.load_number(lease.adapter) != lease.number:
                return  # that was noticed before
            self.counts.missing += 1
            log.warning("the %s has lost the adapter %r: it is loaded again", self._place, lease.adapter)
            await self._shelf.drop(lease.adapter)
        self._advance()

    # --- who gets what is here

    def _granted(self, adapter: str, waited_s: float) -> Lease:
        unpin = self._shelf.pin(adapter)
        number = self._shelf.load_number(adapter)
        assert number is not None, "what is pinned is here"

        def left() -> None:
            unpin()
            self._advance()

        return Lease(adapter, number, waited_s, left)

    def _advance(self) -> None:
        """Something has changed: let those go on who can, and load what is next."""
        if not len(self._line) and not self._ahead:
            return
        self._grant()
        if not self._at_work and self._next() is not None:
            self._at_work = True
            self._tasks.start(self._work())

    def _grant(self) -> None:
        """Group by group, since an adapter may be drained once those before the others have got it."""
        now_s = self._clock()
        self._drain(now_s)
        while (group := next(filter(self._is_granted, self._line.groups), None)) is not None:
            self._grant_all(group, now_s)
            self._drain(now_s)

    def _is_granted(self, group: Group) -> bool:
        return group.expert in self._shelf and group.expert not in self._draining

    def _grant_all(self, group: Group, now_s: float) -> None:
        for stage in list(group.stages.values()):
            self._line.remove(stage.request.id)
            waiter: _Waiter = stage.sample
            if not waiter.lease.done():
                waited_s = now_s - stage.arrived_s
                self.counts.waited += 1
                self.counts.waited_s += waited_s
                waiter.lease.set_result(self._granted(stage.expert, waited_s))

    def _drain(self, now_s: float) -> None:
        """Who has waited for too long gets the next place: some of what is here takes nobody further until then."""
        late = overdue(self._line.groups, self._is_coming, now_s, self._settings.window_s)
        if not late:
            self._draining = ()
            return
        ahead = next_to_load(self._line.groups, self._is_coming, ())
        self._learn()
        order = self._shelf.leaving_order(None if ahead is None else ahead.turn)
        self._draining = drained(order, late - self._shelf.room_bytes, self._draining)

    def _is_coming(self, name: str) -> bool:
        return name in self._shelf or name == self._loading

    def _forget(self, stage: Stage) -> None:
        """The request waits no longer. A lease that came in this very moment is given back."""
        waiter: _Waiter = stage.sample
        if stage.request.id in self._line:
            self._line.remove(stage.request.id)
            self._advance()
        elif waiter.lease.done() and not waiter.lease.cancelled() and waiter.lease.exception() is None:
            waiter.lease.result().close()

    # --- what is loaded

    def _next(self) -> Ahead | None:
        return next_to_load(self._line.groups, self._shelf.__contains__, self._ahead)

    async def _work(self) -> None:
        """Load what is waited for, one after the other, until there is nothing more to load or no room for it."""
        try:
            while (ahead := self._next()) is not None and await self._bring(ahead):
                self._grant()
        finally:
            self._at_work = False

    async def _bring(self, ahead: Ahead) -> bool:
        """Load what is wanted. False where there is no room: whoever leaves sets this going again."""
        self._loading = ahead.expert
        try:
            async with self._shelf.lock:
                self._learn()
                expert = self._expert(ahead.expert)
                if not await self._shelf.make_room(expert, ahead.turn):
                    return False
                self._tell_coming(ahead.expert)
                await self._load(expert)
        except AdapterFailed as error:
            self._give_up(error, [group for group in self._line.groups if group.expert == ahead.expert])
        except EngineError as error:  # the server's fault: nobody here gets anything from it
            self.failing = True
            self._give_up(error, list(self._line.groups))
            self._ahead.clear()
        except Exception as error:
            log.exception("adapters of the %s", self._place)
            self._give_up(AdapterFailed(f"{error!r}", remedy="Please report it."), list(self._line.groups))
        finally:
            self._loading = None
            self._ahead.pop(ahead.expert, None)
        return True

    async def _load(self, expert: Expert) -> None:
        begun_s = self._clock()
        await self._shelf.load(expert)
        took_s = self._clock() - begun_s
        self.failing = False
        self.counts.loads += 1
        self.counts.load_s += took_s
        log.info("the %s has the adapter %r after %.0f ms", self._place, expert.name, 1e3 * took_s)

    def _tell_coming(self, adapter: str) -> None:
        for group in self._line.groups:
            if group.expert == adapter:
                for stage in group.stages.values():
                    stage.sample.coming()

    def _give_up(self, error: EngineError, groups: Iterable[Group]) -> None:
        """Those who wait there are told; asked for again, it is tried again."""
        self.counts.failures += 1
        log.error("%s", error)
        for stage in [stage for group in groups for stage in group.stages.values()]:
            self._line.remove(stage.request.id)
            waiter: _Waiter = stage.sample
            if not waiter.lease.done():
                waiter.lease.set_exception(error)

    # --- what is known of them

    def _expert(self, name: str) -> Expert:
        return Expert(name, "adapter", 1, self._usage.share(name))

    def _learn(self) -> None:
        for name in self._shelf:
            self._shelf.learn(self._expert(name))

    def _outlook(self, experts: list[Expert]) -> list[tuple[int | None, bool]]:
        waited_for = turns(self._line.groups)
        return [(waited_for.get(expert.name), False) for expert in experts]
