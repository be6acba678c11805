"""A whole batch: the proposers, the gate, and the aggregator where the proposers disagree."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from shell_router.batch.api.storage import on_disk
from shell_router.batch.journal import Journal, Output, Role
from shell_router.batch.planner import SEARCHERS, ModelWork, Plan, Session, Workload
from shell_router.batch.profile import Load, PoolProfile
from shell_router.batch.prompts import Batch, Prompt, Result, build_results
from shell_router.batch.queues import WorkerQueues
from shell_router.batch.sessions import (
    Clock,
    Move,
    Planner,
    Replanning,
    Sessions,
    Spanning,
    Workers,
    make_plan,
    unwrap_errors,
)
from shell_router.errors import ConfigError
from shell_router.processes.worker import WorkerLimits, WorkerProcess

log = logging.getLogger(__name__)

QUICK_PLAN_S = 600.0
"""The most seconds of the heuristic plan that the solver starts from."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The sessions of the proposers or the aggregator, as planned and as they were."""

    role: Role
    plan: Plan
    sessions: tuple[Session, ...] = ()
    moved: Mapping[Move, int] = field(default_factory=dict)
    """How many prompts left their planned workers."""

    @property
    def measured(self) -> Plan:
        """The sessions as they were, in the form of a plan."""
        return Plan(f"{self.plan.method}, measured", self.sessions, 0.0)


@dataclass(frozen=True, slots=True)
class BatchReport:
    """The outcome of a batch: one result per line, and the stages as planned and as run."""

    results: list[Result]
    stages: Sequence[Stage]


class Follow:
    """A follower that a batch calls as it goes on; this one logs lines of text."""

    def on_stage(self, stage: Stage, sessions: Sessions) -> None:
        """Take note that a stage is planned and its sessions are about to run."""

    def on_output(self, output: Output) -> None:
        """Take note that an output is on disk."""

    def on_load(self, load: Load, seconds: float) -> None:
        """Take note that a worker has loaded a model."""

    def on_move(self, why: Move, prompts: int) -> None:
        """Take note that prompts go to another worker than the plan's."""

    def on_progress(self, line: str) -> None:
        """Log a line for a person."""
        log.info("%s", line)


class _Writer:
    """A writer of outputs, in order of arrival; those that arrive during a write go together."""

    def __init__(self, journal: Journal, follow: Follow) -> None:
        self._journal = journal
        self._follow = follow
        self._writing = asyncio.Lock()
        self._waiting: list[Output] = []

    async def write(self, output: Output) -> None:
        """Return when the output is on disk. Raises ConfigError if it cannot be written."""
        self._waiting.append(output)
        await self.flush()

    async def flush(self) -> None:
        """Write all outputs that wait, also those of cancelled calls."""
        async with self._writing:
            outputs = self._waiting
            self._waiting = []
            if outputs:
                await on_disk(self._journal.add, *outputs)
            for output in outputs:
                self._follow.on_output(output)


