"""Plans: how many prompts of which model each worker answers (MOSAIC, section 4.1).

Workers are alike; each holds one model at a time and runs its sessions one after the other. A
session loads one model, which answers some of its prompts. The paper's symbols, for models m and
workers n:

    N_m    prompts of a model         `ModelWork.prompts`
    l_m    seconds of a load          `ModelWork.load_s`
    tau_m  seconds per prompt         `ModelWork.per_prompt_s`
    R_m    replica cap                `ModelWork.replica_cap`
    K      models per worker          `Workload.capacity`
    X_mn   prompts of m on n          `Allocation`
    Y_mn   whether n loads m          `loads` of the integer program
    C      makespan                   `BatchPlan.makespan_s`

Heuristics make plans within a second. `plan` solves the integer program (equations 4 to 10) with
OR-tools' CP-SAT, from the best heuristic plan.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from operator import attrgetter
from typing import Annotated, Any

from annotated_types import Interval

from shell_router.errors import ConfigError, require
from shell_router.files.types import Count

OPTIMAL_GAP = 1e-4
"""The relative gap up to which a plan counts as optimal, a usual value of integer programming."""
MAX_PROMPTS = 10_000_000
MAX_PAIRS = 100_000
"""The most models times workers of a workload."""
SHORTEST_S = 1e-9
LONGEST_S = 1e9


Duration = Annotated[float, Interval(ge=0, le=LONGEST_S)]
"""Seconds that a plan reckons with."""


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model with `prompts` to answer. Times are in seconds.

    A session of x prompts takes load_s + fixed_s + x * per_prompt_s. The paper has no fixed_s
    (equation 3); above 0 it makes small sessions cost more per prompt (Observation 3).
    """

    name: Annotated[str, "The model's name."]
    prompts: Annotated[
        int,
        "Prompts that it answers in all (N_m); 0 does not load it.",
        Interval(ge=0, le=MAX_PROMPTS),
    ]
    load_s: Annotated[Duration, "Seconds per load."]
    per_prompt_s: Annotated[Duration, "Seconds per prompt, many at a time."]
    fixed_s: Annotated[Duration, "Seconds of each session besides its load."] = 0.0
    most_workers: Annotated[
        Count | None,
        "Workers that may load it; by default as many loads as its work pays for (equation 8).",
    ] = None

    def __post_init__(self) -> None:
        is_named = bool(self.name) and self.name.isprintable()
        require(
            is_named, f"A model is named {self.name!r}", "Give it a name of printable characters."
        )

    def session_s(self, prompts: int) -> float:
        """Return the seconds of a session, its load included."""
        return self.load_s + self.run_s(prompts)

    def run_s(self, prompts: float) -> float:
        """Return the seconds of a session without its load."""
        return self.fixed_s + prompts * self.per_prompt_s

    def fit_prompts(self, seconds: float) -> int:
        """Return the most prompts that a session of at most `seconds` answers."""
        left_s = seconds - self.session_s(0)
        if left_s < 0:
            return 0
        if left_s >= self.prompts * self.per_prompt_s:
            return self.prompts
        return int(left_s / self.per_prompt_s)

    def replica_cap(self, workers: int) -> int:
        """Return the most workers that may load the model (R_m).

        It is `most_workers` if set, or else clamp(1, floor(T_m / l_m), workers) (equation 8).
        """
        if self.most_workers is not None:
            return min(self.most_workers, workers)
        run_s = self.run_s(self.prompts)
        if self.load_s * workers <= run_s:
            return workers
        return max(1, int(run_s / self.load_s))


