"""Chats in requests: messages, the functions that a model may call, its calls, and their results.

Texts may hold markers, which stand for lazy answers.
"""

import re
from collections.abc import Sequence
from itertools import count, tee
from typing import Annotated, Any, Literal, NotRequired

import orjson
from annotated_types import MaxLen, MinLen
from pydantic import Field
from typing_extensions import TypedDict

from shell_router.core.engine import JoinedText
from shell_router.core.exact_json import NewValues, Values, parse_json, write_json
from shell_router.core.sampling import check_depth
from shell_router.core.validation import Array, Name, field_error, show
from shell_router.moa.calls import ToolOffer
from shell_router.moa.requests import OutputOf, Segment

CALL_ID_CHARACTERS = 128
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 2**18
"""The limit of all tools together as JSON: each of them is part of the prompt."""

FunctionName = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,128}$")]
CallId = Annotated[str, MinLen(1), MaxLen(CALL_ID_CHARACTERS)]


class ContentPart(TypedDict):
    """A part of a message: a text or refusal, or an image that only an engine's own chats read."""

    type: Name
    text: NotRequired[str | None]
    refusal: NotRequired[str | None]


Content = str | Array[ContentPart]


class CalledFunction(TypedDict):
    """A function with the arguments of a call, a JSON object as text."""

    name: FunctionName
    arguments: str | NewValues


class Call(TypedDict):
    """A call that an assistant's message holds."""

    id: NotRequired[CallId | None]
    type: NotRequired[Literal["function"] | None]
    function: CalledFunction


class TextMessage(TypedDict):
    """A message of the client; `developer` counts as `system`."""

    role: Literal["system", "developer", "user"]
    content: Content
    continues: NotRequired[
        Annotated[bool | None, Field(description="The message begins no turn of its own.")]
    ]


class AssistantMessage(TypedDict):
    """A message that a model wrote."""

    role: Literal["assistant"]
    content: NotRequired[Content | None]
    tool_calls: NotRequired[Annotated[Array[Call], MaxLen(MAX_TOOLS)] | None]
    reasoning_content: NotRequired[str | None]