class _BatchRun:
    """A run of a batch: its stages share the workers, the journal and the follower."""

    def __init__(
        self,
        batch: Batch,
        workers: Workers,
        profile: PoolProfile,
        journal: Journal,
        planner: Planner,
        follow: Follow,
        clock: Clock,
    ) -> None:
        self._batch = batch
        self._pool = batch.pool
        self._workers = workers
        self._profile = profile
        self._journal = journal
        self._planner = planner
        self._follow = follow
        self._clock = clock
        self._writer = _Writer(journal, follow)

    async def run(self) -> list[Stage]:
        """Run the proposers, and then the aggregator if the pool has one."""
        try:
            stages = [await self._run_proposers()]
            if self._pool.aggregate is not None:
                stages.append(await self._run_aggregator(stages[0].sessions))
        finally:  # a cancelled run may leave outputs that wait for a slow disk
            with suppress(ConfigError):
                await self._writer.flush()
        return stages

    async def _run_proposers(self) -> Stage:
        prompts = await asyncio.to_thread(self._list_missing, self._batch.proposer_prompts)
        profile = self._profile
        models = tuple(profile.cost(name, len(its)) for name, its in prompts.items())
        capacity = self._pool.capacity or len(self._pool.proposer_names)
        workers = len(self._pool.workers)
        workload = Workload(models, workers, capacity, profile.first_s, profile.together_s)
        return await self._run_stage("proposer", workload, prompts, self._workers)

    async def _run_aggregator(self, before: Sequence[Session]) -> Stage:
        """Run the aggregator after the sessions `before`, which have started the engines."""
        build = partial(self._batch.aggregator_prompts, self._journal.get)
        prompts = await asyncio.to_thread(self._list_missing, build)
        pool = self._pool
        workers = self._workers
        count = len(pool.workers)
        held: dict[int, str] = {}
        if pool.spanning is not None:
            workers = Spanning(workers)
            count = 1
        else:  # a pair still holds the model that it ran last
            for session in before:
                if pool.workers[session.worker].pair:
                    held[session.worker] = session.model
        models = tuple(
            self._aggregator_cost(name, len(its), count) for name, its in prompts.items()
        )
        holds = tuple(held.get(worker, "") for worker in range(count))
        workload = Workload(models, count, capacity=1, holds=holds)
        return await self._run_stage("aggregator", workload, prompts, workers)

    async def _run_stage(
        self,
        role: Role,
        workload: Workload,
        prompts: Mapping[str, Sequence[Prompt]],
        workers: Workers,
    ) -> Stage:
        """Plan a stage and run its sessions."""
        pool = self._pool
        plan = await make_plan(self._planner, workload)
        moved: Counter[Move] = Counter()

        def on_move(why: Move, number: int) -> None:
            moved[why] += number
            self._follow.on_move(why, number)

        replanning = None
        if pool.replan_above:
            replanning = Replanning(
                self._planner, workload.capacity, pool.replan_above, workload.first_s
            )
        # a worker that spans all has their engines' room
        concurrency = pool.concurrency * len(pool.workers) // workload.workers
        sessions = Sessions(
            WorkerQueues(workload.models, prompts, plan, workload.workers),
            workers,
            self._writer.write,
            self._follow.on_progress,
            self._follow.on_load,
            on_move,
            concurrency=concurrency,
            clock=self._clock,
            replanning=replanning,
        )
        self._follow.on_stage(Stage(role, plan), sessions)
        return Stage(role, plan, await unwrap_errors(sessions.run()), moved)

    def _list_missing(self, build: Callable[[], list[Prompt]]) -> dict[str, list[Prompt]]:
        """Return the prompts without an output, by model."""
        missing: dict[str, list[Prompt]] = {}
        for prompt in build():
            if self._journal.lacks(prompt.key):
                missing.setdefault(prompt.model, []).append(prompt)
        return missing

    def _aggregator_cost(self, model: str, prompts: int, workers: int) -> ModelWork:
        if self._profile.aggregator is None:
            raise ConfigError(
                "The profile has no aggregator.", remedy="Run shell-router batch profile again."
            )
        # MOSAIC runs it on all GPUs (section 5.3): equation 8 would save loads that no other model
        # waits for
        return replace(self._profile.aggregator.cost(model, prompts), most_workers=workers)


async def run_batch(
    batch: Batch,
    workers: Workers,
    profile: PoolProfile,
    journal: Journal,
    planner: Planner,
    follow: Follow,
    clock: Clock,
) -> BatchReport:
    """Answer what the journal lacks; afterwards each prompt has an output or an error there.

    The aggregator is asked the questions that do not pass the gate. `clock` is monotonic seconds.
    Raises ConfigError if there is no plan, or the journal cannot be written.
    """
    run = _BatchRun(batch, workers, profile, journal, planner, follow, clock)
    stages = await run.run()
    results = await asyncio.to_thread(build_results, batch, journal.get)
    return BatchReport(results, stages)


async def plan_apart(workload: Workload, limit_s: float = 10.0) -> Plan:
    """Run `planner.plan` in a process of its own: it would hold up an event loop for seconds.

    Raises ConfigError, and EngineError where the process fails.
    """
    process = WorkerProcess(
        "planner",
        "shell_router.batch.planner:planner_work",
        {},
        threads=SEARCHERS,
        limits=WorkerLimits(answer_s=QUICK_PLAN_S + limit_s),
    )
    async with process:
        outcome: Plan | ConfigError = await process.ask((workload, limit_s))
    if isinstance(outcome, ConfigError):
        raise outcome
    return outcome
