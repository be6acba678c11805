"""Tools, calls and results in bodies."""

from collections.abc import Sequence
from typing import Any

import pytest

from shell_router.api.conversation import name_calls, read_messages, read_tools
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
    assert chosen == ToolOffer((WEATHER,), must_call=True, parallel=False)


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


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ('{"a": "cut of', {"INVALID_JSON": '{"a": "cut of'}),
        ("[]", {"INVALID_JSON": "[]"}),
        ("null", {}),
        ("  ", {}),
        ('{"a": 12345678901234567890123}', {"a": 12345678901234567890123}),
    ],
)
def test_arguments_that_a_model_wrote_are_never_refused(written: str, read_as: object) -> None:
    call = {"id": "c", "function": {"name": "weather", "arguments": written}}
    result = {"role": "tool", "content": "not JSON", "tool_call_id": "c"}
    turns = read(
        {"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}, result
    )
    assert turns[1]["tool_calls"][0]["function"]["arguments"] == read_as


def test_results_without_ids_answer_calls_without_ids_in_their_order() -> None:
    question = {"role": "user", "content": "Rain?"}
    unnamed = {"role": "assistant", "tool_calls": [{**CALL, "id": None}, {**CALL, "id": None}]}
    results = (
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": "b", "tool_call_id": None},
    )
    turns = read(question, unnamed, *results)
    ids = [call["id"] for call in turns[1]["tool_calls"]]
    assert len({*ids}) == 2 and [turn["tool_call_id"] for turn in turns[2:]] == ids
    with pytest.raises(InvalidField, match="answers no earlier call"):
        read(question, unnamed, *results, results[0])


def test_an_id_that_a_call_is_given_is_no_other_calls() -> None:
    look = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [{**look, "id": "call-0"}, look]},
        {"role": "tool", "content": "new"},
        {"role": "tool", "content": "old", "tool_call_id": "call-0"},
    ]
    _, called, new, _ = name_calls(chat)
    ids = [call["id"] for call in called["tool_calls"]]
    assert ids[0] == "call-0" != ids[1] == new["tool_call_id"]


def test_a_tool_keeps_the_strict_that_it_was_sent_with() -> None:
    for strict in (True, False):
        said = function(strict=strict)
        assert offer(tools=[said]) == ToolOffer((said,))


def test_a_refusal_that_a_model_wrote_is_text() -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    question = {"role": "user", "content": "Why?"}
    body = CHAT.read({"messages": [question, refused, question]})
    assert read_messages(body["messages"])[1]["content"] == "No."


def test_names_of_functions_have_up_to_128_characters() -> None:
    assert offer(tools=[function(name="x" * 128)]) is not None
    with pytest.raises(InvalidField, match="name"):
        offer(tools=[function(name="x" * 129)])
