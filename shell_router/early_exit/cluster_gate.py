"""Faster-MoA's gate (section 4.2, Algorithm 1): score embedded outputs as they complete."""

from collections.abc import Callable, Collection

import numpy as np

from shell_router.early_exit.algorithm1 import Features, Score, score, similarity
from shell_router.early_exit.answers import Ballot, cast_ballot, elect
from shell_router.early_exit.gate import Gate, Judgement


class ClusterGate(Gate):
    """Exit when Q reaches `threshold`; without a threshold, exit with probability Q.

    Each completion computes only its own row of Sim.
    """

    def __init__(
        self,
        *,
        tau: float | None,
        min_completed: int,
        threshold: float | None = None,
    ) -> None:
        self._tau = tau
        self._min_completed = min_completed
        self._threshold = threshold
        self._ballots: list[Ballot] = []
        self._features: list[Features] = []
        self._rows: list[list[float]] = []

    def add_output(
        self, agent: str, text: str, confidence: float, features: Features | None
    ) -> None:
        """Take in a completed output (lines 4 to 9).

        Raises:
            ValueError: The features come from another embedding model than earlier ones.
        """
        assert features is not None, "this policy embeds"
        row = [similarity(earlier, features) for earlier in self._features]
        self._rows.append([*row, 1.0])
        self._ballots.append(cast_ballot(agent, text, confidence, is_cut=False))
        self._features.append(features)

    def score(self) -> Score | None:
        """Score the completed outputs; None while there are fewer than `min_completed`."""
        size = len(self._rows)
        if size < self._min_completed:
            return None
        lower = np.array([row + [0.0] * (size - len(row)) for row in self._rows], dtype=np.float64)
        return score([ballot.confidence for ballot in self._ballots], lower, self._tau)

    def judge(self, running: Collection[str], draw: Callable[[], float]) -> Judgement | None:
        """Decide after a completion (line 14); None without a score.

        Args:
            running: Ignored.
            draw: Gives a uniform number in [0, 1).
        """
        scored = self.score()
        if scored is None:
            return None
        drawn = draw()
        leader = elect(self._ballots, 0, by_confidence=True)
        answer = None if leader is None else leader.answer
        if self._threshold is None:
            return Judgement(drawn < scored.probability, scored, drawn, answer=answer)
        exits = scored.probability >= self._threshold
        return Judgement(exits, scored, self._threshold, answer=answer)
