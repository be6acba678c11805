"""A run's lines in the trace files (docs/how-to/choose-models.md). Imported where a deployment asks for them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shell_router.core.engine import ServedModel
from shell_router.core.events import AgentFinished, AgentTokens, AggregationSkipped, Event
from shell_router.moa.planning import (
    AGENT_REQUEST,
    KnownPrompt,
    known_of_agent,
    known_of_request,
    stages_of,
    workflow_of,
)
from shell_router.moa.requests import AgentRequest, MoaRequest
from shell_router.telemetry import Trace
from shell_router.telemetry.recorder import Recorder
from shell_router.telemetry.trace import AgentTrace, since
from shell_router.topology import Graph


@dataclass(frozen=True, slots=True)
class RecordedAgent:
    """An agent's place in its program, and what was known of its prompt."""

    workflow: str
    stage: str
    reads: tuple[str, ...]
    known: KnownPrompt


def recorded_agents(request: MoaRequest | AgentRequest, graph: Graph | None) -> dict[str, RecordedAgent]:
    """The agents of `graph`, each step of which is a workflow of its own, or the one of a framework's request."""
    if isinstance(request, AgentRequest):
        known = known_of_request(request)
        return {request.agent: RecordedAgent(AGENT_REQUEST, request.agent, request.reads, known)}
    assert graph is not None
    found = {}
    for part in graph.parts:
        workflow, stages = workflow_of(part), stages_of(part)
        for agent in part.agents.values():
            known, reads = known_of_agent(agent, request.messages), graph.waits_for[agent.id]
            found[agent.id] = RecordedAgent(workflow, stages[agent.id], reads, known)
    return found


class Recording:
    """Gathers what the trace does not keep, and hands all of it to the recorder in the end."""

    def __init__(
        self,
        recorder: Recorder,
        request: MoaRequest | AgentRequest,
        graph: Graph | None,
        trace: Trace,
        models: Mapping[str, ServedModel],
    ) -> None:
        self._recorder = recorder
        self._request = request
        self._graph = graph
        self._trace = trace
        self._models = models
        self._texts: dict[str, list[str]] = {}

    def observe(self, event: Event) -> None:
        """Keep an output's text, where texts are wanted."""
        if self._recorder.prompts and isinstance(event, AgentTokens | AggregationSkipped):
            self._texts.setdefault(event.agent, []).append(event.text)

    def end(self) -> None:
        """The run has ended. Its lines are made in the recorder's thread."""
        self._recorder.add(lambda: list(self._lines()))

    def _lines(self) -> Iterator[dict[str, Any]]:
        for agent, known in recorded_agents(self._request, self._graph).items():
            ran = self._trace.agents.get(agent)
            if ran is not None and ran.model in self._models:
                yield self._line(agent, known, ran)

    def _line(self, agent: str, recorded: RecordedAgent, ran: AgentTrace) -> dict[str, Any]:
        system_tokens, user_tokens, known_tokens = recorded.known.tokens(self._models[ran.model].tokenizer)
        origin_s = self._trace.started_s
        program = self._request.program if isinstance(self._request, AgentRequest) else self._request.id
        line = {
            "program": f"{self._trace.tenant}/{program}",
            "topology": recorded.workflow,
            "agent": agent,
            "stage": recorded.stage,
            "reads": list(recorded.reads),
            "model": ran.model,
            "state": ran.state,
            "system_tokens": system_tokens,
            "user_tokens": user_tokens,
            "known_tokens": known_tokens,
            "prompt_tokens": ran.ready.prompt_tokens if ran.ready else None,
            "output_tokens": ran.end.completion_tokens if isinstance(ran.end, AgentFinished) else ran.tokens,
            "started_at": self._trace.wall_s,
            "started_s": since(ran.started_s, origin_s),
            "ready_s": None if ran.ready is None else since(ran.ready.at_s, origin_s),
            "first_token_s": None if ran.first_token_s is None else since(ran.first_token_s, origin_s),
            "ended_s": None if ran.end is None else since(ran.end.at_s, origin_s),
        }
        return line | (self._text(agent, recorded.known) if self._recorder.prompts else {})

    def _text(self, agent: str, known: KnownPrompt) -> dict[str, str]:
        output = "".join(self._texts.get(agent, ()))
        return {"system": known.system, "user": known.user, "rest": known.rest, "output": output}
