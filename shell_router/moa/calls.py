"""Tool calls in an agent's output: held back while it is written, read when it has ended.

An output with a constraint of its own may hold calls as JSON in its place.
"""

import json
import re
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import orjson

from shell_router.core.engine import ServedModel, value
from shell_router.core.exact_json import NewValues, Values, parse_json, write_json
from shell_router.core.json_schema import close_objects, move_schema
from shell_router.core.marks import PARSER_MARKS
from shell_router.core.sampling import GRAMMARS, check_schema
from shell_router.core.validation import field_error

_DECODER = json.JSONDecoder(strict=False, parse_constant=int)
"""Reads line feeds in strings, which models write unescaped, but no NaN, which is no int."""
_BLANKS = re.compile(r"\s*")


@value
class ToolOffer:
    """The functions that the answering agent may call.

    Attributes:
        tools: As chat templates take them.
        must_call: The output is a JSON array of calls.
        parallel: Take all calls; otherwise the first.
    """

    tools: tuple[Values, ...]
    must_call: bool = False
    parallel: bool = True

    def list_tools(self, model: ServedModel) -> tuple[Values, ...]:
        """Return the tools for the model's chat template.

        On SGLang servers they are as the servers' own chats write them, so that plain chats and
        graphs with the same tools share the prefix cache.
        """
        if model.call_parser is None:
            return self.tools
        return tuple(map(add_sglang_nulls, self.tools))


def add_sglang_nulls(tool: Values) -> Values:
    """Return the tool with the nulls that SGLang 0.5.23 adds for the chat template."""
    function = tool["function"]
    absent = {name: None for name in ("description", "parameters") if name not in function}
    return {**tool, "function": {**function, **absent}, "defer_loading": None}


@value
class ToolCall:
    """A call of a function; `arguments` are a JSON object as text."""

    id: str
    name: str
    arguments: str


def ask_for_calls(sampling: Values, offer: ToolOffer, model: ServedModel) -> Values:
    """Return the sampling with what makes the model's outputs calls as the offer says.

    An engine that takes messages gets OpenAI's fields as `custom_params`. Raises InvalidField.
    """
    if not model.takes_messages:
        return constrain_calls(sampling, offer)
    choice: NewValues = {"tool_choice": "required"} if offer.must_call else {}
    if not offer.parallel:
        choice["parallel_tool_calls"] = False
    return {**sampling, "custom_params": choice}


def constrain_calls(sampling: Values, offer: ToolOffer) -> Values:
    """Return the sampling with a schema of calls, if calls must come or there is another schema.

    Calls that must come are an array, as SGLang has it. Otherwise the output obeys its own schema,
    `answer.`, a name that no tool has, or is a call or an array of calls.

    Raises:
        InvalidField: The output has a constraint that is no schema, and calls may come.
    """
    constraint = next((name for name in GRAMMARS if sampling.get(name) is not None), None)
    if not offer.must_call and constraint is None:
        return sampling
    kinds: NewValues = {}
    call = {"anyOf": [_write_call_schema(tool, kinds) for tool in offer.tools]}
    calls = {"type": "array", "minItems": 1, "items": call}
    if not offer.parallel:
        calls["maxItems"] = 1
    if offer.must_call:
        schema = calls
    elif constraint == "json_schema":
        try:
            answer = parse_json(sampling["json_schema"])
        except orjson.JSONDecodeError as error:
            raise field_error("json_schema", f"is no JSON: {error}") from None
        kinds["answer."] = move_schema(answer, "#/$defs/answer.")
        schema = {"anyOf": [{"$ref": "#/$defs/answer."}, call, calls]}
    else:
        raise field_error("tools", f"cannot go with {constraint}", "Send only one of them.")
    others = {name: value for name, value in sampling.items() if name not in GRAMMARS}
    return {**others, "json_schema": write_json({**schema, "$defs": kinds}).decode()}


def _write_call_schema(tool: Values, kinds: NewValues) -> Values:
    """Return the schema of a tool's call, and put that of its arguments into `kinds`."""
    function = tool["function"]
    name = function["name"]
    check_schema(function.get("parameters"), "tools")
    pointer = f"#/$defs/{name}"
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    kinds[name] = move_schema(close_objects(parameters), pointer)
    called = {
        "name": {"type": "string", "enum": [name]},
        "parameters": {"$ref": pointer},
    }
    return {
        "type": "object",
        "properties": called,
        "required": [*called],
        "additionalProperties": False,
    }


UNKNOWN_FORMAT = (
    "No tool was called: the format in which {model!r} writes calls is not known. Set "
    "models.{model}.tool_call_parser in the configuration, start its servers with "
    "--tool-call-parser, or set tool_choice to required or a function."
)


