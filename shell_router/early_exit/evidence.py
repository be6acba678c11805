"""Thresholds of early exits, calibrated on clusters that ran to their end.

In a complete run the gate only watches, and notes the leading answer at each level of its score.
An exit there would have changed the answer of a reader, which had all outputs, if that is another.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shell_router.early_exit.settings import EarlyExit

log = logging.getLogger(__name__)

LEVELS = 100  # a threshold is a whole number of hundredths
_MOST_CLUSTERS = 1000  # topologies come and go while the router runs
_LONGEST = 2000  # outcomes, after which the older ones count half


class Judged(NamedTuple):
    """The key of a calibration: the clusters of a topology with equal models and settings.

    `agents` is a hash of the cluster's agents, which a changed topology file changes.
    """

    topology: str
    models: tuple[str, ...]
    settings: EarlyExit
    agents: int


def _zeros() -> list[float]:
    return [0.0] * (LEVELS + 1)


@dataclass(slots=True)
class _Outcomes:
    """The clusters seen; by level, exits that would have fallen there, and changed answers."""

    seen: float = 0.0
    exits: list[float] = field(default_factory=_zeros)
    changed: list[float] = field(default_factory=_zeros)
    threshold: float = math.inf

    def add(self, watched: Sequence[str | None], answers: Sequence[str]) -> None:
        if self.seen >= _LONGEST:
            self.seen /= 2
            self.exits = [count / 2 for count in self.exits]
            self.changed = [count / 2 for count in self.changed]
        self.seen += 1
        for level, leader in enumerate(watched):
            self.exits[level] += 1
            kept = 0 if leader is None else answers.count(leader)
            self.changed[level] += 1 - kept / len(answers)


class ExitEvidence:
    """The calibrated threshold of each cluster, updated by every complete run.

    Args:
        share: The share of runs that stay complete, to go on learning.
    """

    def __init__(self, share: float = 0.0) -> None:
        self.share = share
        self._outcomes: OrderedDict[Judged, _Outcomes] = OrderedDict()

    def find_threshold(self, judged: Judged) -> float:
        """Return the score at which the cluster exits; inf while evidence does not allow any."""
        return self._outcomes.get(judged, _Outcomes()).threshold

    def observe(
        self,
        judged: Judged,
        watched: Sequence[str | None],
        answers: Sequence[str],
        allowed: float,
    ) -> None:
        """Learn from a complete cluster.

        Args:
            judged: The cluster.
            watched: The leading answer when the gate's score first reached each level.
            answers: The answers of the cluster's readers, at least one.
            allowed: The share of their answers that may change.
        """
        outcomes = self._outcomes.setdefault(judged, _Outcomes())
        self._outcomes.move_to_end(judged)
        if len(self._outcomes) > _MOST_CLUSTERS:
            self._outcomes.popitem(last=False)
        outcomes.add(watched, answers)
        before = outcomes.threshold
        outcomes.threshold = _choose_threshold(outcomes, allowed)
        if outcomes.threshold != before or outcomes.seen == 1:
            log.info(
                "%s (%s) exits at %g (inf: never) after %g outcomes; at least %.0f are needed",
                judged.topology,
                ", ".join(judged.models),
                outcomes.threshold,
                outcomes.seen,
                1 / allowed - 1,
            )


def _choose_threshold(outcomes: _Outcomes, allowed: float) -> float:
    """Return the lowest threshold at which at most the share `allowed` of answers changes.

    The counted share of n outcomes is corrected to (n share + 1) / (n + 1), so that the bound holds
    for the next outcome (Angelopoulos et al., Conformal Risk Control, 2022).
    """
    threshold = math.inf
    rates = fit_falling(outcomes.changed, outcomes.exits)
    for level in range(LEVELS, 0, -1):
        changed = rates[level] * outcomes.exits[level]
        if (changed + 1) / (outcomes.seen + 1) > allowed:
            break
        threshold = level / LEVELS
    return threshold


def fit_falling(counts: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Fit rates that never rise to `counts` / `weights` (isotonic regression by pooling neighbors).

    Args:
        counts: The events at each level.
        weights: The trials at each level; 0 takes the rate of the level before.

    Returns:
        The rate of each level.
    """
    blocks: list[tuple[float, float, int]] = []
    for level in zip(counts, weights, strict=True):
        pooled = (*level, 1)
        while blocks and pooled[0] * blocks[-1][1] >= blocks[-1][0] * pooled[1]:
            count, weight, size = blocks.pop()
            pooled = (pooled[0] + count, pooled[1] + weight, pooled[2] + size)
        blocks.append(pooled)
    return [count / (weight or 1) for count, weight, size in blocks for _ in range(size)]
