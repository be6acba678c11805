"""Tools in requests: the functions that a model may call, its calls, and the results that clients send back."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import orjson

from shell_router.api.fields import Fields, as_object, shown
from shell_router.core.engine import value
from shell_router.core.sampling import check_depth
from shell_router.errors import InvalidField

FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
CALL_ID_CHARACTERS = 128
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 2**18
"""Of all tools together as JSON: every one of them is part of the prompt."""

ToolMode = Literal["none", "auto", "required", "named"]


@value
class ToolUse:
    """The function `tools` as a chat template takes them, and how a model is to use them.

    Of `mode` named, the function `name` must be called. Without tools the mode is none.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    mode: ToolMode = "none"
    name: str = ""
    parallel: bool = True


TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})


def read_tools(body: Fields) -> ToolUse:
    """The body's `tools`, `tool_choice` and `parallel_tool_calls`. Raises InvalidField."""
    listed = body.listed("tools") or []
    parallel = body.raw("parallel_tool_calls") is None or body.flag("parallel_tool_calls")
    if len(listed) > MAX_TOOLS:
        raise body.refuse("tools", f"holds {len(listed)} tools", f"Send at most {MAX_TOOLS}.")
    check_depth(listed, "tools")
    tools = tuple([_tool(as_object(one, f"tools[{at}]")) for at, one in enumerate(listed)])
    names = [tool["function"]["name"] for tool in tools]
    for at, name in enumerate(names):
        if name in names[:at]:
            raise InvalidField(f"tools[{at}].function.name repeats {name!r}.", field=f"tools[{at}].function.name")
    if listed and (size := len(orjson.dumps(listed))) > MAX_TOOLS_BYTES:
        raise body.refuse("tools", f"takes {size} bytes", f"Send at most {MAX_TOOLS_BYTES}.")
    mode, name = _choice(body, names)
    return ToolUse(tools, mode, name, parallel)


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
    return {"type": "function", "function": {name: described[name] for name in given if name in described}}


def function_name(function: Fields) -> str:
    """Its `name`: 1 to 64 letters, digits, _ or -."""
    name = function.required_text("name")
    if not FUNCTION_NAME.fullmatch(name):
        raise function.refuse("name", "may hold 1 to 64 letters, digits, _ and -")
    return name


def _choice(body: Fields, names: Sequence[str]) -> tuple[ToolMode, str]:
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
    named = cast(Fields, body.object("tool_choice"))
    function = named.object("function")
    if named.text("type") != "function" or function is None:
        raise named.refuse("type", "must be function, with the function's name in its field 'function'")
    if (name := function.required_text("name")) not in names:
        raise function.refuse("name", f"is {shown(name)}, which is none of the tools", "Name one of tools.")
    return "named", name


def read_calls(message: Fields) -> tuple[Mapping[str, Any], ...]:
    """An assistant message's `tool_calls`, with their `arguments` as objects. Raises InvalidField."""
    path = message.path("tool_calls")
    listed = message.listed("tool_calls") or []
    if len(listed) > MAX_TOOLS:
        raise message.refuse("tool_calls", f"holds {len(listed)} calls", f"Send at most {MAX_TOOLS}.")
    return tuple([_call(as_object(one, f"{path}[{at}]")) for at, one in enumerate(listed)])


def _call(call: Fields) -> Mapping[str, Any]:
    function = call.object("function")
    if call.text("type") not in ("function", None) or function is None:
        raise call.refuse("type", "must be function, with the call in the field 'function'")
    arguments = function.raw("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            raise function.refuse("arguments", "is not JSON", "Send the model's own arguments.") from None
    if not isinstance(arguments, dict):
        raise function.refuse("arguments", "must be a JSON object, as text")
    check_depth(arguments, function.path("arguments"))
    called = {"name": function_name(function), "arguments": arguments}
    return {"id": call_id(call, "id"), "type": "function", "function": called}


def call_id(message: Fields, name: str) -> str:
    """A call's id in field `name`."""
    found = message.required_text(name)
    if len(found) > CALL_ID_CHARACTERS:
        raise message.refuse(name, f"has over {CALL_ID_CHARACTERS} characters")
    return found


def check_answers(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raises InvalidField for a tool message whose `tool_call_id` is not that of an earlier call, or the second one."""
    open_calls: set[str] = set()
    for at, message in enumerate(messages):
        open_calls.update(call["id"] for call in message.get("tool_calls", ()))
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                path = f"messages[{at}].tool_call_id"
                remedy = "Send the assistant message with that call before its one result."
                raise InvalidField(f"{path} answers no earlier call.", field=path, remedy=remedy)
            open_calls.remove(message["tool_call_id"])


def calls_schema(use: ToolUse) -> str:
    """The JSON schema of the calls that must be made, an array, as SGLang has it; empty where none must be.

    Raises InvalidField where two tools define a type of one name differently.
    """
    if use.mode not in ("required", "named"):
        return ""
    kinds: dict[str, Any] = {}
    items = []
    for at, tool in enumerate(use.tools):
        function = tool["function"]
        if use.mode == "named" and function["name"] != use.name:
            continue
        parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
        for name, kind in (parameters.pop("$defs", None) or {}).items():
            if kinds.setdefault(name, kind) != kind:
                path = f"tools[{at}].function.parameters.$defs.{name}"
                raise InvalidField(
                    f"{path} differs from that of another tool.", field=path, remedy="Rename one of them."
                )
        called = {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters}
        items.append({"type": "object", "properties": called, "required": [*called], "additionalProperties": False})
    schema = {"type": "array", "minItems": 1, "items": items[0] if len(items) == 1 else {"anyOf": items}}
    if not use.parallel:
        schema["maxItems"] = 1
    return orjson.dumps({**schema, "$defs": kinds} if kinds else schema).decode()
