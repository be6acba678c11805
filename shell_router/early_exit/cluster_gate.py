"""Faster-MoA's gate (section 4.2, Algorithm 1): score embedded outputs as they complete."""

from collections.abc import Callable, Collection

import numpy as np

from shell_router.early_exit.algorithm1 import Features, Score, score, similarity
from shell_router.early_exit.gate import Judgement


class ClusterGate:
    """Exit when Q reaches `threshold`; without a threshold, exit with probability Q.

    Each completion computes only its own row of Sim.
    """

    def __init__(
        self,
        *,
        tau: float,
        min_completed: int,
        self_similarity: bool = True,
        threshold: float | None = None,
    ) -> None:
        self._tau = tau
        self._min_completed = min_completed
        self._self_similarity = self_similarity
        self._threshold = threshold
        self._confidences: list[float] = []
        self._features: list[Features] = []
        self._rows: list[list[float]] = []

    def add_text(self, agent: str, text: str, confidence: float) -> None:
        """Ignore unfinished outputs."""

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
        self._confidences.append(confidence)
        self._features.append(features)

    def score(self) -> Score | None:
        """Score the completed outputs; None while there are fewer than `min_completed`."""
        size = len(self._rows)
        if size < self._min_completed:
            return None
        lower = np.array([row + [0.0] * (size - len(row)) for row in self._rows], dtype=np.float64)
        return score(self._confidences, lower, self._tau, self_similarity=self._self_similarity)

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
        if self._threshold is None:
            return Judgement(drawn < scored.probability, scored, drawn)
        return Judgement(scored.probability >= self._threshold, scored, self._threshold)
