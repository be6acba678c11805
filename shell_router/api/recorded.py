"""One run's lines for the trace files (docs/model-choice.md names their fields)."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shell_router.core.events import AgentFinished, AgentPassedOn, AgentTokens, Event
from shell_router.core.model import ServedModel
from shell_router.execution import (
    AgentRequest,
    KnownPrompt,
    MoaRequest,
    known_of_agent,
    known_of_request,
    stages_of,
    workflow_of,
)
from shell_router.telemetry import Recorder, Trace
from shell_router.telemetry.agent_trace import AgentTrace, since
from shell_router.topology import Graph, Topology


@dataclass(frozen=True, slots=True)
class Place:
    """An agent's place in its program, and what was known of its prompt."""

    workflow: str
    stage: str
    reads: tuple[str, ...]
    known: KnownPrompt


@dataclass(frozen=True, slots=True)
class Run:
    """What a run's lines say beside its trace."""

    program: str
    tenant: str
    places: Callable[[], Mapping[str, Place]]


def run_of_topology(topology: Graph, request: MoaRequest) -> Run:
    """A topology's run; each step of one with steps is a workflow of its own."""

    def places() -> dict[str, Place]:
        return {agent: place for part in topology.parts for agent, place in _places(part, topology, request).items()}

    return Run(request.id, request.tenant, places)


def _places(part: Topology, topology: Graph, request: MoaRequest) -> dict[str, Place]:
    workflow, stages = workflow_of(part), stages_of(part)
    return {
        agent.id: Place(
            workflow, stages[agent.id], topology.waits_for[agent.id], known_of_agent(agent, request.messages)
        )
        for agent in part.agents.values()
    }


def run_of_agent(workflow: str, request: AgentRequest) -> Run:
    """An agent of somebody else's program."""
    return Run(
        request.program,
        request.tenant,
        lambda: {request.agent: Place(workflow, request.agent, request.reads, known_of_request(request))},
    )


class Recording:
    """Gathers what the trace does not keep, and hands all of it to the recorder in the end."""

    def __init__(self, recorder: Recorder, run: Run, trace: Trace, models: Mapping[str, ServedModel]) -> None:
        self._recorder = recorder
        self._run = run
        self._trace = trace
        self._models = models
        self._texts: dict[str, list[str]] = {}

    def observe(self, event: Event) -> None:
        """Keep an output's text, where texts are wanted."""
        if self._recorder.prompts and isinstance(event, AgentTokens | AgentPassedOn):
            self._texts.setdefault(event.agent, []).append(event.text)

    def end(self) -> None:
        """The run has ended."""
        self._recorder.add(lambda: list(self._lines()))

    def _lines(self) -> Iterator[dict[str, Any]]:
        for agent, place in self._run.places().items():
            ran = self._trace.agents.get(agent)
            if ran is not None and ran.model in self._models:
                yield self._line(agent, place, ran)

    def _line(self, agent: str, place: Place, ran: AgentTrace) -> dict[str, Any]:
        tokens = place.known.tokens(self._models[ran.model].tokenizer)
        origin_s = self._trace.started_s
        line = {
            "program": f"{self._run.tenant}/{self._run.program}",
            "topology": place.workflow,
            "agent": agent,
            "stage": place.stage,
            "reads": list(place.reads),
            "model": ran.model,
            "state": ran.state,
            "system_tokens": tokens.system,
            "user_tokens": tokens.user,
            "known_tokens": tokens.known,
            "prompt_tokens": ran.ready.prompt_tokens if ran.ready else None,
            "output_tokens": ran.end.completion_tokens if isinstance(ran.end, AgentFinished) else ran.tokens,
            "started_at": self._trace.wall_s,
            "started_s": since(ran.started_s, origin_s),
            "ready_s": None if ran.ready is None else since(ran.ready.at_s, origin_s),
            "first_token_s": None if ran.first_token_s is None else since(ran.first_token_s, origin_s),
            "ended_s": None if ran.end is None else since(ran.end.at_s, origin_s),
        }
        return line | (self._text(agent, place.known) if self._recorder.prompts else {})

    def _text(self, agent: str, known: KnownPrompt) -> dict[str, str]:
        output = "".join(self._texts.get(agent, ()))
        return {"system": known.system, "user": known.user, "rest": known.rest, "output": output}
