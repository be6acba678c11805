"""Tool calls in an agent's output: held back while it is written, read when it has ended."""

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from shell_router.core.engine import ServedModel, value
from shell_router.core.marks import PARSER_MARKS

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@value
class ToolOffer:
    """The functions that the answering agent may call.

    Attributes:
        tools: As chat templates take them.
        must_call: The sampling constrains the output to a JSON array of calls.
        parallel: Take all calls; otherwise the first.
    """

    tools: tuple[Mapping[str, Any], ...]
    must_call: bool = False
    parallel: bool = True

    def list_tools(self, model: ServedModel) -> tuple[Mapping[str, Any], ...]:
        """Return the tools for the model's chat template.

        On SGLang servers they are as the servers' own chats write them, so that plain chats and
        graphs with the same tools share the prefix cache.
        """
        if model.call_parser is None:
            return self.tools
        return tuple(map(add_sglang_nulls, self.tools))


def add_sglang_nulls(tool: Mapping[str, Any]) -> Mapping[str, Any]:
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


class CallReader:
    """Passes an answer's text up to its first call.

    If the mark that begins a call is not known, it holds back all text until the end.
    """

    def __init__(self, offer: ToolOffer, model: ServedModel) -> None:
        self.parser = None if offer.must_call else model.engines_parser
        self._offer = offer
        self._mark = ""
        if self.parser is not None:
            self._mark = PARSER_MARKS.get(self.parser.tool_parser or "", "")
        elif not offer.must_call:
            self._mark = model.call_mark or ""
        self._held = ""
        self._calls: list[str] = []
        self._is_calling = not self._mark

    def feed(self, text: str) -> str:
        """Take more of the output and return what is certainly no call."""
        if self._is_calling:
            self._calls.append(text)
            return ""
        self._held += text
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

    async def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the text that was held back, and the calls after it.

        Raises:
            EngineError: The model's servers parse calls, and failed.
        """
        held = self._held + "".join(self._calls)
        before = ""
        parsed: Sequence[Any] = []
        if self._offer.must_call:
            listed = _parse(held)
            if isinstance(listed, list):
                parsed = listed
        elif self.parser is None:
            parsed = [_parse(call) for call in _CALL.findall(held)]
        elif held:
            before, parsed = await self.parser.parse_calls(held, self._offer.tools)
        calls = self._select_calls(parsed)
        if calls:
            return before, calls
        return held, ()

    def _select_calls(self, parsed: Sequence[Any]) -> tuple[ToolCall, ...]:
        """Return the calls of functions that were offered."""
        names = {tool["function"]["name"] for tool in self._offer.tools}
        calls = [call for call in map(_read_call, parsed) if call is not None]
        calls = [call for call in calls if call.name in names]
        return tuple(calls if self._offer.parallel else calls[:1])


def _parse(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _read_call(parsed: Any) -> ToolCall | None:
    if not isinstance(parsed, dict) or not isinstance(parsed.get("name"), str):
        return None
    arguments = parsed.get("arguments", parsed.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    try:
        text = orjson.dumps(arguments).decode()
    except orjson.JSONEncodeError:  # parsed JSON may nest deeper than what can be written
        return None
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", parsed["name"], text)
