"""The integer program of MOSAIC (equations 4 to 10), solved by OR-tools CP-SAT."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from shell_router.batch.baselines import longest_first, round_robin, split
from shell_router.batch.plan import OPTIMAL_GAP, Expert, Plan, Shares, Workload, sessions_of, shares_of, work_bound_s
from shell_router.errors import ConfigError

TICKS = 100_000_000
TICKS_PER_PROMPT = 100_000
"""The best plan known before solving takes so many integer units of time: rounding is then far below the gap."""
SEARCHERS = 8
"""Threads that search in different ways; one alone takes a hundred times as long on some small workloads."""


def plan(workload: Workload, limit_s: float = 10.0, *, seed: int = 0) -> Plan:
    """The shortest plan found within `limit_s`, never longer than the baselines that keep to the caps.

    Which of several plans that are equally good is found may change from run to run, as several threads search.
    Raises ConfigError for a limit that is no positive number, and without OR-tools.
    """
    if not 0 < limit_s < inf:
        raise ConfigError(f"A plan cannot be looked for during {limit_s} s.", remedy="Give a positive number.")
    known = [longest_first(workload), round_robin(workload), split(workload)]
    start = min((made for made in known if made), key=lambda made: made.makespan_s)
    if not start.makespan_s:
        return Plan("ilp", start.sessions, 0.0)
    return _Program(workload, start).solved(limit_s, seed)


@dataclass(slots=True)
class _Placement:
    """Of one expert, per worker: whether it is loaded (Y), and how many prompts it gets (X)."""

    expert: Expert
    loaded: Sequence[Any]
    prompts: Sequence[Any]


class _Program:
    """Minimise the makespan C over Y and X, from a plan that is known.

    Times are integers, rounded down, so that what the solver proves is true of the real times.
    """

    def __init__(self, workload: Workload, start: Plan) -> None:
        self._cp = _solver()
        self._workload = workload
        self._start = start
        self._ticks_in_all = max(TICKS, TICKS_PER_PROMPT * max(expert.prompts for expert in workload.asked))
        self._tick_s = start.makespan_s / self._ticks_in_all
        self._model = self._cp.CpModel()
        self._placements = [self._placed(expert) for expert in workload.asked]
        self._makespan = self._model.new_int_var(0, self._ticks_in_all, "C")
        self._limit_workers()
        self._hint()
        self._model.minimize(self._makespan)  # (10)

    def solved(self, limit_s: float, seed: int) -> Plan:
        """What the solver finds, or the plan it started from if that is no longer."""
        solver = self._cp.CpSolver()
        solver.parameters.max_time_in_seconds = limit_s
        solver.parameters.relative_gap_limit = OPTIMAL_GAP / 2
        solver.parameters.random_seed = seed
        solver.parameters.num_workers = SEARCHERS
        status = solver.solve(self._model)
        assert status in (self._cp.OPTIMAL, self._cp.FEASIBLE, self._cp.UNKNOWN), solver.status_name(status)
        bound_s = max(work_bound_s(self._workload), solver.best_objective_bound * self._tick_s)
        found = [self._start.sessions]
        if status != self._cp.UNKNOWN:
            found.append(sessions_of(self._workload, self._shares(solver)))
        return min((Plan("ilp", sessions, bound_s) for sessions in found), key=lambda made: made.makespan_s)

    def _placed(self, expert: Expert) -> _Placement:
        model, workers = self._model, range(self._workload.workers)
        most = expert.fitting(self._start.makespan_s * (1 + 1e-9))  # more would take longer than what is known
        loaded = [model.new_bool_var(f"Y {expert.name} {worker}") for worker in workers]
        prompts = [model.new_int_var(0, most, f"X {expert.name} {worker}") for worker in workers]
        model.add(sum(prompts) == expert.prompts)  # (5)
        for is_loaded, count in zip(loaded, prompts, strict=True):
            model.add(count <= most * is_loaded)  # (6)
            model.add(count >= is_loaded)
        model.add_linear_constraint(sum(loaded), 1, expert.replicas(self._workload.workers))  # (7)
        return _Placement(expert, loaded, prompts)

    def _limit_workers(self) -> None:
        for worker in range(self._workload.workers):
            self._model.add(
                sum(of.loaded[worker] for of in self._placements) <= min(self._workload.capacity, len(self._placements))
            )  # (9)
            time = sum(
                self._ticks(of.expert.session_s(0)) * of.loaded[worker]
                + self._ticks(of.expert.per_prompt_s) * of.prompts[worker]
                for of in self._placements
            )  # (4)
            self._model.add(time <= self._makespan)

    def _ticks(self, seconds: float) -> int:
        return int(seconds / self._tick_s)

    def _hint(self) -> None:
        shares = shares_of(self._workload, self._start)
        for of in self._placements:
            for share, loaded, prompts in zip(shares, of.loaded, of.prompts, strict=True):
                self._model.add_hint(loaded, of.expert.name in share)
                self._model.add_hint(prompts, share.get(of.expert.name, 0))

    def _shares(self, solver: Any) -> Shares:
        return [
            {
                of.expert.name: solver.value(of.prompts[worker])
                for of in self._placements
                if solver.value(of.prompts[worker])
            }
            for worker in range(self._workload.workers)
        ]


def _solver() -> Any:
    try:
        from ortools.sat.python import cp_model  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError("Plans need OR-tools.", remedy="pip install 'shell-router[plan]'") from error
    return cp_model
