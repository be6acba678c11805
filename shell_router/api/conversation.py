"""Chats in requests: messages, the functions that a model may call, its calls, and the results of
clients.

In their texts may be markers, which stand for lazy answers.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from shell_router.api.fields import Fields, as_object, refused, shown
from shell_router.core.sampling import check_depth
from shell_router.moa.calls import ToolOffer
from shell_router.moa.requests import OutputOf, Segment

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
CALL_ID_CHARACTERS = 128
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 2**18
"""Of all tools together as JSON: every one of them is part of the prompt."""

TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})


def read_tools(body: Fields) -> ToolOffer | None:
    """The body's `tools`, `tool_choice` and `parallel_tool_calls`; None where none may be called.
    Raises InvalidField.

    Of a function that must be called the others are no part of the prompt, as in SGLang.
    """
    listed = body.listed("tools") or []
    parallel = body.raw("parallel_tool_calls") is None or body.flag("parallel_tool_calls")
    if len(listed) > MAX_TOOLS:
        raise body.refuse("tools", f"holds {len(listed)} tools", f"Send at most {MAX_TOOLS}.")
    check_depth(listed, "tools")
    tools = tuple([_tool(one) for one in body.objects("tools")])
    names = [tool["function"]["name"] for tool in tools]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise refused(f"tools[{at}].function.name", f"repeats {name!r}")
    if listed and (size := len(orjson.dumps(listed))) > MAX_TOOLS_BYTES:
        raise body.refuse("tools", f"takes {size} bytes", f"Send at most {MAX_TOOLS_BYTES}.")
    choice, named = _choice(body, names)
    if choice == "none":
        return None
    return ToolOffer((tools[names.index(named)],) if named else tools, choice != "auto", parallel)


def _tool(tool: Fields) -> Mapping[str, Any]:
    if tool.text("type") != "function":
        raise tool.refuse("type", "must be function", "Only function tools are served.")
    function = tool.object("function")
    if function is None:
        raise tool.refuse("function", "is missing")
    described: dict[str, Any] = {"name": function_name(function)}
    if (description := function.text("description")) is not None:
        described["description"] = description
    if (parameters := function.object("parameters")) is not None:
        parameters.object("$defs")
        described["parameters"] = function.raw("parameters")
    if function.raw("strict") is not None:
        described["strict"] = function.flag("strict")
    given = tool.raw("function")  # its order is kept: templates write it as it is
    return {
        "type": "function",
        "function": {name: described[name] for name in given if name in described},
    }


def function_name(function: Fields) -> str:
    """Its `name`: 1 to 64 letters, digits, _ or -."""
    name = function.required_text("name")
    if not FUNCTION_NAME.fullmatch(name):
        raise function.refuse("name", "may hold 1 to 64 letters, digits, _ and -")
    return name


def _choice(body: Fields, names: Sequence[str]) -> tuple[str, str]:
    """None, auto or required, and the function that is, where one is named."""
    choice = body.raw("tool_choice")
    if choice is None or choice in ("none", "auto"):
        return (choice or "auto" if names else "none"), ""
    if choice != "required" and not isinstance(choice, dict):
        remedy = "Send none, auto, required, or an object that names a function."
        raise body.refuse("tool_choice", f"is {shown(choice)}", remedy)
    if not names:
        raise body.refuse("tool_choice", "needs tools", "Send tools, or leave tool_choice out.")
    if choice == "required":
        return "required", ""
    named = as_object(choice, "tool_choice")
    function = named.object("function")
    if named.text("type") != "function" or function is None:
        raise named.refuse(
            "type", "must be function, with the function's name in its field 'function'"
        )
    if (name := function.required_text("name")) not in names:
        raise function.refuse(
            "name", f"is {shown(name)}, which is none of the tools", "Name one of tools."
        )
    return "required", name


ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def read_messages(
    body: Fields, content: Callable[[Fields], str | list[Any]]
) -> list[Mapping[str, Any]]:
    """The body's `messages`, with the contents that `content` reads. Raises InvalidField.

    The last one must be a user's or a tool's, and each tool's the one answer to an earlier call.
    """
    listed = body.listed("messages")
    if not listed:
        raise body.refuse("messages", "is missing or empty", "Send at least one user message.")
    messages: list[Mapping[str, Any]] = []
    for at, one in enumerate(listed):
        if (
            isinstance(one, dict)
            and one.keys() == PLAIN
            and one["role"] in PLAIN_ROLES
            and type(one["content"]) is str
        ):
            messages.append(one)
        else:
            messages.append(_message(as_object(one, f"messages[{at}]"), content))
    if messages[-1]["role"] not in ("user", "tool"):
        where = f"messages[{len(messages) - 1}].role"
        raise body.refuse(
            where,
            "must be user or tool",
            "Put the question, or a call's result, in the last message.",
        )
    _check_answers(messages)
    return messages


PLAIN = {"role", "content"}
PLAIN_ROLES = ("user", "system")


def _message(message: Fields, content: Callable[[Fields], str | list[Any]]) -> Mapping[str, Any]:
    role = message.text("role")
    if role not in ROLES:
        raise message.refuse("role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    lacks_content = role == "assistant" and message.raw("content") is None
    found: dict[str, Any] = {
        "role": ROLES[role],
        "content": "" if lacks_content else content(message),
    }
    if role == "tool":
        found["tool_call_id"] = _call_id(message, "tool_call_id")
    if role == "assistant":
        if calls := _calls(message):
            found["tool_calls"] = calls
        if thinking := message.text("reasoning_content"):
            found["reasoning_content"] = thinking
    return found


def text_of(message: Fields) -> str:
    """Its `content`, a string or parts that are texts. Raises InvalidField."""
    return "".join(message.parts("content", _text, "text parts"))


def _text(part: Fields) -> str:
    if part.text("type") != "text":
        raise part.refuse("type", "must be text", "Only text is served; leave other parts out.")
    text = part.text("text")
    if text is None:
        raise part.refuse("text", "is missing")
    return text


def _calls(message: Fields) -> tuple[Mapping[str, Any], ...]:
    """An assistant message's `tool_calls`, with their `arguments` as objects."""
    listed = message.listed("tool_calls") or []
    if len(listed) > MAX_TOOLS:
        raise message.refuse(
            "tool_calls", f"holds {len(listed)} calls", f"Send at most {MAX_TOOLS}."
        )
    return tuple([_call(one) for one in message.objects("tool_calls")])


