"""A workload of many experts on few workers, and a plan for it (MOSAIC, section 4.1).

Workers are alike; each holds one model at a time and runs its sessions one after the other. A session loads one expert
and has it answer some of its prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, NoReturn

from shell_router.errors import ConfigError

OPTIMAL_GAP = 1e-4
"""A plan that can be shorter by no more than this share of it counts as optimal, as with most integer programming."""
MOST_PROMPTS = 10_000_000
MOST_PLACES = 100_000
"""Experts times workers."""
SHORTEST_S, LONGEST_S = 1e-9, 1e9


@dataclass(frozen=True, slots=True)
class Expert:
    """A model with `prompts` to answer (N_m). Times are in seconds.

    A session of x prompts takes `load_s` + `fixed_s` + x * `per_prompt_s`. The paper's cost is `load_s` = l_m,
    `fixed_s` = 0 and `per_prompt_s` = tau_m (equation 3); with `fixed_s` above 0 a small session costs more per prompt
    (its Observation 3). `most_workers` caps the workers that load it; None takes equation 8.
    """

    name: str
    prompts: int
    load_s: float
    per_prompt_s: float
    fixed_s: float = 0.0
    most_workers: int | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise ConfigError(f"An expert is named {self.name!r}", remedy="Give it a name of printable characters.")
        if not 0 <= self.prompts <= MOST_PROMPTS:
            self._refuse("prompts", f"Give a number from 0 to {MOST_PROMPTS}.")
        for field in ("load_s", "per_prompt_s", "fixed_s"):
            if getattr(self, field) != 0 and not SHORTEST_S <= getattr(self, field) <= LONGEST_S:
                self._refuse(field, f"Give 0, or seconds from {SHORTEST_S:g} to {LONGEST_S:g}.")
        if self.most_workers is not None and self.most_workers < 1:
            self._refuse("most_workers", "Give 1 or more.")

    def _refuse(self, field: str, remedy: str) -> NoReturn:
        raise ConfigError(f"Expert {self.name!r} has {field} {getattr(self, field)}", remedy=remedy)

    def session_s(self, prompts: int) -> float:
        """How long a session of so many prompts takes, its load included."""
        return self.load_s + self.fixed_s + prompts * self.per_prompt_s

    def fitting(self, seconds: float) -> int:
        """How many of its prompts a session of at most so long can answer."""
        left_s = seconds - self.session_s(0)
        if left_s < 0:
            return 0
        return self.prompts if left_s >= self.prompts * self.per_prompt_s else int(left_s / self.per_prompt_s)

    def replicas(self, workers: int) -> int:
        """Most workers that may load it: `most_workers`, or clamp(1, floor(T_m / l_m), workers) (equation 8)."""
        if self.most_workers is not None:
            return min(self.most_workers, workers)
        running_s = self.fixed_s + self.prompts * self.per_prompt_s
        return workers if self.load_s * workers <= running_s else max(1, int(running_s / self.load_s))


@dataclass(frozen=True, slots=True)
class Workload:
    """Experts to run on `workers` alike, each of which loads at most `capacity` of them (K in equation 9).

    Raises ConfigError where no plan can exist.
    """

    experts: tuple[Expert, ...]
    workers: int
    capacity: int

    def __post_init__(self) -> None:
        names = [expert.name for expert in self.experts]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"Two experts are named {twice!r}", remedy="Give each a name of its own.")
        if self.workers < 1 or self.capacity < 1:
            raise ConfigError(
                f"{self.workers} workers of {self.capacity} experts each cannot run anything", remedy="Give 1 or more."
            )
        if self.workers * max(1, len(self.experts)) > MOST_PLACES:
            raise ConfigError(
                f"{len(self.experts)} experts on {self.workers} workers are too many to plan",
                remedy=f"Split the workload: experts times workers may be {MOST_PLACES}.",
            )
        if len(self.asked) > self.workers * self.capacity:
            raise ConfigError(
                f"{len(self.asked)} experts do not fit on {self.workers} workers that load {self.capacity} each",
                remedy=f"Raise the capacity to {-(-len(self.asked) // self.workers)}, "
                f"or the workers to {-(-len(self.asked) // self.capacity)}.",
            )

    @property
    def asked(self) -> tuple[Expert, ...]:
        """The experts that have prompts; the others are not loaded."""
        return tuple(expert for expert in self.experts if expert.prompts)


@dataclass(frozen=True, slots=True)
class Session:
    """`expert` answers `prompts` prompts on `worker`, from `begin_s` to `end_s`, its load included."""

    worker: int
    expert: str
    prompts: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Sessions by worker and time. No plan that keeps the workload's limits is shorter than `bound_s`."""

    method: str
    sessions: tuple[Session, ...]
    bound_s: float

    @property
    def makespan_s(self) -> float:
        """When the last worker is done (equation 1)."""
        return max((session.end_s for session in self.sessions), default=0.0)

    @property
    def gap(self) -> float:
        """How much shorter than this plan the best may be, as a share of it."""
        return max(0.0, 1 - self.bound_s / self.makespan_s) if self.makespan_s else 0.0

    @property
    def optimal(self) -> bool:
        """Whether no other plan is shorter by more than `OPTIMAL_GAP`."""
        return self.gap <= OPTIMAL_GAP

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON-like values."""
        return {
            "method": self.method,
            "makespan_s": self.makespan_s,
            "bound_s": self.bound_s,
            "gap": self.gap,
            "sessions": [asdict(session) for session in self.sessions],
        }


Shares = Sequence[Mapping[str, int]]
"""Per worker, the prompts of each expert that it loads."""


def sessions_of(workload: Workload, shares: Shares) -> tuple[Session, ...]:
    """One session after the other on every worker, the longest first, so that what fails late costs little."""
    experts = {expert.name: expert for expert in workload.experts}
    sessions = []
    for worker, share in enumerate(shares):
        now_s = 0.0
        for name, prompts in sorted(share.items(), key=lambda item: (-experts[item[0]].session_s(item[1]), item[0])):
            end_s = now_s + experts[name].session_s(prompts)
            sessions.append(Session(worker, name, prompts, now_s, end_s))
            now_s = end_s
    return tuple(sessions)


def shares_of(workload: Workload, plan: Plan) -> Shares:
    """What `sessions_of` was given."""
    by_worker = {
        worker: {session.expert: session.prompts for session in sessions}
        for worker, sessions in groupby(plan.sessions, key=lambda session: session.worker)
    }
    return [by_worker.get(worker, {}) for worker in range(workload.workers)]


def work_bound_s(workload: Workload) -> float:
    """A bound on every makespan: each expert is loaded once at least, and all work is spread evenly."""
    return sum(expert.session_s(expert.prompts) for expert in workload.asked) / workload.workers
