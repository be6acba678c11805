"""Leases on the adapters of one server: who has one, and who waits."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count

from shell_router.engines.adapters.lease import AdapterCounts, Lease
from shell_router.engines.adapters.settings import AdapterSettings
from shell_router.engines.adapters.stock import Stock
from shell_router.engines.task_owner import TaskOwner
from shell_router.errors import AdapterFailed, EngineError, EngineUnavailable
from shell_router.expert_pools.experts import Loader
from shell_router.expert_pools.foresight import Ahead, next_to_load
from shell_router.expert_pools.values import Costs, Request, Stage
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
    """Gives leases on the adapters of one server, and has them loaded so that all get theirs.

    Any number of requests may hold the same adapter. It stays while one of them does. `place` names the server in
    words, `clock` gives monotonic seconds.
    """

    def __init__(
        self, place: str, loader: Loader, settings: AdapterSettings, tasks: TaskOwner, clock: Callable[[], float]
    ) -> None:
        self._place = place
        self._wait_s = settings.wait_s
        self._tasks = tasks
        self._clock = clock
        self._line = WaitingLine(settings.window_s)
        self._stock = Stock(place, loader, settings, self._line, clock)
        self._ids = count()
        self._ahead: dict[str, None] = {}
        self._at_work = False

    @property
    def counts(self) -> AdapterCounts:
        """What has happened so far."""
        return self._stock.counts

    @property
    def failing(self) -> bool:
        """Whether the server itself failed when it was last to load something."""
        return self._stock.failing

    @property
    def loaded(self) -> tuple[str, ...]:
        """The adapters that are here."""
        return tuple(self._stock)

    @property
    def waiting(self) -> int:
        """Requests that wait for theirs."""
        return len(self._line)

    def will_have(self, adapter: str) -> bool:
        """Whether it is here, or on its way here."""
        return self._stock.is_coming(adapter) or self._line.waits_for(adapter)

    async def lease(self, adapter: str, coming: Callable[[], None] = lambda: None) -> Lease:
        """The adapter, loaded, until the lease is closed. `coming` is called when it begins to be loaded.

        Raises AdapterFailed where it does not load, EngineError where the server fails, EngineUnavailable where no
        place for it comes free within `wait_s`, or it is still being loaded then.
        """
        self._stock.asked(adapter)
        self._stock.drain()
        if self._stock.serves(adapter):
            return self._granted(adapter, 0.0)
        waiter = _Waiter(asyncio.get_running_loop().create_future(), coming)
        stage = Stage(Request(str(next(self._ids)), (adapter,), waiter), adapter, waiter, self._clock())
        self._line.add(stage, UNPREDICTED, 0.0)
        self._advance()
        try:
            async with asyncio.timeout(self._wait_s):
                return await waiter.lease
        except BaseException as error:
            self._forget(stage)
            if not isinstance(error, TimeoutError):
                raise
            raise self._too_late(adapter) from error

    def load_ahead(self, adapter: str) -> None:
        """A request is about to want it: load it now if nobody who waits needs the room."""
        if not self.will_have(adapter):
            self._ahead[adapter] = None
            self._advance()

    async def missing(self, lease: Lease) -> None:
        """The server says that it does not have the adapter of this lease: it is to be loaded again."""
        await self._stock.missing(lease.adapter, lease.number)
        self._advance()

    # --- who goes on

    def _granted(self, adapter: str, waited_s: float) -> Lease:
        number, leave = self._stock.take(adapter)

        def left() -> None:
            leave()
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
        self._stock.drain()
        while group := next((one for one in self._line.groups if self._stock.serves(one.expert)), None):
            self._grant_all(group)
            self._stock.drain()

    def _grant_all(self, group: Group) -> None:
        now_s = self._clock()
        for stage, waiter in self._taken_out([group]):
            waited_s = now_s - stage.arrived_s
            self.counts.waited += 1
            self.counts.waited_s += waited_s
            waiter.lease.set_result(self._granted(stage.expert, waited_s))

    def _taken_out(self, groups: Iterable[Group]) -> list[tuple[Stage, _Waiter]]:
        """Those who waited in these groups and wait no longer, but for those who have given up in this very moment."""
        stages = [stage for group in groups for stage in group.stages.values()]
        for stage in stages:
            self._line.remove(stage.request.id)
        return [(stage, stage.sample) for stage in stages if not stage.sample.lease.done()]

    def _forget(self, stage: Stage) -> None:
        """The request waits no longer. A lease that came in this very moment is given back."""
        waiter: _Waiter = stage.sample
        if stage.request.id in self._line:
            self._line.remove(stage.request.id)
            self._advance()
        elif waiter.lease.done() and not waiter.lease.cancelled() and waiter.lease.exception() is None:
            waiter.lease.result().close()

    def _too_late(self, adapter: str) -> EngineUnavailable:
        if self._stock.is_coming(adapter):
            return EngineUnavailable(
                f"The adapter {adapter!r} was still being loaded on the {self._place} after {self._wait_s:g} s.",
                remedy="Look at that server's load and log, or raise the model's adapters.wait_s.",
            )
        return EngineUnavailable(
            f"No place for the adapter {adapter!r} came free on the {self._place} within {self._wait_s:g} s.",
            remedy="Ask again later, add engines, or raise the model's adapters.room or adapters.wait_s.",
        )

    # --- what is loaded

    def _next(self) -> Ahead | None:
        return next_to_load(self._line.groups, self._stock.__contains__, self._ahead)

    async def _work(self) -> None:
        """Load what is waited for, one after the other, until there is nothing more to load or no room for it."""
        try:
            while (ahead := self._next()) is not None and await self._brought(ahead):
                self._grant()
        finally:
            self._at_work = False

    async def _brought(self, ahead: Ahead) -> bool:
        """False where there is no room: whoever leaves sets this going again."""
        try:
            return await self._stock.bring(ahead, self._tell_coming)
        except AdapterFailed as error:
            self._give_up(error, [group for group in self._line.groups if group.expert == ahead.expert])
        except EngineError as error:  # the server's fault: nobody here gets anything from it
            self._stock.failing = True
            self._ahead.clear()
            self._give_up(error, list(self._line.groups))
        except Exception as error:
            log.exception("adapters of the %s", self._place)
            self._give_up(AdapterFailed(f"{error!r}", remedy="Please report it."), list(self._line.groups))
        finally:
            self._ahead.pop(ahead.expert, None)
        return True

    def _tell_coming(self, adapter: str) -> None:
        for group in self._line.groups:
            if group.expert == adapter:
                for stage in group.stages.values():
                    stage.sample.coming()

    def _give_up(self, error: EngineError, groups: Iterable[Group]) -> None:
        """Those who wait there are told; asked for again, it is tried again."""
        self.counts.failures += 1
        log.error("%s", error)
        for _, waiter in self._taken_out(groups):
            waiter.lease.set_exception(error)
