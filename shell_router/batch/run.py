"""A whole batch: the proposers, the gate, and the aggregator where the proposers disagree."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from shell_router.batch.api.storage import on_disk
from shell_router.batch.journal import Journal, Output, Role
from shell_router.batch.planner import SEARCHERS, BatchPlan, ModelWork, Session, Workload
from shell_router.batch.profile import PoolProfile
from shell_router.batch.prompts import Batch, BatchPrompt, Result, build_results
from shell_router.batch.queues import WorkerQueues
from shell_router.batch.sessions import (
    Clock,
    Follow,
    Planner,
    Replanning,
    Sessions,
    Spanning,
    Stage,
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
class BatchReport:
    """The outcome of a batch: one result per line, and the stages as planned and as run."""

    results: list[Result]
    stages: Sequence[Stage]


class _Writer:
    """A writer of outputs in order of arrival; those that arrive during a write share the next."""

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


@dataclass(slots=True)
class PoolRun:
    """A run of a batch: its stages share the workers, the journal and the follower.

    `clock` is monotonic seconds.
    """

    batch: Batch
    workers: Workers
    profile: PoolProfile
    journal: Journal
    planner: Planner
    follow: Follow
    clock: Clock

    async def run(self) -> BatchReport:
        """Answer the prompts that the journal lacks, until each has an output or an error there.

        The aggregator answers the questions that do not pass the gate. Raises ConfigError if there
        is no plan, or the journal cannot be written.
        """
        writer = _Writer(self.journal, self.follow)
        try:
            stages = [await self._run_proposers(writer)]
            if self.batch.pool.aggregate is not None:
                stages.append(await self._run_aggregator(writer, stages[0].sessions))
        finally:  # a cancelled run may leave outputs that are not written yet
            with suppress(ConfigError):
                await writer.flush()
        results = await asyncio.to_thread(build_results, self.batch, self.journal.get)
        return BatchReport(results, stages)

    async def _run_proposers(self, writer: _Writer) -> Stage:
        prompts = await asyncio.to_thread(self._list_missing, self.batch.proposer_prompts)
        profile = self.profile
        models = tuple(profile.cost(name, len(its)) for name, its in prompts.items())
        capacity = self.batch.pool.capacity or len(self.batch.pool.proposer_names)
        workers = len(self.batch.pool.workers)
        workload = Workload(models, workers, capacity, profile.first_s, profile.together_s)
        return await self._run_stage("proposer", workload, prompts, self.workers, writer)

    async def _run_aggregator(self, writer: _Writer, before: Sequence[Session]) -> Stage:
        """Run the aggregator after the sessions `before`, which have started the engines."""
        build = partial(self.batch.aggregator_prompts, self.journal.get)
        prompts = await asyncio.to_thread(self._list_missing, build)
        pool = self.batch.pool
        workers = self.workers
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
        return await self._run_stage("aggregator", workload, prompts, workers, writer)

    async def _run_stage(
        self,
        role: Role,
        workload: Workload,
        prompts: Mapping[str, Sequence[BatchPrompt]],
        workers: Workers,
        writer: _Writer,
    ) -> Stage:
        """Plan a stage and run its sessions."""
        pool = self.batch.pool
        plan = await make_plan(self.planner, workload)
        replanning = None
        if pool.replan_above:
            replanning = Replanning(
                self.planner, workload.capacity, pool.replan_above, workload.first_s
            )
        # one worker that spans all engines takes as many prompts at once as all of them
        concurrency = pool.concurrency * len(pool.workers) // workload.workers
        sessions = Sessions(
            WorkerQueues(workload.models, prompts, plan, workload.workers),
            workers,
            writer.write,
            self.follow,
            concurrency,
            self.clock,
            replanning,
        )
        self.follow.on_stage(Stage(role, plan), sessions)
        ended = await unwrap_errors(sessions.run())
        return Stage(role, plan, ended, sessions.moved)

    def _list_missing(self, build: Callable[[], list[BatchPrompt]]) -> dict[str, list[BatchPrompt]]:
        """Return the prompts without an output, by model."""
        missing: dict[str, list[BatchPrompt]] = {}
        for prompt in build():
            if self.journal.lacks(prompt.key):
                missing.setdefault(prompt.model, []).append(prompt)
        return missing

    def _aggregator_cost(self, model: str, prompts: int, workers: int) -> ModelWork:
        if self.profile.aggregator is None:
            raise ConfigError(
                "The profile has no aggregator.", remedy="Run shell-router batch profile again."
            )
        # MOSAIC runs the aggregator on all GPUs (section 5.3). Equation 8 would use fewer to save
        # loads, for which no other model waits
        return replace(self.profile.aggregator.cost(model, prompts), most_workers=workers)


async def plan_apart(workload: Workload, limit_s: float = 10.0) -> BatchPlan:
    """Run `planner.plan` in a process of its own: it would block an event loop for seconds.

    Raises:
        ConfigError: There is no plan.
        EngineError: The process fails.
    """
    process = WorkerProcess(
        "planner",
        "shell_router.batch.planner:planner_work",
        {},
        threads=SEARCHERS,
        limits=WorkerLimits(answer_s=QUICK_PLAN_S + limit_s),
    )
    async with process:
        outcome: BatchPlan | ConfigError = await process.ask((workload, limit_s))
    if isinstance(outcome, ConfigError):
        raise outcome
    return outcome
