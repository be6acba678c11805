"""Runs one request through a topology's steps, one after the other, as its rules choose (CoServe, section 2.1)."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from shell_router.core.events import Event, StepChosen
from shell_router.core.generation import UNSEEN_TOKENS
from shell_router.errors import DeadlineExceeded
from shell_router.execution.deciding import Deciding, Judges
from shell_router.execution.requests import Answer, MoaRequest
from shell_router.topology import Conditional, Graph, Step, Topology
from shell_router.topology.rules import END, START, Rule

Emit = Callable[[Event], None]


class RunsAgents(Protocol):
    """Runs a request through a graph of agents: Executor."""

    async def run(self, topology: Topology, request: MoaRequest, emit: Emit) -> Answer: ...


class StepExecutor:
    """Answers requests by topologies of both kinds: graphs of agents, which `agents` runs, and steps."""

    def __init__(self, agents: RunsAgents, judges: Judges, *, clock: Callable[[], float]) -> None:
        self._agents = agents
        self._judges = judges
        self._clock = clock

    async def run(self, topology: Graph, request: MoaRequest, emit: Emit) -> Answer:
        """Run `request` to its answer, telling `emit` what happens, as it happens.

        Raises what `Executor.run` raises for the step that runs; what is refused before the first step has run is
        refused before anything is told. However it ends, nothing of it is left running.
        """
        if isinstance(topology, Topology):
            return await self._agents.run(topology, request, emit)
        try:
            async with asyncio.timeout(request.timeout_s):
                return await _Walk(topology, request, self._agents, self._judges, _Held(emit), self._clock).answer()
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{topology.name!r} gave no answer within {request.timeout_s:g} s.",
                remedy="Allow more time, or ask a topology with fewer steps.",
            ) from error


class _Held:
    """Passes events on; the choice of the first step waits for the first event of its run.

    A stream's head goes out with the first event, and until then a request can be refused with a status.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._waiting: list[Event] | None = []

    def hold(self, event: Event) -> None:
        """Tell it when the first step has begun."""
        if self._waiting is None:
            self._emit(event)
        else:
            self._waiting.append(event)

    def tell(self, event: Event) -> None:
        """Tell it, and before it what was held."""
        held, self._waiting = self._waiting, None
        for one in held or ():
            self._emit(one)
        self._emit(event)


class _Walk:
    """One request on its way through the steps."""

    def __init__(
        self,
        topology: Conditional,
        request: MoaRequest,
        agents: RunsAgents,
        judges: Judges,
        told: _Held,
        clock: Callable[[], float],
    ) -> None:
        self._topology = topology
        self._request = request
        self._agents = agents
        self._told = told
        self._clock = clock
        self._deciding = Deciding(topology, request, judges, told.hold, clock=clock)
        self._answers: dict[str, Answer] = {}

    async def answer(self) -> Answer:
        """The output of the last step; usage of all steps that ran."""
        step = await self._next(START, self._topology.start)
        assert step is not None, "the start leads to a step"
        while True:
            answer = await self._asked(step)
            self._answers[step.id] = answer
            self._deciding.ended(answer)
            following = await self._next(step.id, step.then)
            if following is None:
                usage = {agent: spent for one in self._answers.values() for agent, spent in one.agents.items()}
                return replace(answer, agents=usage)
            step = following

    async def _next(self, after: str, rules: Sequence[Rule]) -> Step | None:
        started_s = self._clock()
        choice = await self._deciding.choice(rules)
        step = None if choice.go == END else self._topology.steps[choice.go]
        root, text = (step.root, "") if step is not None else self._answer_of(after)
        self._told.hold(StepChosen(self._clock(), started_s, after, choice.go, root, choice.rule, choice.why, text))
        return step

    def _answer_of(self, last: str) -> tuple[str, str]:
        """Who has answered, and what, if that was held back."""
        step = self._topology.steps[last]
        return step.root, "" if step.is_last else self._answers[last].text

    async def _asked(self, step: Step) -> Answer:
        given = tuple((one, self._answers[one].text) for one in step.reads if one in self._answers)
        topology = step.topology
        if given:
            agent = replace(topology.root, given=given)
            topology = replace(topology, agents={agent.id: agent})
        return await self._agents.run(topology, self._request_to(step), self._told.tell)

    def _request_to(self, step: Step) -> MoaRequest:
        """The client's own sampling is for answers; a step that cannot give one takes its seed alone.

        Its id is numbered, as engines abort every request whose id begins with the given one.
        """
        asked, number = self._request, len(self._answers)
        sampling = _sampling(step, asked.sampling)
        return replace(asked, id=f"{asked.id}.{number}", sampling=sampling, confidence=step.reads_confidence)


def _sampling(step: Step, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the step's root is asked with beside its own parameters."""
    if step.is_last:
        return asked
    wanted = asked if step.may_be_last else {name: value for name, value in asked.items() if name == "sampling_seed"}
    return {"stream_interval": step.topology.root.sampling.get("stream_interval", UNSEEN_TOKENS), **wanted}
