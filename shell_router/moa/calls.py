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
    """The function `tools` that the agent which answers may call, as chat templates take them.

    With `must_call` its sampling constrains the output to a JSON array of calls. Unless `parallel`,
    one call is taken.
    """

    tools: tuple[Mapping[str, Any], ...]
    must_call: bool = False
    parallel: bool = True

    def shown_by(self, model: ServedModel) -> tuple[Mapping[str, Any], ...]:
        """The tools for the model's chat template; on SGLang servers as their own chats write them.

        Plain chats and graphs with the same tools then share the servers' prefix cache.
        """
        if model.call_parser is None:
            return self.tools
        return tuple(map(written_by_sglang, self.tools))


def written_by_sglang(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool with the nulls that SGLang 0.5.23 adds before it fills the chat template."""
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
    """Gives an answer's text up to its first call. Without a mark of calls that is known all of it
    may be calls.
    """

    def __init__(self, offer: ToolOffer, model: ServedModel) -> None:
        self._offer = offer
        if offer.must_call:
            self.parser = None
        else:
            self.parser = model.engines_parser
        if offer.must_call:
            self._mark = ""
        else:
            self._mark = model.call_mark or ""
        if self.parser is not None:
            self._mark = PARSER_MARKS.get(self.parser.tool_parser or "", "")
        self._held = ""
        self._calls: list[str] = []
        self._calling = not self._mark

    def feed(self, text: str) -> str:
        """What is certainly no call of all that has come."""
        if self._calling:
            self._calls.append(text)
            return ""
        self._held += text
        at = self._held.find(self._mark)
        if at < 0:
            sizes = range(len(self._mark) - 1, -1, -1)
            at = len(self._held) - next(
                size for size in sizes if self._held.endswith(self._mark[:size])
            )
        else:
            self._calling = True
        shown = self._held[:at]
        self._held = self._held[at:]
        return shown

    async def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """The calls of the ended output and the text before them that was held back, or all that
        was held back.

        Raises EngineError where the model's servers are asked for the calls.
        """
        before = ""
        held = self._held + "".join(self._calls)
        if self.parser is not None:
            before, found = (
                await self.parser.parse_calls(held, self._offer.tools) if held else ("", [])
            )
        elif self._offer.must_call:
            found = _listed(held)
        else:
            found = [_loaded(one) for one in _CALL.findall(held)]
        calls = self._offered(found)
        return (before, calls) if calls else (held, ())

    def _offered(self, found: Sequence[Any]) -> tuple[ToolCall, ...]:
        known = {tool["function"]["name"] for tool in self._offer.tools}
        calls = [call for one in found if (call := _call(one)) is not None and call.name in known]
        return tuple(calls if self._offer.parallel else calls[:1])


def _loaded(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def _listed(text: str) -> list[Any]:
    found = _loaded(text)
    return found if isinstance(found, list) else []


def _call(found: Any) -> ToolCall | None:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    try:
        written = orjson.dumps(arguments).decode()
    except orjson.JSONEncodeError:  # what is read may nest deeper than what can be written
        return None
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", found["name"], written)
