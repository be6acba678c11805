"""A run's lines in the trace files (docs/how-to/choose-models.md).

This module is imported where a deployment asks for them.
"""

from collections.abc import Iterator, Mapping, Sequence

from shell_router.core.engine import ServedModel
from shell_router.core.events import AgentFinished, AgentTokens, AggregationSkipped, Event
from shell_router.core.exact_json import NewValues
from shell_router.moa.expectations import (
    AGENT_REQUEST,
    KnownPrompt,
    name_workflow,
    number_stages,
    read_agent_prompt,
    read_request_prompt,
)
from shell_router.moa.requests import AgentRequest, MoaRequest
from shell_router.telemetry import Trace
from shell_router.telemetry.recorder import Recorder
from shell_router.telemetry.trace import since
from shell_router.topology import Graph


class Recording:
    """The texts of a run, which its trace does not keep; the recorder gets all of it in the end."""

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
        """Hand the ended run to the recorder, whose thread makes the lines."""
        self._recorder.add(lambda: list(self._lines()))

    def _lines(self) -> Iterator[NewValues]:
        """Yield a line per agent that ran; each step of a topology is a workflow of its own."""
        request = self._request
        graph = self._graph
        if isinstance(request, AgentRequest):
            yield from self._line(
                request.agent,
                AGENT_REQUEST,
                request.agent,
                request.reads,
                read_request_prompt(request),
            )
            return
        assert graph is not None, "a chat has one"
        for part in graph.parts:
            workflow = name_workflow(part)
            stages = number_stages(part)
            for agent in part.agents.values():
                prompt = read_agent_prompt(agent, request.messages)
                reads = graph.waits_for[agent.id]
                yield from self._line(agent.id, workflow, stages[agent.id], reads, prompt)

    def _line(
        self, agent: str, workflow: str, stage: str, reads: Sequence[str], prompt: KnownPrompt
    ) -> Iterator[NewValues]:
        ran = self._trace.agents.get(agent)
        if ran is None or ran.state in ("kept", "waiting") or ran.model not in self._models:
            return
        system_tokens, user_tokens, known_tokens = prompt.count_tokens(
            self._models[ran.model].tokenizer
        )
        origin_s = self._trace.started_s
        if isinstance(self._request, AgentRequest):
            program = self._request.program
        else:
            program = self._request.id
        line = {
            "program": f"{self._trace.tenant}/{program}",
            "topology": workflow,
            "agent": agent,
            "stage": stage,
            "reads": list(reads),
            "model": ran.model,
            "state": ran.state,
            "system_tokens": system_tokens,
            "user_tokens": user_tokens,
            "known_tokens": known_tokens,
            "prompt_tokens": ran.ready.prompt_tokens if ran.ready else None,
            "output_tokens": ran.end.completion_tokens
            if isinstance(ran.end, AgentFinished)
            else ran.tokens,
            "started_at": self._trace.wall_s,
            "started_s": since(ran.started_s, origin_s),
            "ready_s": None if ran.ready is None else since(ran.ready.at_s, origin_s),
            "first_token_s": None
            if ran.first_token_s is None
            else since(ran.first_token_s, origin_s),
            "ended_s": None if ran.end is None else since(ran.end.at_s, origin_s),
        }
        if self._recorder.prompts:
            output = "".join(self._texts.get(agent, ()))
            line |= {
                "system": prompt.system,
                "user": prompt.user,
                "rest": prompt.rest,
                "output": output,
            }
        yield line