class ToolMessage(TypedDict):
    """The result of a call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: NotRequired[CallId | None]


Message = Annotated[TextMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[Array[Message], MinLen(1)]


class Function(TypedDict):
    """A function that a model may call."""

    name: FunctionName
    description: NotRequired[str | None]
    parameters: NotRequired[NewValues | None]
    strict: NotRequired[bool | None]


class Tool(TypedDict):
    """A function tool; the router runs no tools of its own."""

    type: Literal["function"]
    function: Function


class NamedFunction(TypedDict):
    """A function by its name."""

    name: Name


class NamedChoice(TypedDict):
    """The choice of one function."""

    type: Literal["function"]
    function: NamedFunction


class ToolFields(TypedDict, total=False):
    """The functions that a model may call."""

    tools: Annotated[Array[Tool], MaxLen(MAX_TOOLS)]
    tool_choice: Literal["none", "auto", "required"] | NamedChoice
    parallel_tool_calls: bool


def drop_other_tools(sent: Values, kind: str) -> tuple[Values, list[str]]:
    """Return the body without tools of kinds other than `kind`, and names of those tools.

    The router cannot run them. Agents send all of theirs, whether they are needed or not.
    """
    tools = sent.get("tools")
    if not isinstance(tools, list):
        return sent, []
    kept = []
    names = []
    for tool in tools:
        other = isinstance(tool, dict) and tool.get("type")
        if isinstance(other, str) and other != kind:
            names.append(f"tools.{other}")
        else:
            kept.append(tool)
    return {**sent, "tools": kept}, names


def read_tools(body: ToolFields, sent: Values) -> ToolOffer | None:
    """Return the offer of a validated body; None if no function may be called.

    A named function is called once. If one function must be called, the others are no part of the
    prompt, as in SGLang. `sent` is the body as it was sent: templates write a function's fields in
    the client's order.

    Raises:
        InvalidField: A name repeats, the choice has no tool, or the tools are too large.
    """
    tools = _read_fitting(sent.get("tools") or ())
    choice = body.get("tool_choice") or "auto"
    if choice == "none" or (choice == "auto" and not tools):
        return None
    if not tools:
        raise field_error("tool_choice", "needs tools", "Send tools, or leave tool_choice out.")
    if not isinstance(choice, str):
        name = choice["function"]["name"]
        tools = tuple(tool for tool in tools if tool["function"]["name"] == name)
        if not tools:
            raise field_error(
                "tool_choice.function.name",
                f"is {show(name)}, which is none of the tools",
                "Name one of tools.",
            )
    parallel = isinstance(choice, str) and body.get("parallel_tool_calls", True)
    return ToolOffer(tools, choice != "auto", parallel)


def _read_fitting(sent: Sequence[Any]) -> tuple[Values, ...]:
    """Return validated tools with the fields that templates know; raises InvalidField."""
    check_depth(sent, "tools")
    size = len(write_json(sent))
    if size > MAX_TOOLS_BYTES:
        raise field_error("tools", f"takes {size} bytes", f"Send at most {MAX_TOOLS_BYTES}.")
    names = set[str]()
    tools = []
    for at, tool in enumerate(sent):
        function = {
            name: value
            for name, value in tool["function"].items()
            if name in Function.__annotations__ and value is not None
        }
        if function["name"] in names:
            raise field_error(f"tools[{at}].function.name", f"repeats {function['name']!r}")
        names.add(function["name"])
        tools.append({"type": "function", "function": function})
    return tuple(tools)


PLAIN = {"role", "content"}


def read_messages(messages: Sequence[Any]) -> tuple[Values, ...]:
    """Return validated messages with their texts alone, as chat templates take them.

    Raises:
        InvalidField: A part is no text, or an order or a call is wrong.
    """
    read: list[Values] = []
    has_question = False
    for at, message in enumerate(name_calls(messages)):
        role = message["role"]
        has_question = has_question or role == "user"
        if len(message) == 2 and role != "developer" and isinstance(message.get("content"), str):
            read.append(message)
        else:
            read.append(_read_message(message, f"messages[{at}]"))
    check_order(read)
    if not has_question:
        raise field_error("messages", "must hold a user message", "Send the question.")
    return tuple(read)


def name_calls(messages: Sequence[Any]) -> list[Any]:
    """Return the messages with an id for each call.

    Results without an id answer the calls without one in their order.
    """
    given = {call.get("id") for message in messages for call in message.get("tool_calls") or ()}
    fresh = (f"call-{number}" for number in count())
    called, answered = tee(name for name in fresh if name not in given)
    named = list(messages)
    for at, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if not all(call.get("id") for call in calls):
            calls = [{**call, "id": call.get("id") or next(called)} for call in calls]
            named[at] = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and not message.get("tool_call_id"):
            named[at] = {**message, "tool_call_id": next(answered)}
    return named


def check_order(messages: Sequence[Values]) -> None:
    """Raise InvalidField unless the last message asks, and each result answers an earlier call."""
    if messages[-1]["role"] == "assistant":
        raise field_error(
            f"messages[{len(messages) - 1}].role",
            "must not be assistant",
            "Put the question, or a call's result, in the last message.",
        )
    open_calls: set[str] = set()
    for at, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            open_calls.update([call["id"] for call in calls])
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                remedy = "Send the assistant message with that call before its one result."
                path = f"messages[{at}].tool_call_id"
                raise field_error(path, "answers no earlier call", remedy)
            open_calls.remove(message["tool_call_id"])


def _read_message(message: Values, path: str) -> Values:
    role = message["role"]
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = JoinedText.of(list_texts(content, f"{path}.content"))
    read: NewValues = {"role": "system" if role == "developer" else role, "content": content}
    if role == "tool":
        read["tool_call_id"] = message["tool_call_id"]
    if calls := message.get("tool_calls"):
        read["tool_calls"] = read_calls(calls, f"{path}.tool_calls")
    for name in ("reasoning_content", "continues"):
        if extra := message.get(name):
            read[name] = extra
    return read


def list_texts(content: str | Sequence[ContentPart], path: str) -> list[str]:
    """List the texts of a content's parts; raises InvalidField for a part that is none."""
    if isinstance(content, str):
        return [content]
    texts = []
    for at, part in enumerate(content):
        kind = part["type"]
        if kind not in ("text", "refusal"):
            remedy = "Only text is served; leave other parts out."
            raise field_error(f"{path}[{at}].type", "must be text", remedy)
        text = part.get("text") if kind == "text" else part.get("refusal")
        if text is None:
            raise field_error(f"{path}[{at}].{kind}", "is missing")
        texts.append(text)
    return texts


