"""What simulated agents are asked and write: drawn by question and agent, whatever the topology and its policies."""

import math
from collections.abc import Callable
from random import Random

from shell_router.core.generation import Generation
from shell_router.engines.simulated import Written
from shell_router.engines.simulated.embedder import closing
from shell_router.engines.simulated.text import filler
from shell_router.simulation.settings import Workload

RIGHT = "1"


class Outputs:
    """Equal seeds, questions and agents give equal outputs, so that two settings are asked the same."""

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._seed = seed

    def question(self, question: str) -> str:
        """The text that the client asks."""
        draws = self._draws(question)
        return filler(self._workload.question.at(draws.random(), draws.gauss()), f"{self._seed}/{question}")

    def by(self, model: str) -> Callable[[Generation], Written]:
        """What the agents of a model write. The router calls requests `question.number.agent`."""
        length = self._workload.outputs[model]

        def write(request: Generation) -> Written:
            question, _, agent = request.rid.split(".", 2)
            draws = self._draws(f"{question}/{agent}")
            tokens = length.at(draws.random(), draws.gauss())
            answer = RIGHT if draws.random() < self._workload.right else f"{agent}'s own"
            end = closing(question, answer)
            return Written.after_filler(
                tokens, f"{self._seed}/{question}/{agent}", end, math.log(self._workload.confidence)
            )

        return write

    def _draws(self, name: str) -> Random:
        return Random(f"{self._seed}/{name}")
