"""The activity table: output tokens that each model is still expected to write (Chimera, 3.5)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from shell_router.core.events import AgentErred, AgentFinished, AgentPassedOn, AgentStopped, Event

Emit = Callable[[Event], None]
ENDS = (AgentFinished, AgentPassedOn, AgentStopped, AgentErred)


class Activity:
    """The predicted tokens of every agent that was given to a model and has not ended, however it will."""

    def __init__(self) -> None:
        self._tokens: dict[str, dict[tuple[int, str], float]] = {}
        self._programs = 0

    def in_flight(self, model: str) -> float:
        """P_m = the sum over the entries of `model` (Algorithm 1, line 10)."""
        return sum(self._tokens.get(model, {}).values())

    @contextmanager
    def program(self, expected: Mapping[str, tuple[str, float]], emit: Emit) -> Iterator[Emit]:
        """Enter the agents of one run, each with its model and tokens, for as long as the context is open.

        An agent leaves with the event that tells its end, which has to pass through the function that this gives;
        those without one leave with the context. All stages enter at once: together those of a chain hold what the
        paper's entry of the running stage does, the tokens of it and of all that follow.
        """
        self._programs += 1
        program = self._programs
        for agent, (model, tokens) in expected.items():
            self._tokens.setdefault(model, {})[program, agent] = tokens

        def leave(agent: str) -> None:
            if agent in expected:
                self._tokens[expected[agent][0]].pop((program, agent), None)

        def watched(event: Event) -> None:
            if isinstance(event, ENDS):
                leave(event.agent)
            emit(event)

        try:
            yield watched
        finally:
            for agent in expected:
                leave(agent)
