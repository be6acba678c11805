"""Early exit once the first agent of a cluster is sure of its answer."""

import math
from collections.abc import Callable, Collection

from shell_router.early_exit.algorithm1 import Features, Score
from shell_router.early_exit.answers import cast_ballot
from shell_router.early_exit.gate import Gate, Judgement

READ_CHARACTERS = 8192
"""An answer is read in the end of its text: the event loop waits meanwhile."""


class FirstAnswerGate(Gate):
    """Exit when 1 - sqrt(1 - C), of the confidence C of the agent `first`, reaches `threshold`.

    The square root spreads the confidences close to 1, which are those of most outputs.
    """

    def __init__(self, first: str, threshold: float) -> None:
        self._first = first
        self._threshold = threshold
        self._judgement: Judgement | None = None

    def add_output(
        self, agent: str, text: str, confidence: float, features: Features | None
    ) -> None:
        """Judge the output of the first agent, and ignore others."""
        if agent == self._first:
            score = 1.0 - math.sqrt(max(0.0, 1.0 - confidence))
            exits = score >= self._threshold
            self._judgement = Judgement(
                exits,
                Score(confidence, 1.0, 1.0, score),
                self._threshold,
                (agent,) * exits,
                cast_ballot(agent, text[-READ_CHARACTERS:], confidence, is_cut=False).answer,
            )

    def judge(self, running: Collection[str], draw: Callable[[], float]) -> Judgement | None:
        """Return the same decision after each completion; None before the first agent's."""
        return self._judgement
