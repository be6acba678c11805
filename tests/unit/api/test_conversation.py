"""Tools, calls and results in bodies."""

from collections.abc import Sequence
from typing import Any

import pytest

from shell_router.api.conversation import read_messages, read_tools
from shell_router.api.fields import CHAT
from shell_router.errors import InvalidField
from shell_router.moa.calls import ToolOffer

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}


def offer(**fields: object) -> ToolOffer | None:
    sent = {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER], **fields}
    return read_tools(CHAT.read(sent), sent)


def test_tools_are_read_as_a_chat_template_takes_them() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    assert offer(tools=None) is None and offer(tool_choice="none") is None
    assert offer() == ToolOffer((WEATHER,))
    forced = offer(tool_choice="required", parallel_tool_calls=False)
    assert forced == ToolOffer((WEATHER,), must_call=True, parallel=False)
    chosen = offer(tools=[function(name="clock"), WEATHER], tool_choice=named)
    assert chosen == ToolOffer((WEATHER,), must_call=True)


def test_the_fields_of_a_function_keep_the_clients_order() -> None:
    described = {"parameters": {"b": 1, "a": 2}, "description": "It.", "name": "weather"}
    found = offer(tools=[{"type": "function", "function": {**described, "extra": 1}}])
    assert found is not None
    assert list(found.tools[0]["function"].items()) == list(described.items())


def function(**fields: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", **fields}}


def read(*messages: dict[str, object]) -> Sequence[Any]:
    return read_messages(CHAT.read({"messages": [*messages]})["messages"])


def test_calls_become_objects_and_each_result_answers_one() -> None:
    question = {"role": "user", "content": "Rain?"}
    asked = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "rain", "tool_call_id": "call_1"}
    found = read(question, asked, result)
    assert found[1]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": {"city": "Paris"},
    }
    for wrong, at in ((result, asked, result), 0), ((asked, result, result), 2):
        with pytest.raises(InvalidField) as refused:
            read(*wrong)
        assert refused.value.field == f"messages[{at}].tool_call_id"


def test_a_tool_keeps_the_strict_that_it_was_sent_with() -> None:
    for strict in (True, False):
        said = function(strict=strict)
        assert offer(tools=[said]) == ToolOffer((said,))