@dataclass(frozen=True, slots=True)
class Workload:
    """Models to run on `workers`, each of which loads at most `capacity` of them.

    An engine starts with a worker's first load, which takes `first_s` longer, and `together_s` more
    for each other worker in use, as all of these start at the same time. In the middle of a run,
    worker n is free after `ready_s[n]` and needs no load for the model `holds[n]`.

    Raises ConfigError if no plan can exist.
    """

    models: tuple[ModelWork, ...]
    workers: Annotated[int, "Number of workers, all alike."]
    capacity: Annotated[int, "Models that a worker loads at most (K)."]
    first_s: Annotated[Duration, "Seconds that a worker's first load takes longer."] = 0.0
    together_s: Annotated[
        Duration, "Seconds more of a first load for each other worker in use."
    ] = 0.0
    ready_s: Annotated[
        tuple[float, ...], "Seconds until each worker is free; by default all are."
    ] = ()
    holds: Annotated[
        tuple[str, ...], "Model that each worker holds and need not load; by default none."
    ] = ()

    def __post_init__(self) -> None:
        for name in ("ready_s", "holds"):
            entries = len(getattr(self, name))
            require(
                entries in (0, self.workers),
                f"{name} has {entries} entries for {self.workers} workers.",
                "Give one for each worker, or none.",
            )
        names = [model.name for model in self.models]
        twice = next((name for name in names if names.count(name) > 1), None)
        require(twice is None, f"Two models are named {twice!r}", "Give each a name of its own.")
        require(
            self.workers >= 1 and self.capacity >= 1,
            f"{self.workers} workers of {self.capacity} models each cannot run anything",
            "Give 1 or more.",
        )
        require(
            self.workers * max(1, len(names)) <= MAX_PAIRS,
            f"{len(names)} models on {self.workers} workers are too many to plan",
            f"Split the workload: models times workers may be {MAX_PAIRS}.",
        )
        active = len(self.active_models)
        require(
            active <= self.workers * self.capacity,
            f"{active} models do not fit on {self.workers} workers that load {self.capacity} each",
            f"Raise the capacity to {-(-active // self.workers)}, or the workers to "
            f"{-(-active // self.capacity)}.",
        )

    @property
    def active_models(self) -> tuple[ModelWork, ...]:
        """The models that have prompts; the others are not loaded."""
        return tuple(model for model in self.models if model.prompts)

    def ready_at_s(self, worker: int) -> float:
        """Return the seconds until the worker is free."""
        return self.ready_s[worker] if self.ready_s else 0.0

    def saved_load_s(self, worker: int, model: ModelWork) -> float:
        """Return the load that a session saves if the worker holds the model, or else 0."""
        if self.holds and self.holds[worker] == model.name:
            return model.load_s
        return 0.0

    def session_s(self, worker: int, model: ModelWork, prompts: int) -> float:
        """Return the seconds of a session on the worker."""
        return model.session_s(prompts) - self.saved_load_s(worker, model)

    def start_delay_s(self, used: int) -> float:
        """Return how much longer each worker's first load takes with `used` workers in use."""
        return self.first_s + self.together_s * (used - 1)


@dataclass(frozen=True, slots=True)
class Session:
    """A time on `worker`, load included, in which `model` answers `prompts` prompts."""

    worker: int
    model: str
    prompts: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The sessions by worker and time. No plan for the workload is shorter than `bound_s`."""

    method: str
    sessions: tuple[Session, ...]
    bound_s: float

    @property
    def makespan_s(self) -> float:
        """The end of the last session (C, equation 1)."""
        return max((session.end_s for session in self.sessions), default=0.0)

    @property
    def gap(self) -> float:
        """The share by which an optimal plan may be shorter than this one."""
        if self.makespan_s:
            return max(0.0, 1 - self.bound_s / self.makespan_s)
        return 0.0

    @property
    def optimal(self) -> bool:
        """Whether no other plan is shorter by more than `OPTIMAL_GAP`."""
        return self.gap <= OPTIMAL_GAP

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON-like values."""
        return {**asdict(self), "makespan_s": self.makespan_s, "gap": self.gap}


Allocation = Sequence[Mapping[str, int]]
"""The prompts of each model that a worker loads, by worker (X)."""


