"""The protocol of early exit's gates."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from shell_router.early_exit.algorithm1 import Features, Score


@dataclass(frozen=True, slots=True)
class Judgement:
    """A gate's decision: whether the cluster's unfinished agents are cut off now.

    Attributes:
        score: The score of the outputs, for gates that compute one.
        compared_with: The draw or threshold that the score had to reach.
        sources: Agents whose complete outputs may stand for the whole cluster, the most confident
            first, for policies with `names_sources`.
        answer: The leading answer, None if there is none.
    """

    exits: bool
    score: Score | None = None
    compared_with: float = 0.0
    sources: tuple[str, ...] = ()
    answer: str | None = None


class Gate(Protocol):
    """The judge of one cluster in one run."""

    def add_text(self, agent: str, text: str, confidence: float) -> None:
        """Take in text that `agent` adds; only for policies that `read_streams`.

        Args:
            agent: The agent's id.
            text: The added text.
            confidence: The confidence of the agent's whole output so far.
        """
        return

    def add_output(
        self, agent: str, text: str, confidence: float, features: Features | None
    ) -> None:
        """Take in the complete output of `agent`.

        Args:
            agent: The agent's id.
            text: Its whole output.
            confidence: The confidence of that output.
            features: Its embedding, for policies that embed. Then this runs on a worker thread.

        Raises:
            ValueError: The output cannot be judged.
        """

    def judge(self, running: Collection[str], draw: Callable[[], float]) -> Judgement | None:
        """Decide whether the `running` agents are cut off; None if too little has completed."""
