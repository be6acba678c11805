"""A whole batch: proposers planned and run, then the gate, then the aggregator where they do not
agree.
"""

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
from shell_router.batch.prompts import Batch, Prompt, Result, results_of
from shell_router.batch.queues import WorkerQueues
from shell_router.batch.sessions import (
    Clock,
    Move,
    Planner,
    Replanning,
    Sessions,
    Spanning,
    Workers,
    planned,
    ungrouped,
)
from shell_router.errors import ConfigError
from shell_router.processes.worker import WorkerLimits, WorkerProcess

log = logging.getLogger(__name__)

QUICK_PLAN_S = 600.0
"""What the plan that the solver starts from takes at most, of the largest workloads."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The proposers' sessions, or the aggregator's: as planned, and as they were."""

    role: Role
    plan: Plan
    sessions: tuple[Session, ...] = ()
    moved: Mapping[Move, int] = field(default_factory=dict)
    """Prompts that another worker answered than the plan's."""

    @property
    def measured(self) -> Plan:
        """The sessions that were run, as a plan."""
        return Plan(f"{self.plan.method}, measured", self.sessions, 0.0)


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch that has ended: one result per line, and the stages as planned and as run."""

    results: list[Result]
    stages: Sequence[Stage]


class Follow:
    """What a batch calls as it goes on; this one logs the lines of text and ignores the rest."""

    def on_stage(self, stage: Stage, sessions: Sessions) -> None:
        """A stage has been planned, and its sessions are about to run."""

    def on_output(self, output: Output) -> None:
        """An output is on disk."""

    def on_load(self, load: Load, seconds: float) -> None:
        """A worker has loaded a model."""

    def on_move(self, why: Move, prompts: int) -> None:
        """This number of prompts goes to another worker than the plan's."""

    def on_progress(self, line: str) -> None:
        """Something happened that a person may want to read."""
        log.info("%s", line)


class _Writer:
    """Writes outputs in threads, in the order in which they came; those that come meanwhile
    together.
    """

    def __init__(self, journal: Journal, follow: Follow) -> None:
        self._journal = journal
        self._follow = follow
        self._writing = asyncio.Lock()
        self._waiting: list[Output] = []

    async def write(self, output: Output) -> None:
        """Returns when it is on disk. Raises ConfigError where it cannot be."""
        self._waiting.append(output)
        await self.flush()

    async def flush(self) -> None:
        """What a cancelled call has left, too."""
        async with self._writing:
            outputs = self._waiting
            self._waiting = []
            if outputs:
                await on_disk(self._journal.add, *outputs)
            for output in outputs:
                self._follow.on_output(output)


async def run_batch(
    batch: Batch,
    workers: Workers,
    profile: PoolProfile,
    journal: Journal,
    planner: Planner,
    follow: Follow,
    clock: Clock,
) -> Finished:
    """Ask what the journal lacks, and return what came of everything. `clock` is monotonic seconds.

    Afterwards the journal holds an output or an error of every proposer for every question, and of
    the aggregator for those that do not pass the gate. Raises ConfigError where there is no plan,
    or no more can be written down.
    """
    pool = batch.pool
    writer = _Writer(journal, follow)

    async def stage(
        role: Role, made: Callable[[], list[Prompt]], capacity: int, before: Sequence[Session]
    ) -> Stage:
        asked = await asyncio.to_thread(_lacking, made, journal)
        spans = role == "aggregator" and pool.spanning is not None
        count = 1 if spans else len(pool.workers)
        models = tuple(_cost(profile, role, model, len(its), count) for model, its in asked.items())
        # the proposers have started the engines, and pairs still hold what they ran last
        first_s, together_s = (
            (profile.first_s, profile.together_s) if role == "proposer" else (0.0, 0.0)
        )
        held = {
            one.worker: one.model
            for one in (() if spans else before)
            if pool.workers[one.worker].pair
        }
        holds = tuple(held.get(worker, "") for worker in range(count))
        plan = await planned(
            planner, Workload(models, count, capacity, first_s, together_s, holds=holds)
        )
        queues = WorkerQueues(models, asked, plan, count)
        moved: Counter[Move] = Counter()

        def on_move(why: Move, number: int) -> None:
            moved[why] += number
            follow.on_move(why, number)

        sessions = Sessions(
            queues,
            Spanning(workers) if spans else workers,
            *(writer.write, follow.on_progress, follow.on_load, on_move),
            concurrency=pool.concurrency * (len(pool.workers) if spans else 1),
            clock=clock,
            replanning=Replanning(planner, capacity, pool.replan_above, first_s)
            if pool.replan_above
            else None,
        )
        follow.on_stage(Stage(role, plan), sessions)
        return Stage(role, plan, await ungrouped(sessions.run()), moved)

    try:
        stages = [
            await stage(
                "proposer", batch.proposer_prompts, pool.capacity or len(pool.proposer_names), ()
            )
        ]
        if pool.aggregate is not None:
            asked = partial(batch.aggregator_prompts, journal.get)
            stages.append(await stage("aggregator", asked, 1, stages[0].sessions))
    finally:  # cancelled, some wait for a slow disk
        with suppress(ConfigError):
            await writer.flush()
    return Finished(await asyncio.to_thread(results_of, batch, journal.get), stages)


def _lacking(made: Callable[[], list[Prompt]], journal: Journal) -> dict[str, list[Prompt]]:
    """Those of the prompts that lack an output, by model."""
    asked: dict[str, list[Prompt]] = {}
    for prompt in made():
        if journal.lacks(prompt.key):
            asked.setdefault(prompt.model, []).append(prompt)
    return asked


def _cost(profile: PoolProfile, role: Role, model: str, prompts: int, workers: int) -> ModelWork:
    if role == "proposer":
        return profile.cost(model, prompts)
    if profile.aggregator is None:
        raise ConfigError(
            "The profile has no aggregator.", remedy="Run shell-router batch profile again."
        )
    # MOSAIC runs it on all GPUs (section 5.3); equation 8 would spare loads that nothing else waits
    # for
    return replace(profile.aggregator.cost(model, prompts), most_workers=workers)


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
