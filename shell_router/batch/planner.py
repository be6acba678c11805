"""Which worker loads which models: a workload, and plans for it (MOSAIC, section 4.1).

Workers are alike; each holds one model at a time and runs its sessions one after the other. A session loads one model
and has it answer some of its prompts. Plans are quick ones, and MOSAIC's integer program (equations 4 to 10), solved by
OR-tools CP-SAT.
"""

import heapq
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import inf
from typing import Annotated, Any

from shell_router.errors import ConfigError
from shell_router.topology.forms import Number

OPTIMAL_GAP = 1e-4
"""A plan that can be shorter by no more than this share of it counts as optimal, as with most integer programming."""
MAX_PROMPTS = 10_000_000
MAX_PAIRS = 100_000
"""Models times workers."""
SHORTEST_S, LONGEST_S = 1e-9, 1e9


def _seconds(about: str) -> Number:
    return Number(about, at_least=0, at_most=LONGEST_S)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model with `prompts` to answer (N_m). Times are in seconds.

    A session of x prompts takes `load_s` + `fixed_s` + x * `per_prompt_s`. The paper's cost is `load_s` = l_m,
    `fixed_s` = 0 and `per_prompt_s` = tau_m (equation 3); with `fixed_s` above 0 a small session costs more per prompt
    (its Observation 3). `most_workers` caps the workers that load it; None takes equation 8.
    """

    name: Annotated[str, "The model's name."]
    prompts: Annotated[
        int,
        Number(
            "Prompts that it answers in all (N_m); 0 does not load it.", at_least=0, at_most=MAX_PROMPTS, whole=True
        ),
    ]
    load_s: Annotated[float, _seconds("Seconds per load.")]
    per_prompt_s: Annotated[float, _seconds("Seconds per prompt, many at a time.")]
    fixed_s: Annotated[float, _seconds("Seconds of each session besides its load.")] = 0.0
    most_workers: Annotated[
        int | None,
        Number(
            "Workers that may load it; by default as many loads as its work pays for (equation 8).",
            at_least=1,
            whole=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise ConfigError(f"A model is named {self.name!r}", remedy="Give it a name of printable characters.")

    def session_s(self, prompts: int) -> float:
        """How long a session of `prompts` prompts takes, its load included."""
        return self.load_s + self.fixed_s + prompts * self.per_prompt_s

    def fitting(self, seconds: float) -> int:
        """How many of its prompts a session of at most `seconds` can answer."""
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
    """Models to run on `workers` alike, each of which loads at most `capacity` of them (K in equation 9).

    Raises ConfigError where no plan can exist.
    """

    models: tuple[ModelWork, ...]
    workers: Annotated[int, "Number of workers, all alike."]
    capacity: Annotated[int, "Models that a worker loads at most (K)."]

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"Two models are named {twice!r}", remedy="Give each a name of its own.")
        if self.workers < 1 or self.capacity < 1:
            raise ConfigError(
                f"{self.workers} workers of {self.capacity} models each cannot run anything", remedy="Give 1 or more."
            )
        if self.workers * max(1, len(self.models)) > MAX_PAIRS:
            raise ConfigError(
                f"{len(self.models)} models on {self.workers} workers are too many to plan",
                remedy=f"Split the workload: models times workers may be {MAX_PAIRS}.",
            )
        if len(self.asked) > self.workers * self.capacity:
            raise ConfigError(
                f"{len(self.asked)} models do not fit on {self.workers} workers that load {self.capacity} each",
                remedy=f"Raise the capacity to {-(-len(self.asked) // self.workers)}, "
                f"or the workers to {-(-len(self.asked) // self.capacity)}.",
            )

    @property
    def asked(self) -> tuple[ModelWork, ...]:
        """The models that have prompts; the others are not loaded."""
        return tuple(model for model in self.models if model.prompts)

    @property
    def bound_s(self) -> float:
        """A bound on every makespan: each model is loaded at least once, and all work is spread evenly."""
        return sum(model.session_s(model.prompts) for model in self.asked) / self.workers


@dataclass(frozen=True, slots=True)
class Session:
    """`model` answers `prompts` prompts on `worker`, from `begin_s` to `end_s`, its load included."""

    worker: int
    model: str
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
        sessions = [asdict(session) for session in self.sessions]
        figures = {"makespan_s": self.makespan_s, "bound_s": self.bound_s, "gap": self.gap}
        return {"method": self.method, **figures, "sessions": sessions}


Shares = Sequence[Mapping[str, int]]
"""Per worker, the prompts of each model that it loads."""


def sessions_of(workload: Workload, shares: Shares) -> tuple[Session, ...]:
    """One session after the other on every worker, the longest first, so that what fails late costs little."""
    models = {model.name: model for model in workload.models}
    sessions = []
    for worker, share in enumerate(shares):
        now_s = 0.0
        for name, prompts in sorted(share.items(), key=lambda item: (-models[item[0]].session_s(item[1]), item[0])):
            end_s = now_s + models[name].session_s(prompts)
            sessions.append(Session(worker, name, prompts, now_s, end_s))
            now_s = end_s
    return tuple(sessions)


def shares_of(workload: Workload, plan: Plan) -> Shares:
    """What `sessions_of` was given."""
    by_worker = {
        worker: {session.model: session.prompts for session in sessions}
        for worker, sessions in groupby(plan.sessions, key=lambda session: session.worker)
    }
    return [by_worker.get(worker, {}) for worker in range(workload.workers)]


BISECTIONS = 40
TICKS = 100_000_000
TICKS_PER_PROMPT = 100_000
"""The integer units of time that the best known plan takes: rounding is then far below the gap."""
SEARCHERS = 8
"""Threads that search in different ways; one alone takes a hundred times as long on some small workloads."""


def round_robin(workload: Workload) -> Plan:
    """Whole models in the order given: m goes to worker m mod N (section 5.1)."""
    shares: list[dict[str, int]] = [{} for _ in range(workload.workers)]
    for number, model in enumerate(workload.asked):
        shares[number % workload.workers][model.name] = model.prompts
    return _planned("round-robin", workload, shares)


def longest_first(workload: Workload) -> Plan:
    """Whole models, the longest first, each to the worker that is done first and may load another (LPT)."""
    shares: list[dict[str, int]] = [{} for _ in range(workload.workers)]
    free = [(0.0, worker) for worker in range(workload.workers)]
    for model in sorted(workload.asked, key=lambda model: -model.session_s(model.prompts)):
        done_s, worker = heapq.heappop(free)
        shares[worker][model.name] = model.prompts
        if len(shares[worker]) < workload.capacity:
            heapq.heappush(free, (done_s + model.session_s(model.prompts), worker))
    return _planned("longest-first", workload, shares)


def split(workload: Workload) -> Plan | None:
    """Models split over workers where they do not fit into one; None where that is no shorter.

    The shortest makespan, by bisection, for which each model in turn, the longest first, fits into the fullest worker
    that can take it whole, or fills up the emptiest until it does.
    """
    low_s, high_s = workload.bound_s, longest_first(workload).makespan_s
    best: Shares | None = None
    for _ in range(BISECTIONS):
        middle_s = (low_s + high_s) / 2
        if shares := _filled(workload, middle_s):
            best, high_s = shares, middle_s
        else:
            low_s = middle_s
    return None if best is None else _planned("split", workload, best)


def _filled(workload: Workload, limit_s: float) -> Shares | None:
    shares: list[dict[str, int]] = [{} for _ in range(workload.workers)]
    left_s = [limit_s] * workload.workers

    def put(worker: int, model: ModelWork, prompts: int) -> None:
        shares[worker][model.name] = prompts
        left_s[worker] -= model.session_s(prompts)

    for model in sorted(workload.asked, key=lambda model: -model.session_s(model.prompts)):
        left = model.prompts
        for _ in range(model.replicas(workload.workers)):
            open_to = [
                w for w, share in enumerate(shares) if len(share) < workload.capacity and model.name not in share
            ]
            whole = [worker for worker in open_to if model.session_s(left) <= left_s[worker]]
            if whole:
                put(min(whole, key=left_s.__getitem__), model, left)
                left = 0
                break
            emptiest = max(open_to, key=left_s.__getitem__, default=None)
            fits = 0 if emptiest is None else min(left - 1, model.fitting(left_s[emptiest]))
            if emptiest is None or fits < 1:
                return None
            put(emptiest, model, fits)
            left -= fits
        if left:
            return None
    return shares


def _planned(method: str, workload: Workload, shares: Shares) -> Plan:
    return Plan(method, sessions_of(workload, shares), workload.bound_s)


WITHOUT_SOLVER: Mapping[str, Callable[[Workload], Plan]] = {
    "round-robin": round_robin,
    "longest-first": longest_first,
}
"""What a plan is compared with, and what needs no OR-tools."""


def plan(workload: Workload, limit_s: float = 10.0, *, seed: int = 0) -> Plan:
    """The shortest plan found within `limit_s`, never longer than the quick ones.

    Which of several plans that are equally good is found may change from run to run, as several threads search.
    Raises ConfigError for a limit that is no positive number, and without OR-tools.
    """
    if not 0 < limit_s < inf:
        raise ConfigError(f"A plan cannot be searched for {limit_s} s.", remedy="Give a positive number.")
    known = [longest_first(workload), round_robin(workload), split(workload)]
    start = min((made for made in known if made), key=lambda made: made.makespan_s)
    if start.makespan_s < SHORTEST_S:
        return Plan("ilp", start.sessions, 0.0)
    return _Program(workload, start).solved(limit_s, seed)


def answer() -> None:
    """Read a workload from standard input and write its plan, or the ConfigError, to standard output; pickled."""
    try:
        found: Plan | ConfigError = plan(pickle.load(sys.stdin.buffer))
    except ConfigError as error:
        found = error
    sys.stdout.buffer.write(pickle.dumps(found))


@dataclass(slots=True)
class _Variables:
    """Of one model, per worker: whether it is loaded (Y), and how many prompts it gets (X)."""

    model: ModelWork
    loaded: Sequence[Any]
    prompts: Sequence[Any]


class _Program:
    """Minimize the makespan C over Y and X, from a plan that is known.

    Times are integers, rounded down, so that what the solver proves is true of the real times.
    """

    def __init__(self, workload: Workload, start: Plan) -> None:
        self._cp = _solver()
        self._workload = workload
        self._start = start
        self._all_ticks = max(TICKS, TICKS_PER_PROMPT * max(model.prompts for model in workload.asked))
        self._tick_s = start.makespan_s / self._all_ticks
        self._program = self._cp.CpModel()
        self._variables = [self._variables_of(model) for model in workload.asked]
        self._makespan = self._program.new_int_var(0, self._all_ticks, "C")
        self._limit_workers()
        self._hint()
        self._program.minimize(self._makespan)  # (10)

    def solved(self, limit_s: float, seed: int) -> Plan:
        """What the solver finds, or the plan it started from if that is no longer."""
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.relative_gap_limit = OPTIMAL_GAP / 2
        solver.parameters.random_seed = seed
        solver.parameters.num_workers = SEARCHERS
        status = solver.solve(self._program)
        assert status in (self._cp.OPTIMAL, self._cp.FEASIBLE, self._cp.UNKNOWN), solver.status_name(status)
        bound_s = max(self._workload.bound_s, solver.best_objective_bound * self._tick_s)
        found = [self._start.sessions]
        if status != self._cp.UNKNOWN:
            found.append(sessions_of(self._workload, self._shares(solver)))
        return min((Plan("ilp", sessions, bound_s) for sessions in found), key=lambda made: made.makespan_s)

    def _variables_of(self, model: ModelWork) -> _Variables:
        program, workers = self._program, range(self._workload.workers)
        most = model.fitting(self._start.makespan_s * (1 + 1e-9))  # more would take longer than what is known
        loaded = [program.new_bool_var(f"Y {model.name} {worker}") for worker in workers]
        prompts = [program.new_int_var(0, most, f"X {model.name} {worker}") for worker in workers]
        program.add(sum(prompts) == model.prompts)  # (5)
        for is_loaded, count in zip(loaded, prompts, strict=True):
            program.add(count <= most * is_loaded)  # (6)
            program.add(count >= is_loaded)
        program.add_linear_constraint(sum(loaded), 1, model.replicas(self._workload.workers))  # (7)
        return _Variables(model, loaded, prompts)

    def _limit_workers(self) -> None:
        for worker in range(self._workload.workers):
            self._program.add(
                sum(of.loaded[worker] for of in self._variables) <= min(self._workload.capacity, len(self._variables))
            )  # (9)
            time = sum(
                self._ticks(of.model.session_s(0)) * of.loaded[worker]
                + self._ticks(of.model.per_prompt_s) * of.prompts[worker]
                for of in self._variables
            )  # (4)
            self._program.add(time <= self._makespan)

    def _ticks(self, seconds: float) -> int:
        return int(seconds / self._tick_s)

    def _hint(self) -> None:
        shares = shares_of(self._workload, self._start)
        for of in self._variables:
            for share, loaded, prompts in zip(shares, of.loaded, of.prompts, strict=True):
                self._program.add_hint(loaded, of.model.name in share)
                self._program.add_hint(prompts, share.get(of.model.name, 0))

    def _shares(self, solver: Any) -> Shares:
        return [
            {of.model.name: count for of in self._variables if (count := solver.value(of.prompts[worker]))}
            for worker in range(self._workload.workers)
        ]


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("Plans need OR-tools.", remedy="pip install 'shell-router[plan]'") from error
    return cp_model
