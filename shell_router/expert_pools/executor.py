"""One executor: a queue, a memory, and a loop that serves the one out of the other."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any

from shell_router.errors import ExpertError, ExpertFailed
from shell_router.expert_pools.assigning import QueueView, added_seconds
from shell_router.expert_pools.events import GaveUp, Served, Switched, Watch
from shell_router.expert_pools.evicting import is_idle
from shell_router.expert_pools.experts import Experts
from shell_router.expert_pools.foresight import REACH, next_to_load, turns
from shell_router.expert_pools.host import HostTier
from shell_router.expert_pools.memory import Memory
from shell_router.expert_pools.policies import Policies
from shell_router.expert_pools.shelf import Shelf
from shell_router.expert_pools.values import ExecutorSettings, Expert, Stage, Tier
from shell_router.expert_pools.waiting import WaitingLine

log = logging.getLogger(__name__)
BATCH, COMING = "the batch at hand", "the expert that is coming"


class Executor:
    """Serves the stages that are added to it; `answered` and `failed` are told what became of each."""

    def __init__(
        self,
        settings: ExecutorSettings,
        policies: Policies,
        catalogue: Callable[[str], Expert],
        experts: Experts,
        host: HostTier,
        *,
        is_loaded: Callable[[str], bool],
        answered: Callable[[Stage, Any], None],
        failed: Callable[[Stage, ExpertError], None],
        watch: Watch,
    ) -> None:
        self.settings = settings
        self.line = WaitingLine(policies.window_s)
        self.memory = Memory(settings.name, settings.memory_bytes)
        self.shelf = Shelf(settings.name, self.memory, settings.shelf_bytes, policies.evict, experts, self._outlook)
        self._catalogue = catalogue
        self._experts = experts
        self._host = host
        self._is_loaded = is_loaded
        self._answered = answered
        self._failed = failed
        self._watch = watch
        self._prefetch = policies.prefetch
        self._loop = asyncio.get_running_loop()
        self._came = asyncio.Event()
        self._look_ahead = asyncio.Event()
        self._running: Sequence[Stage] = ()
        self._busy_until_s = 0.0

    def view(self, expert: Expert, now_s: float) -> QueueView:
        """What its queue is predicted to take, and how much longer with a request for `expert`."""
        costs = self.settings.costs[expert.architecture]
        tier, here = self._host.tier(expert.name), self._is_coming(expert.name)
        added_s = added_seconds(
            sample_s=costs.sample_s,
            batch_s=costs.batch_s,
            load_s=costs.load_s(tier),
            joins=self.line.joins(expert.name, now_s),
            here=here,
        )
        seconds = self.line.seconds + max(0.0, self._busy_until_s - now_s)
        return QueueView(seconds, added_s, self.line.read_seconds, 0.0 if here else costs.read_s(tier))

    def add(self, stage: Stage) -> None:
        """Into the queue."""
        expert = self._catalogue(stage.expert)
        costs = self.settings.costs[expert.architecture]
        tier, here = self._host.tier(expert.name), self._is_coming(expert.name)
        if self.line.add(stage, costs, 0.0 if here else costs.load_s(tier), 0.0 if here else costs.read_s(tier)):
            self._look_ahead.set()
        self._came.set()

    def withdraw(self, request_id: str) -> None:
        """The request waits no longer; if it runs, its batch goes on without anybody to tell."""
        if request_id in self.line:
            self.line.remove(request_id)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._serve(), name=f"{self.settings.name} serves")
            if self._prefetch:
                tasks.create_task(self._load_ahead(), name=f"{self.settings.name} loads ahead")

    async def bring(self, expert: Expert, *, ahead_of: int | None = None, told: bool = True) -> bool:
        """Load `expert` if it is not here. False where it finds no room for now, which happens only with `ahead_of`.

        That is the turn it is needed for: it takes no room from those whose turn comes before. Raises ExpertFailed.
        """
        if expert.name in self.shelf:  # whatever else is being loaded: what is here can run meanwhile
            return True
        async with self.shelf.lock:
            if expert.name in self.shelf:
                return True
            if not await self._has_room(expert, ahead_of):
                return False
            begin_s = self._loop.time()
            try:
                tier = await self._load(expert)
            except Exception as error:
                raise _failed(f"{expert.name} could not be loaded on {self.settings.name}", error) from error
            self.line.switched(expert.name)
            if told:
                now_s = self._loop.time()
                self._watch(Switched(self.settings.name, expert.name, tier, ahead_of is not None, begin_s, now_s))
            return True

    async def _has_room(self, expert: Expert, ahead_of: int | None) -> bool:
        """Make room, again where a batch has taken what was freed for it."""
        while self.shelf.room_bytes < expert.memory_bytes:
            if not await self.shelf.make_room(expert, ahead_of):
                return False
        return True

    async def _load(self, expert: Expert) -> Tier:
        """Into room that there is, and that no batch takes while the expert is read."""
        with ExitStack() as kept:
            self.memory.reserve(COMING, expert.memory_bytes)
            kept.callback(self.memory.release, COMING)
            async with self._host.through(expert) as tier:
                kept.close()
                await self.shelf.load(expert)
                return tier

    async def _serve(self) -> None:
        while True:
            group = self.line.first
            if group is None:
                self._came.clear()
                await self._came.wait()
                continue
            expert = self._catalogue(group.expert)
            try:
                await self.bring(expert)
                await self._run_first(expert)
            except ExpertFailed as error:
                self._give_up(expert.name, error)

    async def _run_first(self, expert: Expert) -> None:
        """One batch of the first group, if it is still for this expert: those who waited for it may have left."""
        costs = self.settings.costs[expert.architecture]
        with self.shelf.pinned(expert.name):
            if self.memory.free_bytes < costs.activation_bytes:
                async with self.shelf.lock:
                    await self.shelf.free(costs.activation_bytes - self.memory.free_bytes)
            group = self.line.first
            if group is None or group.expert != expert.name:
                return
            stages = self.line.take(largest_batch(costs.largest_batch, costs.activation_bytes, self.memory))
            self.memory.reserve(BATCH, costs.activation_bytes * len(stages))
            self._running = stages
            self._look_ahead.set()
            try:
                await self._run(expert, stages, costs.batch_seconds(len(stages)))
            finally:
                self._running = ()
                self.memory.release(BATCH)

    async def _run(self, expert: Expert, stages: Sequence[Stage], predicted_s: float) -> None:
        begin_s = self._loop.time()
        self._busy_until_s = begin_s + predicted_s
        try:
            outputs = await self._experts.run(expert, self.settings.name, [stage.sample for stage in stages])
            pairs = list(zip(stages, outputs, strict=True))
        except Exception as error:
            failure = _failed(f"{expert.name} failed on a batch of {len(stages)} on {self.settings.name}", error)
            failure.__cause__ = error
            for stage in stages:
                self._failed(stage, failure)
            return
        self._watch(Served(self.settings.name, expert.name, len(stages), begin_s, self._loop.time()))
        for stage, output in pairs:
            if isinstance(output, ExpertError):
                self._failed(stage, output)
            else:
                self._answered(stage, output)

    async def _load_ahead(self) -> None:
        """While a batch runs, load what is needed next."""
        while True:
            await self._look_ahead.wait()
            self._look_ahead.clear()
            while self._running:
                ahead = next_to_load(islice(self.line.groups, self._prefetch), self.shelf.__contains__, self._known())
                if ahead is None:
                    break
                try:
                    if not await self.bring(self._catalogue(ahead.expert), ahead_of=ahead.turn):
                        break
                except ExpertFailed as error:
                    self._give_up(ahead.expert, error)
                    break

    def _following(self) -> Iterator[str]:
        """Experts that follow on what runs, unless its answers end it."""
        return filter(None, (stage.request.after(stage.expert) for stage in self._running))

    def _known(self) -> Iterator[str]:
        """Those of them that are loaded nowhere."""
        for then in self._following():
            if not self._is_loaded(then) and self.settings.takes(self._catalogue(then)):
                yield then

    def _is_coming(self, name: str) -> bool:
        """Whether a further request for it needs no further switch."""
        return name in self.shelf or self.line.waits_for(name)

    def _give_up(self, name: str, error: ExpertFailed) -> None:
        """Nobody waits for it any longer."""
        log.error("%s", error)
        groups = [group.stages.values() for group in self.line.groups if group.expert == name]
        stages = list(chain.from_iterable(groups))
        self._watch(GaveUp(self.settings.name, name, len(stages), self._loop.time(), error))
        for stage in stages:
            self.line.remove(stage.request.id)
            self._failed(stage, error)

    def _outlook(self, experts: list[Expert]) -> list[tuple[int | None, bool]]:
        waited_for = {**dict.fromkeys(self._following(), REACH), **turns(self.line.groups)}
        return [(waited_for.get(expert.name), is_idle(expert, self._is_loaded)) for expert in experts]


def largest_batch(profiled: int, activation_bytes: int, memory: Memory) -> int:
    """The current maximum: what was profiled, or what memory has room for if that is less (section 4.2, splitting)."""
    return max(1, min(profiled, memory.free_bytes // activation_bytes if activation_bytes else profiled))


def _failed(what: str, error: Exception) -> ExpertFailed:
    return ExpertFailed(
        f"{what}: {error or type(error).__name__}.", remedy="Check its file, or take the expert out of the pool."
    )
