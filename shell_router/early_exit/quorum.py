"""Early exit once enough agents of a cluster have ended, whatever they wrote."""

from collections.abc import Callable, Collection

from shell_router.early_exit.algorithm1 import Features
from shell_router.early_exit.gate import Gate, Judgement


class QuorumGate(Gate):
    """Exit when exactly `min_completed` agents have ended."""

    def __init__(self, min_completed: int) -> None:
        self._min_completed = min_completed
        self._completed = 0

    def add_output(
        self, agent: str, text: str, confidence: float, features: Features | None
    ) -> None:
        """Count the agent."""
        self._completed += 1

    def judge(self, running: Collection[str], draw: Callable[[], float]) -> Judgement:
        """Decide after a completion. Later completions do not exit again."""
        return Judgement(exits=self._completed == self._min_completed)