def read_calls(calls: Sequence[Any], path: str) -> tuple[Values, ...]:
    """Return an assistant message's calls with their arguments as objects; raises InvalidField."""
    return tuple(
        [
            {"id": call["id"], "type": "function", "function": _read_called(call, f"{path}[{at}]")}
            for at, call in enumerate(calls)
        ]
    )


def _read_called(call: Call, path: str) -> Values:
    arguments = read_arguments(call["function"]["arguments"])
    check_depth(arguments, f"{path}.function.arguments")
    return {"name": call["function"]["name"], "arguments": arguments}


def read_arguments(written: Any) -> NewValues:
    """Return a call's arguments; what a model wrote in their place in Anthropic's wrapping."""
    arguments = written
    if isinstance(written, str):
        arguments = None
        if written.strip():
            try:
                arguments = parse_json(written)
            except orjson.JSONDecodeError:
                return {"INVALID_JSON": written}
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else {"INVALID_JSON": written}


# --- markers of lazy answers

WORD = "lazyanswer"
MARKER = re.compile(rf"\[\[{WORD}:([\w-]{{1,64}})\]\]", re.ASCII)


_FORMS = {
    word: re.compile(
        word + rf"(?:(?<=[\[;bB]{word})|:\S|%3[Aa]|&#?\w{{1,5}};|[\W_]{{0,9}}[0-9A-Fa-f]{{8}})"
    )
    for word in (WORD, WORD.upper(), WORD.capitalize())
}
"""The word behind a bracket, or before a colon or an id, also where these are escaped (`%5B`):
alone it is a word.
"""


def marker_of(agent: str) -> str:
    """Return the text that stands for the agent's output; JSON, HTML and templates keep it."""
    return f"[[{WORD}:{agent}]]"


def split_text(text: str, path: str) -> tuple[Segment, ...]:
    """Return `text` with slots in place of markers; raises InvalidField for altered markers."""
    if not holds_marker(text):
        return (text,)
    pieces = MARKER.split(text)
    if any(map(holds_marker, pieces[::2])):
        remedy = (
            "Send markers whole. Where code cuts or reads text, ask without lazy, or first "
            "get the text from GET /v1/agent/outputs/{marker}."
        )
        raise field_error(path, "holds a lazy answer's marker that was altered", remedy)
    return tuple(OutputOf(piece) if odd % 2 else piece for odd, piece in enumerate(pieces) if piece)


def holds_marker(text: str) -> bool:
    """Return whether there is a marker in `text`, whole or altered."""
    return any(word in text and form.search(text) for word, form in _FORMS.items())


def has_markers(messages: Sequence[Values]) -> bool:
    """Return whether a lazy answer's marker is in the messages, whole or altered."""
    return holds_marker("\n".join([turn["content"] for turn in messages])) or any(
        map(is_marked_elsewhere, messages)
    )


def is_marked_elsewhere(turn: Values) -> bool:
    """Return whether a marker is in the message's calls of tools, or in its thinking."""
    return len(turn) > len(("role", "content")) and holds_marker(write_json(turn).decode())
