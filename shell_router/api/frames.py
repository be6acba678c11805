"""Writes answers as OpenAI's completions and chunks, or as agent answers and their typed events."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields, replace

import orjson

from shell_router.api.bodies import ChatRequest
from shell_router.api.runs import Run
from shell_router.api.streaming import DONE, StreamPosition, data_frame
from shell_router.core.events import (
    AgentErred,
    AgentFinished,
    AgentPlaced,
    AgentPreempted,
    AgentStarted,
    AgentStopped,
    AgentThought,
    AgentTokens,
    AggregationSkipped,
    Degraded,
    Event,
    ExitScored,
    ModelChosen,
    PrefillIncrement,
    PromptReady,
    StepChosen,
    answer_in,
)
from shell_router.core.exact_json import NewValues
from shell_router.moa.calls import ToolCall
from shell_router.moa.requests import AgentRequest, AgentUsage, Answer
from shell_router.telemetry import Trace
from shell_router.topology import AUTO

KINDS: dict[type, str] = {
    ModelChosen: "chosen",
    StepChosen: "step",
    AgentStarted: "started",
    PrefillIncrement: "prefill",
    PromptReady: "ready",
    AgentPlaced: "placed",
    AgentPreempted: "preempted",
    AgentTokens: "tokens",
    AgentThought: "thinking",
    AgentFinished: "finished",
    AggregationSkipped: "skipped",
    ExitScored: "exit",
    AgentStopped: "stopped",
    AgentErred: "failed",
    Degraded: "degraded",
}
# a field that does not compare is for traces alone
_FIELDS = {kind: tuple(each.name for each in fields(kind) if each.compare) for kind in KINDS}
_TIMES = ("at_s", "started_s")
NAMED_AGENTS = 16


def describe_event(event: Event, origin_s: float) -> NewValues:
    """Return the event's fields; times become seconds since `origin_s`."""
    described = {name: getattr(event, name) for name in _FIELDS[type(event)]}
    for time in _TIMES:
        if time in described:
            described[time] = round(described[time] - origin_s, 6)
    return described


def join_tokens(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events with an agent's neighboring tokens joined; their order stays."""
    waiting: dict[tuple[str, type], list[AgentTokens | AgentThought]] = {}
    for event in events:
        if isinstance(event, AgentTokens | AgentThought):
            waiting.setdefault((event.agent, type(event)), []).append(event)
        else:
            yield from _join_pieces(waiting.values())
            waiting.clear()
            yield event
    yield from _join_pieces(waiting.values())


def _join_pieces(
    waiting: Iterable[list[AgentTokens | AgentThought]],
) -> Iterator[AgentTokens | AgentThought]:
    for pieces in waiting:
        if len(pieces) == 1:
            yield pieces[0]
        else:
            ids = tuple(token for piece in pieces for token in piece.ids)
            yield replace(pieces[-1], ids=ids, text="".join(piece.text for piece in pieces))


def sum_usage(answer: Answer, writer: str, counted: str = "all") -> NewValues:
    """Return OpenAI's usage, summed over the agents, or with "root" of the `writer` alone.

    Outputs of other agents than the answer's `writer` are hidden, and count as its reasoning. With
    the `cost` in dollars, and the same for each model.
    """
    agents = answer.agents
    if counted == "root" and writer in agents:
        agents = {writer: agents[writer]}
    prompt = written = cached = drafted = accepted = thought = 0
    cost = 0.0
    models: dict[str, NewValues] = {}
    for agent, spent in agents.items():
        cost += spent.cost
        if spent.prompt_tokens:
            _add_model(models.setdefault(spent.model, {}), spent)
        prompt += spent.prompt_tokens
        written += spent.completion_tokens
        cached += spent.cached_tokens
        drafted += spent.drafted_tokens
        accepted += spent.accepted_tokens
        thought += spent.reasoning_tokens if agent == writer else spent.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": thought,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "cost": cost,
        "models": models,
    }


def _add_model(total: NewValues, spent: AgentUsage) -> None:
    """Add what an agent has spent to the total of its model."""
    counts = {
        "calls": 1,
        "prompt_tokens": spent.prompt_tokens,
        "cached_tokens": spent.cached_tokens,
        "completion_tokens": spent.completion_tokens,
        "cost": spent.cost,
    }
    for name, count in counts.items():
        total[name] = total.get(name, 0) + count


