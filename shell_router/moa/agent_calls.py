"""Calls of agents below the root: their ids name the agent, which alone reads their results."""

import re
import uuid
from collections.abc import Mapping, Sequence

from shell_router.core.control_text import ControlText
from shell_router.core.exact_json import Values, parse_json
from shell_router.core.validation import field_error
from shell_router.moa.calls import ToolCall
from shell_router.moa.requests import FanOut, IssuedCall, MoaRequest
from shell_router.topology import Graph, Topology

_ID = re.compile(r"call_([0-9a-f]{20})[0-9a-f]{4}_(.+)")
"""The answer that holds the call, the call's number in it, and the agent."""
ROOT_STAGE = "/root"


def issue_calls(
    outputs: Sequence[tuple[str, str, str, Sequence[ToolCall]]],
) -> dict[str, IssuedCall]:
    """Return the calls of one answer under their ids, which cannot be guessed.

    Args:
        outputs: Each agent, its model, its text before the calls, and its calls.
    """
    stamp = uuid.uuid4().hex[:20]
    issued: dict[str, IssuedCall] = {}
    for agent, model, text, calls in outputs:
        for number, call in enumerate(calls):
            name = f"call_{stamp}{len(issued):04x}_{agent}"
            before = "" if number else text
            issued[name] = IssuedCall(agent, model, before, call.name, call.arguments)
    return issued


def find_issued(graph: Graph, request: MoaRequest) -> tuple[list[str], str]:
    """Return the ids of the turn's calls that name agents below the root, and the turn's stage.

    The stage is empty, or names the last answer with such calls; after calls of the root it ends
    with ROOT_STAGE.
    """
    ids: list[str] = []
    stage = ""
    if not isinstance(graph, Topology) or not graph.callers:
        return ids, stage
    for message in request.messages[len(request.turn_messages) :]:
        calls = message.get("tool_calls") or ()
        matches = [match for call in calls if (match := _ID.fullmatch(call["id"]))]
        own = [match for match in matches if match[2] in graph.callers]
        ids += [match[0] for match in own]
        if own:
            stage = own[-1][1]
        elif calls and stage:
            stage = end_stage(stage)
    return ids, stage


def end_stage(stage: str) -> str:
    """Return the stage in which the root calls, after that of agents below it."""
    return stage and stage.removesuffix(ROOT_STAGE) + ROOT_STAGE


def find_next_stage(issued: Mapping[str, IssuedCall]) -> str:
    """Return the stage after the answer that holds the last of the calls."""
    match = _ID.fullmatch([*issued][-1])
    assert match is not None, "the router made it"
    return match[1]


def check_results(kept: FanOut, ids: Sequence[str], request: MoaRequest) -> None:
    """Raise InvalidField unless the calls were issued, and each that was issued has its result."""
    unknown = [name for name in ids if name not in kept.issued]
    if unknown:
        what = (
            f"hold calls that are not known here: {', '.join(unknown)}. Their ids were made up, "
            "or the turn has expired, or the chat before them has changed"
        )
        raise field_error("messages", what, "Send the chat up to its last user message again.")
    answered = {message.get("tool_call_id") for message in request.messages}
    called = set(ids)
    missing = [name for name in kept.issued if name not in called or name not in answered]
    if missing:
        what = f"lack results of agents' calls: {', '.join(missing)}"
        remedy = "Send the assistant's message as it was, and a result for each of its calls."
        raise field_error("messages", what, remedy)


def select_messages(
    request: MoaRequest, agent: str | None, control: ControlText
) -> tuple[Values, ...]:
    """Return the chat as an agent has it: of the turn's calls its own, with their results.

    Args:
        request: The request, whose turn is known.
        agent: An agent below the root, which reads its own words as it wrote them; None for the
            root.
        control: Keeps these words from becoming control tokens.
    """
    issued = request.turn.kept.issued
    if agent is None and not issued:
        return request.messages
    question = request.turn_messages
    chat: list[Values] = [*question]
    own: set[str] = set()
    for message in request.messages[len(question) :]:
        if message["role"] == "tool":
            selected: Values | None = message if message["tool_call_id"] in own else None
        elif message["role"] != "assistant":
            # before an agent's first call there is nothing of the turn in its prompt
            selected = message if agent is None or own else None
        elif agent is None:
            selected = _drop_issued(message, issued)
        else:
            selected = _write_own(message, agent, issued, control)
        if selected is not None:
            own.update(call["id"] for call in selected.get("tool_calls") or ())
            chat.append(selected)
    return tuple(chat)


def _drop_issued(message: Values, issued: Mapping[str, IssuedCall]) -> Values | None:
    """Return the root's message without calls of other agents; None if it held them alone."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    own = tuple(call for call in calls if call["id"] not in issued)
    return {**message, "tool_calls": own} if own else None


def _write_own(
    message: Values, agent: str, issued: Mapping[str, IssuedCall], control: ControlText
) -> Values | None:
    """Return the message with the agent's own text and calls; None if it holds no call of it."""
    names = [call["id"] for call in message.get("tool_calls") or ()]
    own = {name: issued[name] for name in names if name in issued and issued[name].agent == agent}
    calls = []
    for name, call in own.items():
        function = {"name": call.name, "arguments": parse_json(call.arguments)}
        calls.append({"id": name, "type": "function", "function": function})
    text = control.quote("".join([call.text for call in own.values()]))
    return {"role": "assistant", "content": text, "tool_calls": tuple(calls)} if calls else None
