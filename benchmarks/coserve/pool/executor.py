"""One executor: a queue, a memory, and a loop that serves the one out of the other."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from benchmarks.coserve.pool.errors import ComponentError, ComponentFailed
from benchmarks.coserve.pool.memory import Memory, Shelf
from benchmarks.coserve.pool.policies import Policies, QueueView
from benchmarks.coserve.pool.queue import REACH, ComponentQueue, next_to_load, turns
from benchmarks.coserve.pool.values import (
    Component,
    Components,
    Costs,
    ExecutorSettings,
    Stage,
    Tier,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Switched:
    """`executor` loaded `component`, which lay in `tier`; `ahead` of its turn, while something else
    ran.
    """

    executor: str
    component: str
    tier: Tier
    ahead: bool
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Served:
    """`executor` ran a batch of `samples` on `component`."""

    executor: str
    component: str
    samples: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class GaveUp:
    """`executor` could not load `component`, and `requests` that waited for it there have failed.
    Others try again.
    """

    executor: str
    component: str
    requests: int
    at_s: float
    error: ComponentError


Event = Switched | Served | GaveUp
Watch = Callable[[Event], None]


class HostTier:
    """What is read from disk stays in host memory for as long as the policy of its shelf keeps it.

    One read at a time: a disk is no faster with two.
    """

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self._reading = asyncio.Lock()

    def tier(self, name: str) -> Tier:
        """Where a load would find the component."""
        if name in self.shelf:
            return Tier.HOST
        return Tier.DISK

    @asynccontextmanager
    async def through(self, component: Component) -> AsyncIterator[Tier]:
        """The component is in host memory while the context is open; where it does not fit, it is
        loaded from disk.

        Yields where it was before. Raises what reading it raises.
        """
        found = self.tier(component.name)
        if found is Tier.DISK and self.shelf.fits(component):
            async with self._reading:
                found = self.tier(component.name)  # another executor may have read it meanwhile
                if found is Tier.DISK and await self.shelf.make_room(component):
                    await self.shelf.load(component)
        if component.name in self.shelf:
            with self.shelf.pinned(component.name):
                yield found
        else:
            yield found


class ComponentExecutor:
    """Serves the stages that are added to it, and calls `settled` with each and its output, or a
    ComponentError.
    """

    def __init__(
        self,
        settings: ExecutorSettings,
        policies: Policies,
        catalog: Mapping[str, Component],
        components: Components,
        host: HostTier,
        *,
        is_loaded: Callable[[str], bool],
        settled: Callable[[Stage, Any], None],
        watch: Watch,
    ) -> None:
        self.settings = settings
        self.queue = ComponentQueue(policies.window_s)
        self.memory = Memory(settings.name, settings.memory_bytes)
        self.shelf = Shelf(
            settings.name,
            self.memory,
            settings.shelf_bytes,
            policies.evict,
            components,
            self._outlook,
        )
        self._catalog = catalog
        self._components = components
        self._host = host
        self._is_loaded = is_loaded
        self._settled = settled
        self._watch = watch
        self._prefetch = policies.prefetch
        self._loop = asyncio.get_running_loop()
        self._came = asyncio.Event()
        self._look_ahead = asyncio.Event()
        self._changing = asyncio.Lock()
        self._running: Sequence[Stage] = ()
        self._busy_until_s = 0.0

    def view(self, component: Component, now_s: float) -> QueueView:
        """What its queue is predicted to take, and how much longer with a request for
        `component`."""
        costs, load_s, read_s = self._costs(component)
        added_s = costs.added_seconds(load_s, joins=self.queue.joins(component.name, now_s))
        seconds = self.queue.seconds + max(0.0, self._busy_until_s - now_s)
        return QueueView(seconds, added_s, self.queue.read_seconds, read_s)

    def add(self, stage: Stage) -> None:
        """Queue it."""
        if self.queue.add(stage, *self._costs(self._catalog[stage.component])):
            self._look_ahead.set()
        self._came.set()

    def _costs(self, component: Component) -> tuple[Costs, float, float]:
        """Its costs, and the seconds for a load and of the disk, 0 where a further request needs no
        further switch.
        """
        costs = self.settings.costs[component.architecture]
        tier = self._host.tier(component.name)
        if component.name in self.shelf or self.queue.waits_for(component.name):
            return costs, 0.0, 0.0
        return costs, costs.load_s(tier), costs.read_s(tier)

    def withdraw(self, request_id: str) -> None:
        """The request waits no longer; if it runs, its batch goes on without it."""
        if request_id in self.queue:
            self.queue.remove(request_id)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._serve(), name=f"{self.settings.name} serves")
            if self._prefetch:
                tasks.create_task(self._load_ahead(), name=f"{self.settings.name} loads ahead")

    async def bring(
        self, component: Component, *, ahead_of: int | None = None, announce: bool = True
    ) -> bool:
        """Load `component` if it is not here. False where it does not fit for now, which happens
        only with `ahead_of`.

        That is the turn it is needed for: it evicts none whose turn comes before. Raises
        ComponentFailed.
        """
        if (
            component.name in self.shelf
        ):  # without the lock: what is here can run while another is loaded
            return True
        async with self._changing:
            if component.name in self.shelf:
                return True
            while self.shelf.free_bytes < component.memory_bytes:  # a batch may take what was freed
                if not await self.shelf.make_room(component, ahead_of):
                    return False
            begin_s = self._loop.time()
            try:
                tier = await self._load(component)
            except Exception as error:
                raise _failed(
                    f"{component.name} could not be loaded on {self.settings.name}", error
                ) from error
            self.queue.switched(component.name)
            if announce:
                now_s = self._loop.time()
                self._watch(
                    Switched(
                        self.settings.name,
                        component.name,
                        tier,
                        ahead_of is not None,
                        begin_s,
                        now_s,
                    )
                )
            return True

    async def _load(self, component: Component) -> Tier:
        """Load it into free memory, which no batch takes while the component is read."""
        with ExitStack() as kept:
            self.memory.reserve(component.memory_bytes)
            kept.callback(self.memory.release, component.memory_bytes)
            async with self._host.through(component) as tier:
                kept.close()
                await self.shelf.load(component)
                return tier

    async def _serve(self) -> None:
        while True:
            group = self.queue.first
            if group is None:
                self._came.clear()
                await self._came.wait()
                continue
            component = self._catalog[group.component]
            try:
                await self.bring(component)
                await self._run_first(component)
            except ComponentFailed as error:
                self._give_up(component.name, error)

    async def _run_first(self, component: Component) -> None:
        """One batch of the first group, if it is still for this component: its requests may have
        been withdrawn.
        """
        costs = self.settings.costs[component.architecture]
        with self.shelf.pinned(component.name):
            if self.memory.free_bytes < costs.activation_bytes:
                async with self._changing:
                    await self.shelf.free(costs.activation_bytes - self.memory.free_bytes)
            group = self.queue.first
            if group is None or group.component != component.name:
                return
            # what was profiled, or what fits into memory if that is less (section 4.2, splitting)
            each = costs.activation_bytes
            if each:
                most = min(costs.largest_batch, self.memory.free_bytes // each)
            else:
                most = costs.largest_batch
            stages = self.queue.take(max(1, most))
            samples_bytes = each * len(stages)
            self.memory.reserve(samples_bytes)
            self._running = stages
            self._look_ahead.set()
            try:
                await self._run(component, stages, costs.batch_seconds(len(stages)))
            finally:
                self._running = ()
                self.memory.release(samples_bytes)

    async def _run(self, component: Component, stages: Sequence[Stage], predicted_s: float) -> None:
        begin_s = self._loop.time()
        self._busy_until_s = begin_s + predicted_s
        try:
            outputs = await self._components.run(
                component, self.settings.name, [stage.sample for stage in stages]
            )
            pairs = list(zip(stages, outputs, strict=True))
        except Exception as error:
            failure = _failed(
                f"{component.name} failed on a batch of {len(stages)} on {self.settings.name}",
                error,
            )
            failure.__cause__ = error
            pairs = [(stage, failure) for stage in stages]
        else:
            self._watch(
                Served(self.settings.name, component.name, len(stages), begin_s, self._loop.time())
            )
        for stage, output in pairs:
            self._settled(stage, output)

    async def _load_ahead(self) -> None:
        """While a batch runs, load what is needed next."""
        while True:
            await self._look_ahead.wait()
            self._look_ahead.clear()
            while self._running:
                groups = islice(self.queue.groups, self._prefetch)
                known = (
                    then
                    for then in self._following()
                    if not self._is_loaded(then) and self.settings.takes(self._catalog[then])
                )
                ahead = next_to_load(groups, self.shelf.__contains__, known)
                if ahead is None:
                    break
                name, turn = ahead
                try:
                    if not await self.bring(self._catalog[name], ahead_of=turn):
                        break
                except ComponentFailed as error:
                    self._give_up(name, error)
                    break

    def _following(self) -> Iterator[str]:
        """Components that follow on what runs, unless its answers end it."""
        return filter(None, (stage.request.after(stage.component) for stage in self._running))

    def _give_up(self, name: str, error: ComponentFailed) -> None:
        """Fail all requests that wait for it."""
        log.error("%s", error)
        stages = [
            stage
            for group in self.queue.groups
            if group.component == name
            for stage in group.stages.values()
        ]
        self._watch(GaveUp(self.settings.name, name, len(stages), self._loop.time(), error))
        for stage in stages:
            self.queue.remove(stage.request.id)
            self._settled(stage, error)

    def _outlook(self, components: list[Component]) -> list[tuple[int | None, bool]]:
        waited_for = {**dict.fromkeys(self._following(), REACH), **turns(self.queue.groups)}
        return [
            (waited_for.get(one.name), bool(one.after) and not any(map(self._is_loaded, one.after)))
            for one in components
        ]


def _failed(what: str, error: Exception) -> ComponentFailed:
    return ComponentFailed(
        f"{what}: {error or type(error).__name__}.",
        remedy="Check its file, or take the component out of the pool.",
    )