def describe_agents(answer: Answer, trace: Trace) -> NewValues:
    """Return the state and cost of each agent; confidences are the trace's."""
    described = {}
    for agent, spent in answer.agents.items():
        traced = trace.agents.get(agent)
        confidence = None if traced is None else traced.confidence
        described[agent] = {**asdict(spent), "confidence": confidence}
    return described


def list_warnings(answer: Answer, root: str) -> dict[str, list[str]]:
    """Return `warnings` for the reply about agents that failed, and outputs read incomplete."""
    warnings = [
        f"The answer goes without agent {agent!r}: {spent.error}"
        for agent, spent in answer.agents.items()
        if spent.error
    ][:NAMED_AGENTS]
    if answer.warning:
        warnings.append(answer.warning)
    cut = [
        agent
        for agent, spent in answer.agents.items()
        if spent.finish_reason == "length" and agent != root and not spent.error
    ]
    if cut:
        names = ", ".join(cut[:NAMED_AGENTS])
        warnings.append(
            f"Outputs were cut at their limit before other agents read them: {names}. Raise "
            "max_tokens of a panel, max_new_tokens of a topology's agents."
        )
    estimated = [agent for agent, spent in answer.agents.items() if spent.estimated]
    if estimated:
        names = ", ".join(estimated[:NAMED_AGENTS])
        warnings.append(f"Tokens were estimated, as their servers count none: {names}.")
    return {"warnings": warnings} if warnings else {}


def _describe_call(call: ToolCall) -> NewValues:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _describe_end(answer: Answer) -> NewValues:
    """Return why the answer ended; as SGLang's chats it names the stop string that was met."""
    if answer.calls and answer.reason != "length":
        return {"finish_reason": "tool_calls"}
    matched = {"matched_stop": answer.matched} if answer.matched else {}
    return {"finish_reason": answer.reason, **matched}


