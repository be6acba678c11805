"""Chooses the threshold of an early exit: the most aggressive one whose loss of accuracy stays within a bound.

Every threshold makes a topology of its own; all are asked the same questions with the same seeds as the topology
without early exit, so that what differs between them is the exits' doing.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from shell_router.core.intervals import Interval
from shell_router.errors import ConfigError
from shell_router.evaluation.rows import Row
from shell_router.topology import Topology

DECIDED_BY_THRESHOLD = ("threshold", "in_flight")
_REMEDY = "Give it `early_exit: {policy: in_flight}` or `{policy: threshold}`."


@dataclass(frozen=True, slots=True)
class Choice:
    """The threshold chosen, and what it loses against no early exit, in points of accuracy."""

    threshold: float
    loss: Interval

    def within(self, bound: float) -> bool:
        """Whether the whole interval stays within the bound, not only the loss that was measured."""
        return self.loss.high <= bound


def choose(rows: Mapping[float, Row], bound: float) -> Choice | None:
    """The lowest threshold that, with all above it, loses `bound` points at most; None where the highest loses more.

    Going down from the cautious end, the first that loses more ends the search: one below it that loses less by luck
    is not believed.
    """
    chosen = None
    for threshold in sorted(rows, reverse=True):
        loss = loss_of(rows[threshold])
        if loss.value > bound:
            break
        chosen = Choice(threshold, loss)
    return chosen


def loss_of(row: Row) -> Interval:
    """What a setting loses against the baseline, in points of accuracy; below 0 where it gains."""
    assert row.difference is not None
    lost = (0.0 - 100 * end for end in (row.difference.value, row.difference.high, row.difference.low))  # never -0.0
    return Interval(*lost)


def check_thresholds(thresholds: Sequence[float]) -> None:
    """Raises ConfigError unless they are different numbers from 0 to 1, at least one."""
    if not thresholds:
        raise ConfigError("--thresholds names none.", remedy="Name at least one, as in --thresholds 0.8.")
    for one in thresholds:
        if not 0 <= one <= 1:
            raise ConfigError(f"--thresholds: {one:g} is not between 0 and 1.", remedy="Leave it out.")
        if thresholds.count(one) > 1:
            raise ConfigError(f"--thresholds: {one:g} is named more than once.", remedy="Name it once.")


def check_calibrates(topology: Topology) -> None:
    """Raises ConfigError unless thresholds decide all of the topology's early exits."""
    exits = {cluster.id: cluster.early_exit.policy for cluster in topology.clusters if cluster.early_exit}
    if not exits:
        raise ConfigError(f"topology {topology.name!r} has no early exit that a threshold decides.", remedy=_REMEDY)
    others = [name for name, policy in exits.items() if policy not in DECIDED_BY_THRESHOLD]
    if others:
        raise ConfigError(
            f"topology {topology.name!r}: no threshold decides the early exit of {', '.join(others)}.", remedy=_REMEDY
        )


def variants(document: Mapping[str, Any], name: str, thresholds: Sequence[float]) -> dict[float | None, dict[str, Any]]:
    """A topology's document with each threshold, and under None without early exit; each with a name of its own."""
    made: dict[float | None, dict[str, Any]] = {None: _with(document, f"{name}-without-exit", None)}
    return made | {one: _with(document, f"{name}-at-{one!r}", one) for one in thresholds}


def _with(document: Mapping[str, Any], name: str, threshold: float | None) -> dict[str, Any]:
    changed: dict[str, Any] = deepcopy(dict(document)) | {"name": name}
    for holder in (changed, *changed.get("clusters", {}).values()):
        if threshold is None:
            holder["early_exit"] = False
        elif isinstance(holder.get("early_exit"), dict):
            holder["early_exit"]["threshold"] = threshold
    return changed
