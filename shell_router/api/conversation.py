"""Chats in requests: messages, the functions that a model may call, its calls, and their results.

Texts may hold markers, which stand for lazy answers.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

import orjson
from annotated_types import MaxLen, MinLen
from pydantic import Field
from typing_extensions import TypedDict

from shell_router.core.sampling import check_depth
from shell_router.core.validation import Array, Name, field_error, show
from shell_router.moa.calls import ToolOffer
from shell_router.moa.requests import OutputOf, Segment

CALL_ID_CHARACTERS = 128
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 2**18
"""The limit of all tools together as JSON: each of them is part of the prompt."""

FunctionName = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
CallId = Annotated[str, MinLen(1), MaxLen(CALL_ID_CHARACTERS)]


class ContentPart(TypedDict):
    """A part of a message: a text, or an image that only an engine's own chats read."""

    type: Name
    text: NotRequired[str | None]


Content = str | Array[ContentPart]


class CalledFunction(TypedDict):
    """A function with the arguments of a call, a JSON object as text."""

    name: FunctionName
    arguments: str | dict[str, Any]


class Call(TypedDict):
    """A call that an assistant's message holds."""

    id: CallId
    type: NotRequired[Literal["function"] | None]
    function: CalledFunction


class TextMessage(TypedDict):
    """A message of the client; `developer` counts as `system`."""

    role: Literal["system", "developer", "user"]
    content: Content


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
    tool_call_id: CallId


Message = Annotated[TextMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
Messages = Annotated[Array[Message], MinLen(1)]


class Function(TypedDict):
    """A function that a model may call."""

    name: FunctionName
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
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


def read_tools(body: ToolFields, sent: Mapping[str, Any]) -> ToolOffer | None:
    """Return the offer of a validated body; None if no function may be called.

    If one function must be called, the others are no part of the prompt, as in SGLang. `sent` is
    the body as it was sent: templates write a function's fields in the client's order.

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
    return ToolOffer(tools, choice != "auto", body.get("parallel_tool_calls", True))


def _read_fitting(sent: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    """Return validated tools with the fields that templates know; raises InvalidField."""
    check_depth(sent, "tools")
    size = len(orjson.dumps(sent))
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
        definitions = function.get("parameters", {}).get("$defs")
        if not isinstance(definitions, dict | None):
            path = f"tools[{at}].function.parameters.$defs"
            raise field_error(path, f"must be an object, not {show(definitions)}")
        if function["name"] in names:
            raise field_error(f"tools[{at}].function.name", f"repeats {function['name']!r}")
        names.add(function["name"])
        tools.append({"type": "function", "function": function})
    return tuple(tools)


PLAIN = {"role", "content"}


def read_messages(messages: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    """Return validated messages with their texts alone, as chat templates take them.

    Raises:
        InvalidField: A part is no text, or an order or a call is wrong.
    """
    read: list[Mapping[str, Any]] = []
    has_question = False
    for at, message in enumerate(messages):
        role = message["role"]
        has_question = has_question or role == "user"
        if len(message) == 2 and role != "developer" and isinstance(message.get("content"), str):
            read.append(message)
        else:
            read.append(_read_message(message, f"messages[{at}]"))
    check_order(read)
    if not has_question:
        raise field_error("messages", "hold no user message", "Send the question before the calls.")
    return tuple(read)


def check_order(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidField unless the last message asks, and each result answers an earlier call."""
    if messages[-1]["role"] not in ("user", "tool"):
        raise field_error(
            f"messages[{len(messages) - 1}].role",
            "must be user or tool",
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


def _read_message(message: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    role = message["role"]
    read: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": join_texts(message.get("content") or "", f"{path}.content"),
    }
    if role == "tool":
        read["tool_call_id"] = message["tool_call_id"]
    if calls := message.get("tool_calls"):
        read["tool_calls"] = read_calls(calls, f"{path}.tool_calls")
    if thinking := message.get("reasoning_content"):
        read["reasoning_content"] = thinking
    return read


def join_texts(content: str | Sequence[ContentPart], path: str) -> str:
    """Return a content's text; raises InvalidField for a part that is none."""
    if isinstance(content, str):
        return content
    texts = []
    for at, part in enumerate(content):
        if part["type"] != "text":
            remedy = "Only text is served; leave other parts out."
            raise field_error(f"{path}[{at}].type", "must be text", remedy)
        text = part.get("text")
        if text is None:
            raise field_error(f"{path}[{at}].text", "is missing")
        texts.append(text)
    return "".join(texts)


def read_calls(calls: Sequence[Call], path: str) -> tuple[Mapping[str, Any], ...]:
    """Return an assistant message's calls with their arguments as objects; raises InvalidField."""
    return tuple(
        [
            {"id": call["id"], "type": "function", "function": _read_called(call, f"{path}[{at}]")}
            for at, call in enumerate(calls)
        ]
    )


def _read_called(call: Call, path: str) -> Mapping[str, Any]:
    function = call["function"]
    arguments: Any = function["arguments"]
    path = f"{path}.function.arguments"
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            remedy = "Send the model's own arguments."
            raise field_error(path, "is not JSON", remedy) from None
    if not isinstance(arguments, dict):
        raise field_error(path, "must be a JSON object, as text")
    check_depth(arguments, path)
    return {"name": function["name"], "arguments": arguments}


def calls_schema(offer: ToolOffer) -> str:
    """Return the JSON schema of an array of calls, as SGLang has it; "" if no call must be made.

    Raises:
        InvalidField: Two tools define a type of one name differently.
    """
    if not offer.must_call:
        return ""
    kinds: dict[str, Any] = {}
    items = []
    for at, tool in enumerate(offer.tools):
        function = tool["function"]
        parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
        for name, kind in (parameters.pop("$defs", None) or {}).items():
            if kinds.setdefault(name, kind) != kind:
                path = f"tools[{at}].function.parameters.$defs.{name}"
                raise field_error(path, "differs from that of another tool", "Rename one of them.")
        called = {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters}
        items.append(
            {
                "type": "object",
                "properties": called,
                "required": [*called],
                "additionalProperties": False,
            }
        )
    schema = {
        "type": "array",
        "minItems": 1,
        "items": items[0] if len(items) == 1 else {"anyOf": items},
    }
    if not offer.parallel:
        schema["maxItems"] = 1
    return orjson.dumps({**schema, "$defs": kinds} if kinds else schema).decode()


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


def has_markers(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a lazy answer's marker is in the messages, whole or altered."""
    return holds_marker("\n".join([turn["content"] for turn in messages])) or any(
        map(is_marked_elsewhere, messages)
    )


def is_marked_elsewhere(turn: Mapping[str, Any]) -> bool:
    """Return whether a marker is in the message's calls of tools, or in its thinking."""
    return len(turn) > len(("role", "content")) and holds_marker(orjson.dumps(turn).decode())