def schedule_sessions(workload: Workload, allocation: Allocation) -> tuple[Session, ...]:
    """Put each worker's sessions one after the other.

    The model that the worker holds goes first, and then the longest session: sessions that fail
    late cost most.
    """
    models = {model.name: model for model in workload.models}

    def rank(worker: int, name: str) -> tuple[bool, float, str]:
        model = models[name]
        is_loaded = workload.saved_load_s(worker, model) > 0
        return not is_loaded, -model.session_s(allocation[worker][name]), name

    start_delay_s = workload.start_delay_s(sum(map(bool, allocation)))
    sessions = []
    for worker, prompts in enumerate(allocation):
        end_s = workload.ready_at_s(worker)
        delay_s = start_delay_s
        for name in sorted(prompts, key=partial(rank, worker)):
            begin_s = end_s
            session_s = workload.session_s(worker, models[name], prompts[name])
            end_s = begin_s + delay_s + session_s
            delay_s = 0.0
            sessions.append(Session(worker, name, prompts[name], begin_s, end_s))
    return tuple(sessions)


BISECTIONS = 50
PRECISION = 1e-3
"""The share of the makespan to which the heuristics' bisection goes."""
MIN_RUN_PER_LOAD = 0.1
"""A model is split only where its part runs for at least this share of its load."""


def lower_bound_s(workload: Workload) -> float:
    """Return the shortest makespan at which the sessions fit into the workers' time and loads.

    A session is no longer than the makespan C. So with s_m = load_s + fixed_s model m needs at
    least N_m / floor((C - s_m) / tau_m) sessions, rounded up, each with its s_m.
    """
    workers = range(workload.workers)
    ready_s = sorted(map(workload.ready_at_s, workers))
    saved_s = {
        model: [workload.saved_load_s(worker, model) for worker in workers]
        for model in workload.active_models
    }

    def fits(makespan_s: float, used: int) -> bool:
        worker_s = makespan_s - workload.start_delay_s(used)
        sessions = 0
        total_s = -sum(map(sum, saved_s.values()))
        for model in workload.active_models:
            longest_s = worker_s - ready_s[0] + max(saved_s[model])
            needed = _count_sessions(model, longest_s, most=used)
            if needed > min(used, model.replica_cap(workload.workers)):
                return False
            sessions += needed
            total_s += needed * model.session_s(0) + model.prompts * model.per_prompt_s
        available_s = sum(max(0.0, worker_s - ready) for ready in ready_s[:used])
        return sessions <= used * workload.capacity and total_s <= available_s

    if not workload.active_models:
        return 0.0
    low_s = 0.0
    upper_sessions = schedule_sessions(workload, _level(workload, inf) or ())
    high_s = max(session.end_s for session in upper_sessions)
    # fewer workers help only where their starts slow each other down
    fewest = 1 if workload.together_s else workload.workers
    for _ in range(BISECTIONS):
        middle_s = (low_s + high_s) / 2
        if any(fits(middle_s, used) for used in range(workload.workers, fewest - 1, -1)):
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s


