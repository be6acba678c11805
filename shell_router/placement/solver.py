"""OR-tools CP-SAT, for the algorithms that are exact."""

from typing import Any

from shell_router.errors import ConfigError

SEARCHERS = 8


def cp_sat() -> Any:
    """The module `cp_model`. Raises ConfigError without OR-tools."""
    try:
        from ortools.sat.python import cp_model  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            "This algorithm needs OR-tools.", remedy="pip install 'shell-router[plan]', or use --algorithm swap."
        ) from error
    return cp_model


def solved(cp: Any, model: Any, limit_s: float) -> Any:
    """The solver with what it found for `model` within `limit_s`. Raises ConfigError if it found nothing."""
    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = SEARCHERS
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        raise ConfigError(
            f"The solver found no placement within {limit_s:g} s ({solver.status_name(status)}).",
            remedy="Raise --limit-s, or use --algorithm swap.",
        )
    return solver