class ChatFrames:
    """Writes the frames of one streamed completion (streaming.Frames).

    Agents' events are chunks without choices, as the usage chunk of OpenAI is, so that its clients
    step over them. The SSE event name and the field `agent_event` are for clients that read them.
    With a `place` the parts of the answer have ids, and parts that the client has are left out.
    """

    def __init__(
        self,
        run: Run,
        model: str,
        chat: ChatRequest,
        place: StreamPosition | None = None,
    ) -> None:
        self._base = {
            "id": f"chatcmpl-{run.id}",
            "object": "chat.completion.chunk",
            "created": run.created,
            "model": model,
        }
        self._open = orjson.dumps(self._base)[:-1]
        self._answering = run.answering
        self._trace = run.trace
        self._chat = chat
        self._place = place
        self._role = b'"role":"assistant",'

    def wants(self, event: Event) -> bool:
        """Return whether the event would be written."""
        return self._chat.include_agents or bool(
            answer_in(event, self._answering) or self._get_thinking(event)
        )

    def whole(self, answer: Answer) -> NewValues:
        """Return a whole chat completion."""
        message: NewValues = {"role": "assistant", "content": answer.text}
        if answer.calls:
            message |= {
                "content": answer.text or None,
                "tool_calls": [_describe_call(call) for call in answer.calls],
            }
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        choice = {"index": 0, "message": message, "logprobs": None, **_describe_end(answer)}
        return {
            **self._base,
            "object": "chat.completion",
            "choices": [choice],
            "usage": self._sum_usage(answer),
            **self._describe(answer),
        }

    def _sum_usage(self, answer: Answer) -> NewValues:
        return sum_usage(answer, self._trace.writer, self._chat.usage)

    def _describe(self, answer: Answer) -> NewValues:
        """Return warnings about the answer's agents, and the agents if the client asks for them."""
        described: NewValues = {**list_warnings(answer, self._trace.root)}
        if self._chat.include_agents:
            described["agents"] = describe_agents(answer, self._trace)
        return described

    def events(self, events: Sequence[Event]) -> bytes:
        """Return the chunks of the events."""
        if self._chat.include_agents:
            return b"".join([self._frame(event) for event in join_tokens(events)])
        # all events are parts of the answer
        thinking = "".join([self._get_thinking(event) for event in events])
        answer = "".join([answer_in(event, self._answering) for event in events])
        return self._write_delta(thinking, answer)

    def answer(self, answer: Answer) -> bytes:
        """Return the tool calls, the finish reason, the usage if wanted, and the end mark.

        Raises:
            StreamChanged: The resumed stream does not match what the client has received.
        """
        if self._place is not None:
            self._place.require_reached()
        calls = b""
        for index, call in enumerate(answer.calls):
            role: NewValues = {"role": "assistant"} if self._role else {}
            delta = role | {"tool_calls": [{"index": index, **_describe_call(call)}]}
            calls += data_frame(
                {**self._base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            )
            self._role = b""
        choice = {"index": 0, "delta": {}, **_describe_end(answer)}
        frames = data_frame({**self._base, "choices": [choice], **self._describe(answer)})
        if self._chat.include_usage:
            usage = self._sum_usage(answer)
            frames += data_frame({**self._base, "choices": [], "usage": usage})
        return calls + frames + DONE

    def error(self, envelope: NewValues) -> bytes:
        """Return the frame on which OpenAI's clients raise an APIError."""
        return data_frame(envelope)

    def _get_thinking(self, event: Event) -> str:
        """Return the part of the thinking before the answer that comes with the event."""
        if isinstance(event, AgentThought):
            if event.agent in self._answering:
                return event.text
            return ""
        if isinstance(event, StepChosen):
            return event.reasoning
        return ""

    def _frame(self, event: Event) -> bytes:
        thinking = self._get_thinking(event)
        written = self._write_delta(thinking, answer_in(event, self._answering))
        if isinstance(event, AgentTokens | AgentThought) and event.agent in self._answering:
            return written
        return written + self._agent_event(event)

    def _write_delta(self, thinking: str, answer: str) -> bytes:
        written = b""
        if thinking:
            written = self._text(thinking, b"reasoning_content")
        if answer:
            written += self._text(answer)
        return written

    def _text(self, text: str, field: bytes = b"content") -> bytes:
        """Return the chunk of a text, put together from bytes, as there are many of these."""
        position = b""
        if self._place is not None:
            text = self._place.rest(text)[1]
            if not text:
                return b""
            position = self._place.id
        role = self._role
        self._role = b""
        return (
            position
            + b'data: %s,"choices":[{"index":0,"delta":{%s"%s":%s},"finish_reason":null}]}\n\n'
            % (
                self._open,
                role,
                field,
                orjson.dumps(text),
            )
        )

    def _agent_event(self, event: Event) -> bytes:
        name = f"agent.{KINDS[type(event)]}"
        sent = {"type": name, **describe_event(event, self._trace.started_s)}
        if "ids" in sent:
            sent["tokens"] = len(sent.pop("ids"))
        if isinstance(event, StepChosen | AggregationSkipped):
            del sent["text"]  # the client has it in the answer, or from `source`
            sent.pop("reasoning", None)
        chunk = data_frame({**self._base, "choices": [], "agent_event": sent})
        return b"event: %s\n%s" % (name.encode(), chunk)


class AgentFrames:
    """Writes the frames of one streamed agent request (streaming.Frames)."""

    def __init__(self, run: Run, request: AgentRequest, usage: str) -> None:
        self._run = run
        self._request = request
        self._usage = usage

    def wants(self, event: Event) -> bool:
        """Return whether the event is written; the last frame has the agent's end."""
        return not isinstance(event, AgentFinished | AgentErred)

    def whole(self, answer: Answer) -> NewValues:
        """Return a whole answer."""
        request = self._request
        return {
            **({"reasoning_content": answer.reasoning} if answer.reasoning else {}),
            "id": self._run.id,
            "object": "agent.answer",
            "created": self._run.created,
            "program": request.program,
            "agent": request.agent,
            "model": answer.agents[request.agent].model if request.model == AUTO else request.model,
            "text": answer.text,
            "finish_reason": answer.reason,
            "usage": sum_usage(answer, self._run.trace.writer, self._usage),
            **list_warnings(answer, self._run.trace.root),
        }

    def events(self, events: Sequence[Event]) -> bytes:
        """Return a typed object per event."""
        return b"".join(self._frame(event) for event in join_tokens(events))

    def answer(self, answer: Answer) -> bytes:
        """Return the finished event, which holds the whole answer, and the end mark."""
        return data_frame({"type": "finished", **self.whole(answer)}) + DONE

    def error(self, envelope: NewValues) -> bytes:
        """Return the error event."""
        return data_frame({"type": "error", **envelope})

    def _frame(self, event: Event) -> bytes:
        kind = "token" if isinstance(event, AgentTokens) else KINDS[type(event)]
        return data_frame({"type": kind, **describe_event(event, self._run.trace.started_s)})
