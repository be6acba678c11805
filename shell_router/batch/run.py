"""A whole batch: proposers planned and run, then the gate, then the aggregator where they do not agree."""

import asyncio
import logging
import pickle
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from shell_router.batch.journal import Journal, Output, Role
from shell_router.batch.planner import ModelWork, Plan, Session, Workload
from shell_router.batch.profile import Load, PoolProfile
from shell_router.batch.prompts import Batch, Prompt
from shell_router.batch.queues import WorkerQueues
from shell_router.batch.results import Result, results_of
from shell_router.batch.sessions import Clock, Sessions, Workers, ungrouped
from shell_router.errors import ConfigError
from shell_router.launching.with_parent import with_parent

log = logging.getLogger(__name__)

Planner = Callable[[Workload], Plan | Awaitable[Plan]]
"""One that is no coroutine holds up the event loop while it plans."""


@dataclass(frozen=True, slots=True)
class Rig:
    """What a batch runs on: the pool's workers, what its models cost there, and monotonic seconds."""

    workers: Workers
    profile: PoolProfile
    clock: Clock


@dataclass(frozen=True, slots=True)
class Stage:
    """The proposers' sessions, or the aggregator's: as planned, and as they were."""

    role: Role
    plan: Plan
    sessions: tuple[Session, ...] = ()

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

    def on_progress(self, line: str) -> None:
        """Something happened that a person may want to read."""
        log.info("%s", line)


async def run_batch(batch: Batch, rig: Rig, journal: Journal, planner: Planner, follow: Follow) -> Finished:
    """Ask what the journal lacks, and return what came of everything.

    Afterwards the journal holds an output or an error of every proposer for every question, and of the aggregator for
    those that do not pass the gate. Raises ConfigError where there is no plan, or no more can be written down.
    """
    pool = batch.pool

    async def stage(role: Role, prompts: Sequence[Prompt], capacity: int) -> Stage:
        asked: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            if journal.lacks(prompt.key):
                asked.setdefault(prompt.model, []).append(prompt)
        count = len(pool.workers)
        models = tuple(_cost(rig.profile, role, model, len(its), count) for model, its in asked.items())
        # the proposers have started the engines
        starts_s = (rig.profile.first_s, rig.profile.together_s) if role == "proposer" else ()
        planning = planner(Workload(models, count, capacity, *starts_s))
        plan = planning if isinstance(planning, Plan) else await planning
        queues = WorkerQueues(models, asked, plan, count)
        sessions = Sessions(
            queues, rig.workers, note, follow.on_progress, follow.on_load, concurrency=pool.concurrency, clock=rig.clock
        )
        follow.on_stage(Stage(role, plan), sessions)
        return Stage(role, plan, await ungrouped(sessions.run()))

    def note(output: Output) -> None:
        journal.add(output)
        follow.on_output(output)

    stages = [await stage("proposer", batch.proposer_prompts(), pool.capacity or len(pool.proposer_names))]
    if pool.aggregate is not None:
        stages.append(await stage("aggregator", batch.aggregator_prompts(journal.get), 1))
    return Finished(results_of(batch, journal.get), stages)


def _cost(profile: PoolProfile, role: Role, model: str, prompts: int, workers: int) -> ModelWork:
    if role == "proposer":
        return profile.cost(model, prompts)
    if profile.aggregator is None:
        raise ConfigError("The profile has no aggregator.", remedy="Run shell-router batch profile again.")
    # MOSAIC runs it on all GPUs (section 5.3); equation 8 would spare loads that nothing else waits for
    return replace(profile.aggregator.cost(model, prompts), most_workers=workers)


async def plan_apart(workload: Workload, limit_s: float = 10.0) -> Plan:
    """`planner.plan` in a process of its own, which ends with the caller: it would hold up an event loop for seconds.

    Raises ConfigError.
    """
    command = with_parent((sys.executable, "-c", "from shell_router.batch.planner import answer; answer()"))
    child = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        answered, _ = await child.communicate(pickle.dumps((workload, limit_s)))
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        raise ConfigError(f"The planner ended with status {child.returncode}.", remedy="Look at what it printed.")
    found: Plan | ConfigError = pickle.loads(answered)
    if isinstance(found, ConfigError):
        raise found
    return found
