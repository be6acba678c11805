"""What an agent request's client gets: a JSON object, or a stream of typed events."""

from collections.abc import Sequence
from typing import Any

from shell_router.api.chat_reply import usage
from shell_router.api.facts import KINDS, coalesced, facts
from shell_router.api.sse import DONE, data_frame
from shell_router.core.events import AgentErred, AgentFinished, AgentTokens, Event
from shell_router.execution import AgentRequest, Answer, ProgramState


def agent_answer(run_id: str, created: int, request: AgentRequest, answer: Answer) -> dict[str, Any]:
    """A whole answer."""
    return {
        "id": run_id,
        "object": "agent.answer",
        "created": created,
        "program": request.program,
        "agent": request.agent,
        "model": answer.agents[request.agent].model,
        "text": answer.text,
        "finish_reason": answer.reason,
        "usage": usage(answer),
    }


class AgentFrames:
    """Writes the frames of one streamed agent request (streaming.Frames)."""

    def __init__(self, run_id: str, created: int, request: AgentRequest, origin_s: float) -> None:
        self._run_id = run_id
        self._created = created
        self._request = request
        self._origin_s = origin_s

    def wants(self, event: Event) -> bool:
        """How the agent ended is told by the last frame instead."""
        return not isinstance(event, AgentFinished | AgentErred)

    def events(self, events: Sequence[Event]) -> bytes:
        """One typed object per event."""
        return b"".join(self._frame(event) for event in coalesced(events))

    def answer(self, answer: Answer) -> bytes:
        """The finished event, which holds the whole answer, and the end mark."""
        whole = agent_answer(self._run_id, self._created, self._request, answer)
        return data_frame({"type": "finished", **whole}) + DONE

    def error(self, envelope: dict[str, Any]) -> bytes:
        """The error event."""
        return data_frame({"type": "error", **envelope})

    def _frame(self, event: Event) -> bytes:
        kind = "token" if isinstance(event, AgentTokens) else KINDS[type(event)]
        return data_frame({"type": kind, **facts(event, self._origin_s)})


def program_reply(state: ProgramState) -> dict[str, Any]:
    """A program and its agents."""
    return {
        "object": "agent.program",
        "program": state.program,
        "agents": {
            agent: {"state": how, "output": state.outputs.get(agent, "")} for agent, how in state.agents.items()
        },
    }