class CallReader:
    """Passes an answer's text up to its first call.

    If the mark that begins a call is not known, it holds back all text until the end. An output
    `is_constrained` by `constrain_calls` begins with its calls, or holds none.

    Attributes:
        parser: The parser of the model's servers, if it reads the calls.
        warning: Why no call can be read, if the format of the model's calls is not known.
    """

    def __init__(self, offer: ToolOffer, model: ServedModel, *, is_constrained: bool) -> None:
        self.parser = None if is_constrained else model.engines_parser
        self.warning = ""
        self._offer = offer
        self._mark = ""
        self._starts = _list_starts(offer) if is_constrained else ()
        self._passes = False
        if self.parser is not None:
            self._mark = PARSER_MARKS.get(self.parser.tool_parser or "", "")
        elif not is_constrained:
            self._mark = model.call_mark or ""
            if not self._mark:
                self.warning = UNKNOWN_FORMAT.format(model=model.alias)
                self._passes = True
        self._held = ""
        self._calls: list[str] = []
        self._is_calling = not (self._mark or self._starts)

    def feed(self, text: str) -> str:
        """Take more of the output and return what is certainly no call."""
        if self._passes:
            return text
        if self._is_calling:
            self._calls.append(text)
            return ""
        self._held += text
        if self._starts:
            return self._feed_constrained()
        at = self._held.find(self._mark)
        if at >= 0:
            self._is_calling = True
        else:
            sizes = range(len(self._mark) - 1, -1, -1)
            begun = next(size for size in sizes if self._held.endswith(self._mark[:size]))
            at = len(self._held) - begun
        passed = self._held[:at]
        self._held = self._held[at:]
        return passed

    def _feed_constrained(self) -> str:
        written = "".join(self._held.split())
        if written.startswith(self._starts):
            self._is_calling = True
        elif not any(start.startswith(written) for start in self._starts):
            self._passes = True
            passed = self._held
            self._held = ""
            return passed
        return ""

    async def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text that was held back, and the calls after it.

        A call that was cut at the output's limit is left out. The schema of calls is the router's,
        so that what obeys it is never text.

        Raises:
            EngineError: The model's servers parse calls, and failed.
        """
        held = self._held + "".join(self._calls)
        before = ""
        parsed: Iterable[Any] = ()
        if self._starts:
            values = list(_read_array(held)) if self._is_calling else []
            calls = self._select_calls(filter(_is_whole_call, values))
            is_text = values or not self._is_calling
            return held if is_text and not calls else "", calls
        if self.parser is None:
            parsed = _read_marked(held, self._mark) if self._mark else ()
        elif held:
            before, parsed = await self.parser.parse_calls(held, self._offer.tools)
        calls = self._select_calls(parsed)
        if calls:
            return before, calls
        return held, ()

    def _select_calls(self, parsed: Iterable[Any]) -> tuple[ToolCall, ...]:
        """Return the calls of functions that were offered."""
        names = {tool["function"]["name"] for tool in self._offer.tools}
        calls = [call for call in map(_read_call, parsed) if call is not None]
        calls = [call for call in calls if call.name in names]
        return tuple(calls if self._offer.parallel else calls[:1])


def _list_starts(offer: ToolOffer) -> tuple[str, ...]:
    """Return the beginnings of a constrained output with calls, without white space."""
    if offer.must_call:
        return ("[",)
    calls = [f'{{"name":"{tool["function"]["name"]}"' for tool in offer.tools]
    return (*calls, *(f"[{call}" for call in calls))


def _is_whole_call(value: Any) -> bool:
    """Return whether the value has a call's arguments, as answers with a name have not."""
    return isinstance(value, dict) and not {"arguments", "parameters"}.isdisjoint(value)


def _read_array(text: str) -> Iterator[Any]:
    """Yield the whole values of a JSON array, which may be cut, or a value alone."""
    at = text.index("[") if text.lstrip().startswith("[") else -1
    with suppress(ValueError, RecursionError):
        while True:
            value, end = _read_value(text, at + 1)
            yield value
            at = text.find(",", end)
            if at < 0:
                return


def _read_marked(text: str, mark: str) -> Iterator[Any]:
    """Yield the JSON values behind the marks that are outside of them."""
    at = text.find(mark)
    while at >= 0:
        at += len(mark)
        with suppress(ValueError, RecursionError):
            value, at = _read_value(text, at)
            yield value
        at = text.find(mark, at)


def _read_value(text: str, at: int) -> tuple[Any, int]:
    blanks = _BLANKS.match(text, at)
    return _DECODER.raw_decode(text, blanks.end() if blanks else at)


def _read_call(parsed: Any) -> ToolCall | None:
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return None
    arguments = parsed.get("arguments", parsed.get("parameters"))
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    try:
        text = write_json(arguments).decode()
    except orjson.JSONEncodeError:  # parsed JSON may nest deeper than what can be written
        return None
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", parsed["name"], text)
