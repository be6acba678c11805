"""Tools, calls and results in bodies."""

from typing import Any

import pytest

from shell_router.api.conversation import read_messages, read_tools, text_of
from shell_router.api.fields import Fields
from shell_router.errors import InvalidField
from shell_router.moa.calls import ToolOffer

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
}


def body(**fields: object) -> Fields:
    return Fields({"tools": [WEATHER], **fields})


def test_tools_are_read_as_a_chat_template_takes_them() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    assert read_tools(Fields({})) is None and read_tools(body(tool_choice="none")) is None
    assert read_tools(body()) == ToolOffer((WEATHER,))
    forced = body(tool_choice="required", parallel_tool_calls=False)
    assert read_tools(forced) == ToolOffer((WEATHER,), must_call=True, parallel=False)
    others = body(tools=[function(name="clock"), WEATHER], tool_choice=named)
    assert read_tools(others) == ToolOffer((WEATHER,), must_call=True)


def function(**fields: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", **fields}}


def deep(levels: int) -> dict[str, Any]:
    return {"of": deep(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [3]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [function(name="a b")]}, "tools[0].function.name"),
        ({"tools": [function(parameters="{}")]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"$defs": [1]})]}, "tools[0].function.parameters.$defs"),
        ({"tools": [function(parameters=deep(300))]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [function(name=f"f{at}") for at in range(129)]}, "tools"),
        ({"tools": [function(description="x" * 2**18)]}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": function(name="other")}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.type"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_wrong_tools_are_refused_by_their_path(fields: dict[str, object], at: str) -> None:
    with pytest.raises(InvalidField) as refused:
        read_tools(body(**fields))
    assert refused.value.field == at


def read(*messages: dict[str, object]) -> list[Any]:
    return read_messages(Fields({"messages": [*messages]}), text_of)


def test_calls_become_objects_and_each_result_answers_one() -> None:
    asked = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "rain", "tool_call_id": "call_1"}
    found = read(asked, result)
    assert found[0]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": {"city": "Paris"},
    }
    for wrong, at in ((result, asked, result), 0), ((asked, result, result), 2):
        with pytest.raises(InvalidField) as refused:
            read(*wrong)
        assert refused.value.field == f"messages[{at}].tool_call_id"


@pytest.mark.parametrize(
    ("call", "at"),
    [
        ({**CALL, "id": None}, "id"),
        ({**CALL, "type": "custom"}, "type"),
        ({"id": "1", "function": {"name": "f", "arguments": "{"}}, "function.arguments"),
        ({"id": "1", "function": {"name": "f", "arguments": "[]"}}, "function.arguments"),
        ({"id": "1", "function": {"arguments": "{}"}}, "function.name"),
    ],
)
def test_wrong_calls_are_refused_by_their_path(call: dict[str, object], at: str) -> None:
    with pytest.raises(InvalidField) as refused:
        read({"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]})
    assert refused.value.field == f"messages[1].tool_calls[0].{at}"


def test_a_tool_keeps_the_strict_that_it_was_sent_with() -> None:
    for strict in (True, False):
        said = function(strict=strict)
        assert read_tools(body(tools=[said])) == ToolOffer((said,))
