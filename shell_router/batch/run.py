"""A whole batch: experts planned and run, then the gate, then the aggregator where they do not agree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shell_router.batch.answering import Prompt
from shell_router.batch.asking import Batch
from shell_router.batch.journal import Journal, Output, Role
from shell_router.batch.likeness import compared
from shell_router.batch.plan import Expert, Plan, Session, Workload
from shell_router.batch.profile import PoolProfile
from shell_router.batch.sessions import Sessions, Watch, Workers
from shell_router.batch.ungrouped import ungrouped
from shell_router.core.embedding import Embedder
from shell_router.errors import ConfigError

Planner = Callable[[Workload], Plan]


@dataclass(frozen=True, slots=True)
class Rig:
    """What it runs on: `places` workers, each of which loads at most `capacity` models, and answers `at_once` prompts.

    `clock` is monotonic seconds. A gate that judges by similarity needs the `embedder`.
    """

    workers: Workers
    places: int
    capacity: int
    at_once: int
    profile: PoolProfile
    clock: Callable[[], float]
    embedder: Embedder | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """The experts' sessions, or the aggregator's: as planned, and as they were."""

    role: Role
    plan: Plan
    sessions: tuple[Session, ...] = ()

    @property
    def measured(self) -> Plan:
        """The sessions that were run, as a plan, so that they can be drawn and told in the same way."""
        return Plan(f"{self.plan.method}, measured", self.sessions, 0.0)


@dataclass(frozen=True, slots=True)
class Follow:
    """Told of each stage that is planned, with its sessions before they run; of each output; and of each step."""

    stage: Callable[[Stage, Sessions], None]
    output: Callable[[Output], None]
    tell: Callable[[str], None]


async def run_batch(
    batch: Batch, rig: Rig, journal: Journal, planner: Planner, follow: Follow
) -> tuple[Batch, list[Stage]]:
    """Ask what the journal lacks, and return the batch as the gate saw it, and the stages as they were.

    Afterwards the journal holds an output or an error of every expert for every question, and of the aggregator for
    those that do not pass the gate. Raises ConfigError where there is no plan, or no more can be written down, and
    EngineError where the embedder fails.
    """
    run = _Run(rig, journal, planner, follow)
    stages = [await run.stage("expert", batch.expert_prompts(), rig.capacity)]
    batch = await compared(batch, journal.get, rig.embedder)
    if batch.aggregating is not None:
        stages.append(await run.stage("aggregator", batch.aggregator_prompts(journal.get), 1))
    return batch, stages


@dataclass(frozen=True, slots=True)
class _Run:
    rig: Rig
    journal: Journal
    planner: Planner
    follow: Follow

    async def stage(self, role: Role, prompts: Sequence[Prompt], capacity: int) -> Stage:
        """Plan and run what the journal lacks of these prompts."""
        wanted: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            if self.journal.lacks(prompt.key):
                wanted.setdefault(prompt.model, []).append(prompt)
        experts = tuple(self._cost(role, model, len(asked)) for model, asked in wanted.items())
        plan = self.planner(Workload(experts, self.rig.places, capacity))
        measured: list[Session] = []
        watch = Watch(self._note, measured.append, self.follow.tell)
        sessions = Sessions(experts, wanted, self.rig.workers, watch, at_once=self.rig.at_once, clock=self.rig.clock)
        self.follow.stage(Stage(role, plan), sessions)
        await ungrouped(sessions.run(plan, self.rig.places))
        return Stage(role, plan, tuple(sorted(measured, key=lambda one: (one.worker, one.begin_s))))

    def _cost(self, role: Role, model: str, prompts: int) -> Expert:
        profile = self.rig.profile
        if role == "expert":
            return profile.cost(model, prompts)
        if profile.aggregator is None:
            raise ConfigError("The profile has no aggregator.", remedy="Run shell-router batch profile again.")
        # MOSAIC runs it on all GPUs (section 5.3); equation 8 would spare loads that nothing else waits for
        return replace(profile.aggregator.cost(model, prompts), most_workers=self.rig.places)

    def _note(self, output: Output) -> None:
        self.journal.add(output)
        self.follow.output(output)