def _call(call: Fields) -> Mapping[str, Any]:
    function = call.object("function")
    if call.text("type") not in ("function", None) or function is None:
        raise call.refuse("type", "must be function, with the call in the field 'function'")
    arguments = function.raw("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            raise function.refuse(
                "arguments", "is not JSON", "Send the model's own arguments."
            ) from None
    if not isinstance(arguments, dict):
        raise function.refuse("arguments", "must be a JSON object, as text")
    check_depth(arguments, function.path("arguments"))
    called = {"name": function_name(function), "arguments": arguments}
    return {"id": _call_id(call, "id"), "type": "function", "function": called}


def _call_id(message: Fields, name: str) -> str:
    found = message.required_text(name)
    if len(found) > CALL_ID_CHARACTERS:
        raise message.refuse(name, f"has over {CALL_ID_CHARACTERS} characters")
    return found


def _check_answers(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidField for a tool message whose `tool_call_id` is not that of an earlier call,
    or the second one.
    """
    open_calls: set[str] = set()
    for at, message in enumerate(messages):
        open_calls.update(call["id"] for call in message.get("tool_calls", ()))
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                remedy = "Send the assistant message with that call before its one result."
                raise refused(f"messages[{at}].tool_call_id", "answers no earlier call", remedy)
            open_calls.remove(message["tool_call_id"])


def calls_schema(offer: ToolOffer) -> str:
    """The JSON schema of the calls that must be made, an array, as SGLang has it; empty where none
    must be.

    Raises InvalidField where two tools define a type of one name differently.
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
                raise refused(path, "differs from that of another tool", "Rename one of them.")
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
    """The text that stands for the agent's output. JSON, HTML and template languages leave all of
    it as it is.
    """
    return f"[[{WORD}:{agent}]]"


def split_text(text: str, path: str) -> tuple[Segment, ...]:
    """`text` with slots where markers stood. Raises InvalidField for altered markers."""
    if not holds_marker(text):
        return (text,)
    pieces = MARKER.split(text)
    if any(map(holds_marker, pieces[::2])):
        remedy = (
            "Send markers whole. Where code cuts or reads text, ask without lazy, or first "
            "get the text from"
        )
        remedy += " GET /v1/agent/outputs/{marker}."
        raise refused(path, "holds a lazy answer's marker that was altered", remedy)
    return tuple(OutputOf(piece) if odd % 2 else piece for odd, piece in enumerate(pieces) if piece)


def holds_marker(text: str) -> bool:
    """Whether there is a marker in `text`, whole or altered."""
    return any(word in text and form.search(text) for word, form in _FORMS.items())


def has_markers(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there is a lazy answer's marker in them, whole or altered."""
    return holds_marker("\n".join([turn["content"] for turn in messages])) or any(
        map(marked_elsewhere, messages)
    )


def marked_elsewhere(turn: Mapping[str, Any]) -> bool:
    """Whether a marker is in the message's calls of tools, or in its thinking."""
    return len(turn) > len(("role", "content")) and holds_marker(orjson.dumps(turn).decode())
