"""Chat completions as OpenAI's clients expect them, whole and in chunks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from shell_router.api.facts import KINDS, coalesced, facts
from shell_router.api.sse import DONE, data_frame
from shell_router.core.events import AgentPassedOn, AgentTokens, Event, StepChosen
from shell_router.execution import Answer
from shell_router.telemetry import Trace


def usage(answer: Answer) -> dict[str, Any]:
    """OpenAI's usage, summed over the agents."""
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def agents(answer: Answer, trace: Trace) -> dict[str, Any]:
    """What each agent did and cost; confidences as the trace holds them."""
    return {
        agent: {
            "model": spent.model,
            "state": spent.state,
            "prompt_tokens": spent.prompt_tokens,
            "completion_tokens": spent.completion_tokens,
            "cached_tokens": spent.cached_tokens,
            "confidence": trace.agents[agent].confidence if agent in trace.agents else None,
        }
        for agent, spent in answer.agents.items()
    }


def completion(run_id: str, created: int, model: str, answer: Answer) -> dict[str, Any]:
    """A whole chat completion."""
    message = {"role": "assistant", "content": answer.text}
    return {
        "id": f"chatcmpl-{run_id}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": answer.reason}],
        "usage": usage(answer),
    }


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a streamed completion shall hold beside the answer."""

    include_usage: bool
    include_agents: bool


class ChatFrames:
    """Writes the frames of one streamed completion (streaming.Frames).

    The tokens of `answering` agents are the answer. What was held back, since another step could have followed, comes
    in one piece when it is chosen.

    Agents' events are chunks without choices, as the usage chunk of OpenAI is, so that its clients step over them;
    the SSE event name and the field `agent_event` are for those who look.
    """

    def __init__(
        self,
        base: Mapping[str, Any],
        answering: Collection[str],
        origin_s: float,
        trace: Trace,
        options: StreamOptions,
    ) -> None:
        self._base = base
        self._open = orjson.dumps(base)[:-1]
        self._answering = answering
        self._origin_s = origin_s
        self._trace = trace
        self._options = options
        self._role = b'"role":"assistant",'

    def wants(self, event: Event) -> bool:
        """Whether the event would be written."""
        return self._options.include_agents or bool(self._answer_in(event))

    def events(self, events: Sequence[Event]) -> bytes:
        """The chunks that `events` call for."""
        return b"".join(self._frame(event) for event in coalesced(events))

    def answer(self, answer: Answer) -> bytes:
        """The finish reason, the usage where asked for, and the end mark."""
        choice = {"index": 0, "delta": {}, "finish_reason": answer.reason}
        finish: dict[str, Any] = {**self._base, "choices": [choice]}
        if self._options.include_agents:
            finish["agents"] = agents(answer, self._trace)
        frames = data_frame(finish)
        if self._options.include_usage:
            frames += data_frame({**self._base, "choices": [], "usage": usage(answer)})
        return frames + DONE

    def error(self, envelope: dict[str, Any]) -> bytes:
        """OpenAI's clients raise an APIError on it."""
        return data_frame(envelope)

    def _answer_in(self, event: Event) -> str:
        """The part of the answer that comes with the event."""
        if isinstance(event, AgentTokens | AgentPassedOn):
            return event.text if event.agent in self._answering else ""
        return event.text if isinstance(event, StepChosen) else ""

    def _frame(self, event: Event) -> bytes:
        text = self._answer_in(event)
        written = self._text(text) if text else b""
        if isinstance(event, AgentTokens) and event.agent in self._answering:
            return written
        return written + self._agent_event(event) if self._options.include_agents else written

    def _text(self, text: str) -> bytes:
        """Put together from bytes, as this is the one frame there are many of."""
        role, self._role = self._role, b""
        return b'data: %s,"choices":[{"index":0,"delta":{%s"content":%s},"finish_reason":null}]}\n\n' % (
            self._open,
            role,
            orjson.dumps(text),
        )

    def _agent_event(self, event: Event) -> bytes:
        name = f"agent.{KINDS[type(event)]}"
        told = {"type": name, **facts(event, self._origin_s)}
        if "ids" in told:
            told["tokens"] = len(told.pop("ids"))
        if isinstance(event, StepChosen | AgentPassedOn):
            del told["text"]  # the client has it: it is in the answer, or was written by `source`
        chunk = data_frame({**self._base, "choices": [], "agent_event": told})
        return b"event: %s\n%s" % (name.encode(), chunk)


def chunk_base(run_id: str, created: int, model: str) -> dict[str, Any]:
    """What all chunks of a stream have in common."""
    return {"id": f"chatcmpl-{run_id}", "object": "chat.completion.chunk", "created": created, "model": model}
