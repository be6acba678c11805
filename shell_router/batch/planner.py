"""Which worker loads which models: a workload, and plans for it (MOSAIC, section 4.1).

Workers are alike; each holds one model at a time and runs its sessions one after the other. A
session loads one model and has it answer some of its prompts. Plans are quick ones, and MOSAIC's
integer program (equations 4 to 10), which OR-tools CP-SAT solves from the best quick one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from typing import Annotated, Any

from shell_router.errors import ConfigError, require
from shell_router.topology.forms import Number

OPTIMAL_GAP = 1e-4
"""A plan that can be shorter by no more than this share of it counts as optimal, as with most
integer programming.
"""
MAX_PROMPTS = 10_000_000
MAX_PAIRS = 100_000
"""Models times workers."""
SHORTEST_S = 1e-9
LONGEST_S = 1e9


def _seconds(about: str) -> Number:
    return Number(about, at_least=0, at_most=LONGEST_S)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model with `prompts` to answer (N_m). Times are in seconds.

    A session of x prompts takes `load_s` + `fixed_s` + x * `per_prompt_s`. The paper's cost is
    `load_s` = l_m, `fixed_s` = 0 and `per_prompt_s` = tau_m (equation 3); with `fixed_s` above 0 a
    small session costs more per prompt (its Observation 3).
    """

    name: Annotated[str, "The model's name."]
    prompts: Annotated[
        int,
        Number(
            "Prompts that it answers in all (N_m); 0 does not load it.",
            at_least=0,
            at_most=MAX_PROMPTS,
            whole=True,
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
        named = bool(self.name) and self.name.isprintable()
        require(named, f"A model is named {self.name!r}", "Give it a name of printable characters.")

    def session_s(self, prompts: int) -> float:
        """How long a session of `prompts` prompts takes, its load included."""
        return self.load_s + self.run_s(prompts)

    def run_s(self, prompts: float) -> float:
        """How long it takes without its load."""
        return self.fixed_s + prompts * self.per_prompt_s

    def fitting(self, seconds: float) -> int:
        """How many of its prompts a session of at most `seconds` can answer."""
        left_s = seconds - self.session_s(0)
        if left_s < 0:
            return 0
        if left_s >= self.prompts * self.per_prompt_s:
            return self.prompts
        return int(left_s / self.per_prompt_s)

    def replicas(self, workers: int) -> int:
        """Most workers that may load it: `most_workers`, or clamp(1, floor(T_m / l_m), workers)
        (equation 8).
        """
        if self.most_workers is not None:
            return min(self.most_workers, workers)
        running_s = self.run_s(self.prompts)
        if self.load_s * workers <= running_s:
            return workers
        return max(1, int(running_s / self.load_s))


@dataclass(frozen=True, slots=True)
class Workload:
    """Models to run on `workers` alike, each of which loads at most `capacity` of them (K in
    equation 9).

    A worker's first load takes `first_s` longer, as an engine starts for it, and `together_s` for
    every other worker in use, as all of these start at the same time. In the middle of a run,
    worker n is free in `ready_s[n]`, and its next session needs no load if it is of the model
    `holds[n]`. Raises ConfigError where no plan can exist.
    """

    models: tuple[ModelWork, ...]
    workers: Annotated[int, "Number of workers, all alike."]
    capacity: Annotated[int, "Models that a worker loads at most (K)."]
    first_s: Annotated[float, _seconds("Seconds that a worker's first load takes longer.")] = 0.0
    together_s: Annotated[
        float, _seconds("Seconds more of a first load for each other worker in use.")
    ] = 0.0
    ready_s: Annotated[
        tuple[float, ...], "Seconds until each worker is free; by default all are."
    ] = ()
    holds: Annotated[
        tuple[str, ...], "Model that each worker holds and need not load; by default none."
    ] = ()

    def __post_init__(self) -> None:
        for name in ("ready_s", "holds"):
            given = len(getattr(self, name))
            wrong = f"{name} has {given} entries for {self.workers} workers."
            require(given in (0, self.workers), wrong, "Give one for each worker, or none.")
        names = [model.name for model in self.models]
        asked = len(self.asked)
        twice = next((name for name in names if names.count(name) > 1), None)
        require(twice is None, f"Two models are named {twice!r}", "Give each a name of its own.")
        runs = self.workers >= 1 and self.capacity >= 1
        require(
            runs,
            f"{self.workers} workers of {self.capacity} models each cannot run anything",
            "Give 1 or more.",
        )
        require(
            self.workers * max(1, len(names)) <= MAX_PAIRS,
            f"{len(names)} models on {self.workers} workers are too many to plan",
            f"Split the workload: models times workers may be {MAX_PAIRS}.",
        )
        require(
            asked <= self.workers * self.capacity,
            f"{asked} models do not fit on {self.workers} workers that load {self.capacity} each",
            (
                f"Raise the capacity to {-(-asked // self.workers)}, or the workers to "
                f"{-(-asked // self.capacity)}."
            ),
        )

    def free_s(self, worker: int) -> float:
        """When the worker is free."""
        if self.ready_s:
            return self.ready_s[worker]
        return 0.0

    def spared_s(self, worker: int, model: ModelWork) -> float:
        """How much of a session of the model the worker is spared, as it holds the model."""
        if self.holds and self.holds[worker] == model.name:
            return model.load_s
        return 0.0

    def session_s(self, worker: int, model: ModelWork, prompts: int) -> float:
        """How long such a session takes there."""
        return model.session_s(prompts) - self.spared_s(worker, model)

    def begin_s(self, used: int) -> float:
        """When a worker's first session would begin, if its load were like later ones, with `used`
        workers in use.
        """
        return self.first_s + self.together_s * (used - 1)

    @property
    def asked(self) -> tuple[ModelWork, ...]:
        """The models that have prompts; the others are not loaded."""
        return tuple(model for model in self.models if model.prompts)


@dataclass(frozen=True, slots=True)
class Session:
    """`model` answers `prompts` prompts on `worker`, from `begin_s` to `end_s`, its load
    included."""

    worker: int
    model: str
    prompts: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Sessions by worker and time. No plan that keeps the workload's limits is shorter than
    `bound_s`.
    """

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
        if self.makespan_s:
            return max(0.0, 1 - self.bound_s / self.makespan_s)
        return 0.0

    @property
    def optimal(self) -> bool:
        """Whether no other plan is shorter by more than `OPTIMAL_GAP`."""
        return self.gap <= OPTIMAL_GAP

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON-like values."""
        return {**asdict(self), "makespan_s": self.makespan_s, "gap": self.gap}


Shares = Sequence[Mapping[str, int]]
"""Per worker, the prompts of each model that it loads."""


def sessions_of(workload: Workload, shares: Shares) -> tuple[Session, ...]:
    """One session after the other on every worker: the model that it holds, and then the longest,
    as some may fail.
    """
    models = {model.name: model for model in workload.models}
    begin_s = workload.begin_s(sum(map(bool, shares)))
    sessions = []
    for worker, share in enumerate(shares):
        end_s = workload.free_s(worker)
        more_s = begin_s

        def order(item: tuple[str, int], worker: int = worker) -> tuple[bool, float, str]:
            model = models[item[0]]
            return not workload.spared_s(worker, model), -model.session_s(item[1]), item[0]

        for name, prompts in sorted(share.items(), key=order):
            at_s = end_s
            end_s = end_s + more_s + workload.session_s(worker, models[name], prompts)
            more_s = 0.0
            sessions.append(Session(worker, name, prompts, at_s, end_s))
    return tuple(sessions)


BISECTIONS = 50
FINE = 1e-3
TICKS = 100_000_000
TICKS_PER_PROMPT = 100_000
"""The integer units of time that the best known plan takes: rounding is then far below the gap."""
WORTH_OF_LOAD = 0.1
"""A part of a model is not placed where it would run for less than this share of its load."""
SEARCHERS = 4
"""Threads that search in different ways; one alone takes a hundred times as long on some small
workloads.
"""


def counting_bound_s(workload: Workload) -> float:
    """The shortest makespan at which the sessions that each model needs fit into the workers' time
    and loads.

    A session is no longer than the makespan, so a model needs at least N_m / floor((C - s_m) /
    tau_m) of them, rounded up, each with its s_m = load_s + fixed_s.
    """

    free_s = sorted(map(workload.free_s, range(workload.workers)))
    spared_s = {
        model: [workload.spared_s(worker, model) for worker in range(workload.workers)]
        for model in workload.asked
    }

    def fits(limit_s: float, used: int) -> bool:
        each_s = limit_s - workload.begin_s(used)
        sessions = 0
        total_s = -sum(map(sum, spared_s.values()))
        for model in workload.asked:
            most = model.fitting(each_s - free_s[0] + max(spared_s[model]))
            if most:
                needed = -(-model.prompts // most)
            else:
                needed = used + 1
            if needed > min(used, model.replicas(workload.workers)):
                return False
            sessions += needed
            total_s += needed * model.session_s(0) + model.prompts * model.per_prompt_s
        available_s = sum(max(0.0, each_s - free) for free in free_s[:used])
        return sessions <= used * workload.capacity and total_s <= available_s

    if not workload.asked:
        return 0.0
    low_s = 0.0
    high_s = max(session.end_s for session in sessions_of(workload, _even(workload, inf) or ()))
    # only a load that others slow down may be spared
    if workload.together_s:
        fewest = 1
    else:
        fewest = workload.workers
    for _ in range(BISECTIONS):
        middle_s = (low_s + high_s) / 2
        if any(fits(middle_s, used) for used in range(workload.workers, fewest - 1, -1)):
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s


class _Filling:
    """Workers that take sessions while these end within `limit_s`; first loads count as any
    others."""

    def __init__(self, workload: Workload, limit_s: float) -> None:
        self.shares: list[dict[str, int]] = [{} for _ in range(workload.workers)]
        self.left_s = [limit_s - workload.free_s(worker) for worker in range(workload.workers)]
        self._workload = workload

    def loads(self, worker: int) -> int:
        """How many models it may still load."""
        return self._workload.capacity - len(self.shares[worker])

    def left_for(self, worker: int, model: ModelWork) -> float:
        """The time that it has for a session of the model and its load."""
        return self.left_s[worker] + self._workload.spared_s(worker, model)

    def emptiest(self, model: ModelWork) -> int | None:
        """Of the workers that may load it the one with the most time left."""
        return max(
            self._open_to(model), key=lambda worker: self.left_for(worker, model), default=None
        )

    def fullest(self, model: ModelWork, prompts: int) -> int | None:
        """Of those that have time for such a session of it the one with the least left."""
        needed_s = model.session_s(prompts)
        fitting = (
            worker for worker in self._open_to(model) if self.left_for(worker, model) >= needed_s
        )
        return min(fitting, key=lambda worker: self.left_for(worker, model), default=None)

    def _open_to(self, model: ModelWork) -> list[int]:
        return [
            worker
            for worker, share in enumerate(self.shares)
            if self.loads(worker) and model.name not in share
        ]

    def put(self, worker: int, model: ModelWork, prompts: int) -> None:
        """Give the worker a session."""
        self.left_s[worker] -= self._workload.session_s(worker, model, prompts)
        self.shares[worker][model.name] = prompts

    def take_out(self, worker: int, model: ModelWork) -> None:
        """Take its session of the model away."""
        self.left_s[worker] += self._workload.session_s(
            worker, model, self.shares[worker].pop(model.name)
        )

    def put_whole(self, worker: int, models: list[ModelWork], most: int) -> None:
        """Give the worker at most `most` whole models that fit, each the first of those left, and
        take them out.
        """
        for _ in range(most):
            fitting = (
                place
                for place, model in enumerate(models)
                if model.session_s(model.prompts) <= self.left_for(worker, model)
            )
            if (place := next(fitting, None)) is None:
                return
            model = models.pop(place)
            self.put(worker, model, model.prompts)

    def put_next(self, worker: int, cut: list[tuple[ModelWork, int, int]], *, parts: bool) -> bool:
        """Give the worker what is left of the first model; with `parts` of further ones, and a part
        of the next.

        `cut` has models, the prompts left of each and the sessions that it may still have. Whether
        anything fits.
        """
        before = len(self.shares[worker])
        while cut and self.loads(worker):
            model, left, sessions = cut[0]
            left_s = self.left_for(worker, model)
            if model.session_s(left) <= left_s:
                part = left
            else:
                part = min(model.fitting(left_s), left - 1)
            worth = part * model.per_prompt_s >= WORTH_OF_LOAD * model.session_s(0)
            if part < left and not (parts and part and worth and sessions > 1):
                break
            self.put(worker, model, part)
            cut[:1] = [(model, left - part, sessions - 1)] if part < left else []
            if part < left or not parts:
                break
        return len(self.shares[worker]) > before


def _longest(workload: Workload) -> list[ModelWork]:
    return sorted(workload.asked, key=lambda model: -model.session_s(model.prompts))


def round_robin(workload: Workload) -> Plan:
    """Whole models in the order given: m goes to worker m mod N (section 5.1)."""
    shares: list[dict[str, int]] = [{} for _ in range(workload.workers)]
    for number, model in enumerate(workload.asked):
        shares[number % workload.workers][model.name] = model.prompts
    return _planned("round-robin", workload, shares)


def longest_first(workload: Workload) -> Plan:
    """Whole models, the longest first, each to the worker that is done first and may load another
    (LPT).
    """
    return _planned("longest-first", workload, _even(workload, inf) or ())


def wrap_around(workload: Workload) -> Plan:
    """The best of the quick plans, most often models that are cut at the borders of workers filled
    one after the other.

    Each way of filling workers has its shortest makespan found by bisection.
    """
    best = min(longest_first(workload), round_robin(workload), key=lambda made: made.makespan_s)
    for fill in FILLINGS:
        low_s = max(0.0, best.bound_s - workload.begin_s(workload.workers))
        high_s = best.makespan_s
        while high_s - low_s > FINE * best.makespan_s:
            middle_s = (low_s + high_s) / 2
            if shares := fill(workload, middle_s):
                high_s = middle_s
                made = replace(best, sessions=sessions_of(workload, shares))
                best = min(best, made, key=lambda made: made.makespan_s)
            else:
                low_s = middle_s
    return replace(best, method="wrap-around")


def _even(workload: Workload, limit_s: float) -> Shares | None:
    """As few sessions of each model as `limit_s` allows, the longest first to the emptiest worker,
    and then leveled.

    That may take longer than `limit_s`; None where it needs too many sessions.
    """
    filling = _Filling(workload, 0.0)
    pieces = []
    for model in workload.asked:
        if most := model.fitting(limit_s):
            sessions = -(-model.prompts // most)
        else:
            sessions = workload.workers + 1
        if sessions > model.replicas(workload.workers):
            return None
        pieces += [(model, (model.prompts + number) // sessions) for number in range(sessions)]
    for model, prompts in sorted(pieces, key=lambda piece: -piece[0].session_s(piece[1])):
        if (worker := filling.emptiest(model)) is None:
            return None
        filling.put(worker, model, prompts)
    for model in _longest(workload):
        at = [worker for worker, share in enumerate(filling.shares) if model.name in share]
        for worker in at:
            filling.take_out(worker, model)
        busy_s = {worker: -filling.left_for(worker, model) for worker in at}
        for worker, prompts in shared_out(model, busy_s).items():
            filling.put(worker, model, prompts)
    return filling.shares


def shared_out(work: ModelWork, busy_s: Mapping[int, float]) -> dict[int, int]:
    """How many of the model's prompts each worker gets, so that the last one is done earliest.

    `busy_s` says how long each worker that may take some is still busy; there is at least one.
    """
    low_s = min(busy_s.values())
    high_s = min(busy_s.values()) + work.session_s(work.prompts)
    for _ in range(BISECTIONS):
        middle_s = (low_s + high_s) / 2
        if sum(work.fitting(middle_s - busy) for busy in busy_s.values()) >= work.prompts:
            high_s = middle_s
        else:
            low_s = middle_s
    fitting = {worker: work.fitting(high_s - busy) for worker, busy in busy_s.items()}
    taken = dict.fromkeys(busy_s, 0)
    left = work.prompts
    for worker in sorted(fitting, key=lambda worker: -fitting[worker]):
        taken[worker] = min(fitting[worker], left)
        left -= taken[worker]
    taken[min(busy_s, key=busy_s.__getitem__)] += left  # by rounding
    return {worker: prompts for worker, prompts in taken.items() if prompts}


def _filled(workload: Workload, limit_s: float) -> Shares | None:
    """Each model in turn, the longest first: whole in the fullest worker that takes it, or in parts
    of the emptiest.
    """
    filling = _Filling(workload, limit_s)
    for model in _longest(workload):
        cut = [(model, model.prompts, model.replicas(workload.workers))]
        while cut:
            left = cut[0][1]
            worker = filling.fullest(model, left)
            if worker is None:
                worker = filling.emptiest(model)
            if worker is None or not filling.put_next(worker, cut, parts=True):
                return None
    return filling.shares


def _wrapped(workload: Workload, limit_s: float, small: float) -> Shares | None:
    """Worker after worker: the rest of a model that was cut, whole small ones, and a part that
    fills what is left.
    """
    filling = _Filling(workload, limit_s)
    models = _longest(workload)
    whole = [model for model in models if model.session_s(model.prompts) <= small * limit_s]
    cut = [
        (model, model.prompts, model.replicas(workload.workers))
        for model in models[: len(models) - len(whole)]
    ]
    for worker, share in enumerate(filling.shares):
        filling.put_next(worker, cut, parts=False)
        if cut:
            due = -(-len(whole) // (workload.workers - worker))
        else:
            due = workload.capacity
        filling.put_whole(worker, whole, min(due, filling.loads(worker) - bool(cut and not share)))
        filling.put_next(worker, cut, parts=True)
        filling.put_whole(worker, whole, filling.loads(worker))
    return None if cut or whole else filling.shares


def _planned(method: str, workload: Workload, shares: Shares) -> Plan:
    return Plan(method, sessions_of(workload, shares), counting_bound_s(workload))


SMALL = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
"""Models that take no longer than this share of the makespan are placed whole; the best of these
counts.
"""
FILLINGS: Sequence[Callable[[Workload, float], Shares | None]] = (
    *(_even, _filled),
    *(partial(_wrapped, small=small) for small in SMALL),
)
WITHOUT_SOLVER: Mapping[str, Callable[[Workload], Plan]] = {
    "round-robin": round_robin,
    "longest-first": longest_first,
}
"""What a plan is compared with, and what needs no OR-tools."""


def plan(workload: Workload, limit_s: float = 10.0, *, seed: int = 0) -> Plan:
    """The shortest plan found within `limit_s`, never longer than the quick ones.

    Which of several plans that are equally good is found may change from run to run, as several
    threads search. Raises ConfigError for a limit that is no positive number, and without OR-tools.
    """
    require(
        0 < limit_s < inf, f"A plan cannot be searched for {limit_s} s.", "Give a positive number."
    )
    start = replace(wrap_around(workload), method="ilp")
    if start.makespan_s < SHORTEST_S or start.optimal:
        return start
    return _Program(workload, start).solved(limit_s, seed)


def planner_work() -> Callable[[Sequence[tuple[Workload, float]]], list[Plan | ConfigError]]:
    """Return the work of the planner's process: plans, or the errors, for arguments of `plan`."""

    def make_plan(arguments: tuple[Workload, float]) -> Plan | ConfigError:
        try:
            return plan(*arguments)
        except ConfigError as error:
            return error

    return lambda bodies: list(map(make_plan, bodies))


class _Program:
    """Minimize the makespan C over Y and X, from a plan that is known.

    Times are integers, rounded down, so that what the solver proves is true of the real times.
    """

    def __init__(self, workload: Workload, start: Plan) -> None:
        try:
            from ortools.sat.python import cp_model  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError(
                "Plans need OR-tools.", remedy="pip install 'shell-router[plan]'"
            ) from error
        self._cp: Any = cp_model
        self._workload = workload
        self._start = start
        self._all_ticks = max(
            TICKS, TICKS_PER_PROMPT * max(model.prompts for model in workload.asked)
        )
        self._tick_s = start.makespan_s / self._all_ticks
        self._program = self._cp.CpModel()
        self._used = [
            self._program.new_bool_var(f"U {worker}") for worker in range(workload.workers)
        ]
        self._variables = [(model, *self._variables_of(model)) for model in workload.asked]
        self._makespan = self._program.new_int_var(self._ticks(start.bound_s), self._all_ticks, "C")
        self._limit_workers()
        self._program.minimize(self._makespan)  # (10)

    def solved(self, limit_s: float, seed: int) -> Plan:
        """What the solver finds, or the plan it started from if that is no longer."""
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.relative_gap_limit = OPTIMAL_GAP / 2
        solver.parameters.random_seed = seed
        solver.parameters.num_workers = SEARCHERS
        status = solver.solve(self._program)
        assert status in (self._cp.OPTIMAL, self._cp.FEASIBLE, self._cp.UNKNOWN), (
            solver.status_name(status)
        )
        bound_s = max(self._start.bound_s, solver.best_objective_bound * self._tick_s)
        found = [self._start.sessions]
        if status != self._cp.UNKNOWN:
            shares = [
                {
                    model.name: count
                    for model, _, prompts in self._variables
                    if (count := solver.value(prompts[worker]))
                }
                for worker in range(self._workload.workers)
            ]
            found.append(sessions_of(self._workload, shares))
        return min(
            (Plan("ilp", sessions, bound_s) for sessions in found), key=lambda made: made.makespan_s
        )

    def _variables_of(self, model: ModelWork) -> tuple[list[Any], list[Any]]:
        """Per worker, whether the model is loaded there (Y), and how many prompts it gets (X), with
        what is known.
        """
        program = self._program
        workers = range(self._workload.workers)
        spared_s = max(self._workload.spared_s(worker, model) for worker in workers)
        # more would take longer than what is known
        most = model.fitting(self._start.makespan_s * (1 + 1e-9) + spared_s)
        loaded = [program.new_bool_var(f"Y {model.name} {worker}") for worker in workers]
        prompts = [program.new_int_var(0, most, f"X {model.name} {worker}") for worker in workers]
        program.add(sum(prompts) == model.prompts)  # (5)
        known = {one.worker: one.prompts for one in self._start.sessions if one.model == model.name}
        for worker, (is_used, is_loaded, count) in enumerate(
            zip(self._used, loaded, prompts, strict=True)
        ):
            program.add(count <= most * is_loaded)  # (6)
            program.add(count >= is_loaded)
            program.add(is_used >= is_loaded)  # one of them is its first
            program.add_hint(is_loaded, worker in known)
            program.add_hint(count, known.get(worker, 0))
        program.add_linear_constraint(sum(loaded), 1, model.replicas(self._workload.workers))  # (7)
        return loaded, prompts

    def _limit_workers(self) -> None:
        together = self._ticks(self._workload.together_s) * (sum(self._used) - 1)
        most = min(self._workload.capacity, len(self._variables))
        for worker, is_used in enumerate(self._used):
            self._program.add(
                sum(loaded[worker] for _, loaded, _ in self._variables) <= most
            )  # (9)
            time = sum(
                self._ticks(self._workload.session_s(worker, model, 0)) * loaded[worker]
                + self._ticks(model.per_prompt_s) * prompts[worker]
                for model, loaded, prompts in self._variables
            )  # (4)
            begin = self._ticks(self._workload.first_s + self._workload.free_s(worker)) * is_used
            self._program.add(time + begin + together <= self._makespan)

    def _ticks(self, seconds: float) -> int:
        return int(seconds / self._tick_s)