def _count_sessions(model: ModelWork, seconds: float, most: int) -> int:
    """Return the sessions of at most `seconds` that a model needs; `most` + 1 if none is enough."""
    prompts = model.fit_prompts(seconds)
    if prompts:
        return -(-model.prompts // prompts)
    return most + 1


@dataclass(slots=True)
class _Unplaced:
    """The prompts of a model that no worker has yet, and the sessions that it may still get."""

    model: ModelWork
    prompts: int
    sessions: int


class _PartialPlan:
    """An allocation that grows while sessions end within `limit_s`.

    A worker's first load counts as any other.
    """

    def __init__(self, workload: Workload, limit_s: float) -> None:
        workers = range(workload.workers)
        self.allocation: list[dict[str, int]] = [{} for _ in workers]
        self._left_s = [limit_s - workload.ready_at_s(worker) for worker in workers]
        self._workload = workload

    def loads_left(self, worker: int) -> int:
        """Return how many models the worker may still load."""
        return self._workload.capacity - len(self.allocation[worker])

    def left_s(self, worker: int, model: ModelWork) -> float:
        """Return the longest session of the model, load included, that the worker has time for."""
        return self._left_s[worker] + self._workload.saved_load_s(worker, model)

    def find_emptiest(self, model: ModelWork) -> int | None:
        """Return the worker with the most time left, of those that may load the model."""
        return max(
            self._list_open(model), key=lambda worker: self.left_s(worker, model), default=None
        )

    def find_fullest(self, model: ModelWork, prompts: int) -> int | None:
        """Return the worker with the least time left in which the session fits (best fit)."""
        needed_s = model.session_s(prompts)
        left_s = {worker: self.left_s(worker, model) for worker in self._list_open(model)}
        fitting = [worker for worker in left_s if left_s[worker] >= needed_s]
        return min(fitting, key=left_s.__getitem__, default=None)

    def _list_open(self, model: ModelWork) -> list[int]:
        return [
            worker
            for worker, prompts in enumerate(self.allocation)
            if self.loads_left(worker) and model.name not in prompts
        ]

    def add(self, worker: int, model: ModelWork, prompts: int) -> None:
        """Add a session to the worker."""
        self._left_s[worker] -= self._workload.session_s(worker, model, prompts)
        self.allocation[worker][model.name] = prompts

    def remove(self, worker: int, model: ModelWork) -> None:
        """Remove the worker's session of the model."""
        prompts = self.allocation[worker].pop(model.name)
        self._left_s[worker] += self._workload.session_s(worker, model, prompts)

    def add_whole(self, worker: int, models: list[ModelWork], most: int) -> None:
        """Move up to `most` whole models to the worker, each the first of `models` that fits."""
        for _ in range(most):
            for index, model in enumerate(models):
                if model.session_s(model.prompts) <= self.left_s(worker, model):
                    self.add(worker, models.pop(index), model.prompts)
                    break
            else:
                return

    def add_next(self, worker: int, unplaced: deque[_Unplaced], *, split: bool) -> bool:
        """Move the rest of the first unplaced model to the worker if it fits.

        With `split` go on to further models and to a part of the first that does not fit. Returns
        whether the worker got anything.
        """
        before = len(self.allocation[worker])
        while unplaced and self.loads_left(worker):
            rest = unplaced[0]
            model = rest.model
            left_s = self.left_s(worker, model)
            if model.session_s(rest.prompts) <= left_s:
                self.add(worker, model, rest.prompts)
                unplaced.popleft()
                if split:
                    continue
            elif split and rest.sessions > 1:
                part = min(model.fit_prompts(left_s), rest.prompts - 1)
                pays = part * model.per_prompt_s >= MIN_RUN_PER_LOAD * model.session_s(0)
                if part and pays:
                    self.add(worker, model, part)
                    rest.prompts -= part
                    rest.sessions -= 1
            break
        return len(self.allocation[worker]) > before


def _sort_by_length(workload: Workload) -> list[ModelWork]:
    return sorted(workload.active_models, key=lambda model: -model.session_s(model.prompts))


def plan_round_robin(workload: Workload) -> BatchPlan:
    """Give whole models to workers in turn: m goes to worker m mod N (section 5.1)."""
    allocation: list[dict[str, int]] = [{} for _ in range(workload.workers)]
    for number, model in enumerate(workload.active_models):
        allocation[number % workload.workers][model.name] = model.prompts
    return _build_plan("round-robin", workload, allocation)


def plan_longest_first(workload: Workload) -> BatchPlan:
    """Give whole models, the longest first, to the worker that is done first (LPT)."""
    return _build_plan("longest-first", workload, _level(workload, inf) or ())


def plan_wrap_around(workload: Workload) -> BatchPlan:
    """Return the best heuristic plan.

    It is most often one that fills workers one after the other and splits models at their borders.
    Bisection finds the shortest makespan of each way to fill workers.
    """
    heuristics = plan_longest_first(workload), plan_round_robin(workload)
    best = min(heuristics, key=attrgetter("makespan_s"))
    for fill in FILLINGS:
        low_s = max(0.0, best.bound_s - workload.start_delay_s(workload.workers))
        high_s = best.makespan_s
        while high_s - low_s > PRECISION * best.makespan_s:
            middle_s = (low_s + high_s) / 2
            allocation = fill(workload, middle_s)
            if allocation:
                high_s = middle_s
                candidate = replace(best, sessions=schedule_sessions(workload, allocation))
                best = min(best, candidate, key=attrgetter("makespan_s"))
            else:
                low_s = middle_s
    return replace(best, method="wrap-around")


def _level(workload: Workload, limit_s: float) -> Allocation | None:
    """Allocate as few sessions of each model as `limit_s` allows, and then level them.

    The longest session goes first, to the emptiest worker. The result may take longer than
    `limit_s`. Returns None if a model needs too many sessions.
    """
    partial_plan = _PartialPlan(workload, 0.0)
    pieces = []
    for model in workload.active_models:
        sessions = _count_sessions(model, limit_s, most=workload.workers)
        if sessions > model.replica_cap(workload.workers):
            return None
        pieces += [(model, (model.prompts + number) // sessions) for number in range(sessions)]
    for model, prompts in sorted(pieces, key=lambda piece: -piece[0].session_s(piece[1])):
        emptiest = partial_plan.find_emptiest(model)
        if emptiest is None:
            return None
        partial_plan.add(emptiest, model, prompts)
    for model in _sort_by_length(workload):
        _level_model(partial_plan, model)
    return partial_plan.allocation


def _level_model(partial_plan: _PartialPlan, model: ModelWork) -> None:
    """Split the model's prompts again over the workers that have some, so that all end together."""
    busy_s: dict[int, float] = {}
    for worker, prompts in enumerate(partial_plan.allocation):
        if model.name in prompts:
            partial_plan.remove(worker, model)
            busy_s[worker] = -partial_plan.left_s(worker, model)
    for worker, count in split_prompts(model, busy_s).items():
        partial_plan.add(worker, model, count)


def split_prompts(model: ModelWork, busy_s: Mapping[int, float]) -> dict[int, int]:
    """Split the model's prompts over workers so that the last one is done earliest.

    Args:
        model: The model with its prompts.
        busy_s: The seconds until each worker may begin; at least one worker.

    Returns:
        The prompts of each worker that gets any.
    """
    low_s = min(busy_s.values())
    high_s = low_s + model.session_s(model.prompts)
    for _ in range(BISECTIONS):
        middle_s = (low_s + high_s) / 2
        fits = sum(model.fit_prompts(middle_s - busy) for busy in busy_s.values())
        if fits >= model.prompts:
            high_s = middle_s
        else:
            low_s = middle_s
    fitting = {worker: model.fit_prompts(high_s - busy) for worker, busy in busy_s.items()}
    split = dict.fromkeys(busy_s, 0)
    left = model.prompts
    for worker in sorted(fitting, key=lambda worker: -fitting[worker]):
        split[worker] = min(fitting[worker], left)
        left -= split[worker]
    split[min(busy_s, key=busy_s.__getitem__)] += left  # rounding may leave some
    return {worker: prompts for worker, prompts in split.items() if prompts}


def _fill_best_fit(workload: Workload, limit_s: float) -> Allocation | None:
    """Allocate model after model, the longest first.

    A model goes whole to the fullest worker that has time for it, or in parts to the emptiest.
    Returns None if `limit_s` is too short.
    """
    partial_plan = _PartialPlan(workload, limit_s)
    for model in _sort_by_length(workload):
        rest = _Unplaced(model, model.prompts, model.replica_cap(workload.workers))
        unplaced = deque([rest])
        while unplaced:
            worker = partial_plan.find_fullest(model, rest.prompts)
            if worker is None:
                worker = partial_plan.find_emptiest(model)
            if worker is None or not partial_plan.add_next(worker, unplaced, split=True):
                return None
    return partial_plan.allocation


def _fill_in_turn(workload: Workload, limit_s: float, small: float) -> Allocation | None:
    """Fill worker after worker: the rest of a split model, whole small models, a part of the next.

    A model is small if it takes at most the share `small` of `limit_s`. Returns None if `limit_s`
    is too short.
    """
    partial_plan = _PartialPlan(workload, limit_s)
    whole: list[ModelWork] = []
    unplaced: deque[_Unplaced] = deque()
    for model in _sort_by_length(workload):
        if model.session_s(model.prompts) <= small * limit_s:
            whole.append(model)
        else:
            replicas = model.replica_cap(workload.workers)
            unplaced.append(_Unplaced(model, model.prompts, replicas))
    for worker, prompts in enumerate(partial_plan.allocation):
        partial_plan.add_next(worker, unplaced, split=False)
        due = workload.capacity
        if unplaced:
            due = -(-len(whole) // (workload.workers - worker))
        reserved = bool(unplaced and not prompts)
        most = min(due, partial_plan.loads_left(worker) - reserved)
        partial_plan.add_whole(worker, whole, most)
        partial_plan.add_next(worker, unplaced, split=True)
        partial_plan.add_whole(worker, whole, partial_plan.loads_left(worker))
    if unplaced or whole:
        return None
    return partial_plan.allocation


def _build_plan(method: str, workload: Workload, allocation: Allocation) -> BatchPlan:
    return BatchPlan(method, schedule_sessions(workload, allocation), lower_bound_s(workload))


SMALL_SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
"""Shares of the makespan up to which a model is placed whole; the best of them counts."""
FILLINGS: Sequence[Callable[[Workload, float], Allocation | None]] = (
    _level,
    _fill_best_fit,
    *(partial(_fill_in_turn, small=small) for small in SMALL_SHARES),
)
HEURISTICS: Mapping[str, Callable[[Workload], BatchPlan]] = {
    "round-robin": plan_round_robin,
    "longest-first": plan_longest_first,
}
"""The baselines that plans are compared with; they need no OR-tools."""

TICKS = 100_000_000
TICKS_PER_PROMPT = 100_000
"""The best known makespan in integer ticks of time: rounding is then far below the gap."""
SEARCHERS = 4
"""Threads that search in different ways; a single one takes a hundred times as long on some small
workloads.
"""


def plan(workload: Workload, limit_s: float = 10.0) -> BatchPlan:
    """Return the shortest plan found within `limit_s`, never longer than the heuristic ones.

    Equally good plans may come out from run to run, as several threads search.

    Raises:
        ConfigError: The limit is no positive number, or OR-tools is missing.
    """
    require(
        0 < limit_s < inf, f"A plan cannot be searched for {limit_s} s.", "Give a positive number."
    )
    start = replace(plan_wrap_around(workload), method="ilp")
    if start.makespan_s < SHORTEST_S or start.optimal:
        return start
    return _IntegerProgram(workload, start).solve(limit_s)


def planner_work() -> Callable[[Sequence[tuple[Workload, float]]], list[BatchPlan | ConfigError]]:
    """Return the work of the planner's process: plans, or the errors, for arguments of `plan`."""

    def make_plan(arguments: tuple[Workload, float]) -> BatchPlan | ConfigError:
        try:
            return plan(*arguments)
        except ConfigError as error:
            return error

    return lambda bodies: list(map(make_plan, bodies))


@dataclass(frozen=True, slots=True)
class _ModelVariables:
    """The solver's variables of one model, per worker: `loads` (Y) and `prompts` (X)."""

    model: ModelWork
    loads: Sequence[Any]
    prompts: Sequence[Any]


class _IntegerProgram:
    """Minimize the makespan C over Y and X, from a known plan (equations 4 to 10).

    Times are integer ticks, rounded down, so that a bound that the solver proves holds for the real
    times.
    """

    def __init__(self, workload: Workload, start: BatchPlan) -> None:
        try:
            from ortools.sat.python import cp_model  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError(
                "Plans need OR-tools.", remedy="pip install 'shell-router[plan]'"
            ) from error
        self._cp: Any = cp_model
        self._workload = workload
        self._start = start
        most_prompts = max(model.prompts for model in workload.active_models)
        horizon = max(TICKS, TICKS_PER_PROMPT * most_prompts)
        self._tick_s = start.makespan_s / horizon
        self._model = self._cp.CpModel()
        self._uses = [self._model.new_bool_var(f"U {n}") for n in range(workload.workers)]
        self._variables = [self._add_model(model) for model in workload.active_models]
        self._makespan = self._model.new_int_var(self._to_ticks(start.bound_s), horizon, "C")
        self._add_workers()
        self._model.minimize(self._makespan)  # (10)

    def solve(self, limit_s: float) -> BatchPlan:
        """Return the solver's plan, or the one that it started from if that is no longer."""
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.relative_gap_limit = OPTIMAL_GAP / 2
        solver.parameters.random_seed = 0
        solver.parameters.num_workers = SEARCHERS
        status = solver.solve(self._model)
        bound_s = max(self._start.bound_s, solver.best_objective_bound * self._tick_s)
        best = replace(self._start, bound_s=bound_s)
        if status == self._cp.UNKNOWN:
            return best
        assert status in (self._cp.OPTIMAL, self._cp.FEASIBLE), solver.status_name(status)
        allocation: list[dict[str, int]] = [{} for _ in range(self._workload.workers)]
        for variables in self._variables:
            for worker, prompts in enumerate(variables.prompts):
                count = solver.value(prompts)
                if count:
                    allocation[worker][variables.model.name] = count
        solved = replace(best, sessions=schedule_sessions(self._workload, allocation))
        return min(best, solved, key=attrgetter("makespan_s"))

    def _add_model(self, model: ModelWork) -> _ModelVariables:
        """Add a model's variables and constraints, with the known plan as a hint."""
        program = self._model
        workers = range(self._workload.workers)
        saved_s = max(self._workload.saved_load_s(worker, model) for worker in workers)
        # a session of more prompts would be longer than the known plan
        most = model.fit_prompts(self._start.makespan_s * (1 + 1e-9) + saved_s)
        loads = [program.new_bool_var(f"Y {model.name} {n}") for n in workers]
        prompts = [program.new_int_var(0, most, f"X {model.name} {n}") for n in workers]
        program.add(sum(prompts) == model.prompts)  # (5)
        sessions = [session for session in self._start.sessions if session.model == model.name]
        hints = {session.worker: session.prompts for session in sessions}
        for n in workers:
            program.add(prompts[n] <= most * loads[n])  # (6)
            program.add(prompts[n] >= loads[n])
            program.add(self._uses[n] >= loads[n])
            program.add_hint(loads[n], n in hints)
            program.add_hint(prompts[n], hints.get(n, 0))
        replicas = model.replica_cap(self._workload.workers)
        program.add_linear_constraint(sum(loads), 1, replicas)  # (7), (8)
        return _ModelVariables(model, loads, prompts)

    def _add_workers(self) -> None:
        """Add the constraints of each worker's time and loads."""
        workload = self._workload
        together = self._to_ticks(workload.together_s) * (sum(self._uses) - 1)
        most = min(workload.capacity, len(self._variables))
        for n, is_used in enumerate(self._uses):
            self._model.add(sum(variables.loads[n] for variables in self._variables) <= most)  # (9)
            time = sum(self._sum_time(n, variables) for variables in self._variables)  # (4)
            begin = self._to_ticks(workload.first_s + workload.ready_at_s(n)) * is_used
            self._model.add(time + begin + together <= self._makespan)

    def _sum_time(self, worker: int, variables: _ModelVariables) -> Any:
        model = variables.model
        load = self._to_ticks(self._workload.session_s(worker, model, 0))
        per_prompt = self._to_ticks(model.per_prompt_s)
        return load * variables.loads[worker] + per_prompt * variables.prompts[worker]

    def _to_ticks(self, seconds: float) -> int:
        return int(seconds / self._tick_s)
