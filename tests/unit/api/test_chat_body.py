"""Reading chat bodies: what is refused, by which field, and what is understood."""

import pytest

from shell_router.api.chat import INERT, ChatRequest
from shell_router.api.chat import read_chat as read_chat_body
from shell_router.api.fields import Fields, parse_body
from shell_router.errors import InvalidField, InvalidRequest

USER = {"role": "user", "content": "Hello"}


def read_chat(body: Fields) -> ChatRequest:
    return read_chat_body(body, "run", "me", 60.0)


def body(**fields: object) -> Fields:
    return Fields({"model": "m", "messages": [USER], **fields})


def test_a_plain_body_is_read_with_defaults() -> None:
    chat = read_chat(body())
    assert (chat.models, chat.messages, chat.sampling) == (("m",), (USER,), {"stream_interval": 32})
    assert not (chat.stream or chat.include_usage or chat.include_agents)


def test_text_parts_are_joined_and_developer_counts_as_system() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    chat = read_chat(
        body(
            messages=[
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": parts},
            ]
        )
    )
    assert chat.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one two"},
    )


def test_an_assistant_message_that_says_nothing_is_empty_text() -> None:
    said = {"role": "assistant", "content": None}
    chat = read_chat(body(messages=[USER, said, USER]))
    assert chat.messages == (USER, {"role": "assistant", "content": ""}, USER)


TOOL, CLASHING = (
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "$defs": {"city": {"type": kind}}},
        },
    }
    for name, kind in (("look", "string"), ("walk", "integer"))
)


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        ({"user": 3}, "user"),
        ({"prompt_cache_key": ["a"], "user": "a"}, "prompt_cache_key"),
        ({"model": None}, "model"),
        ({"model": ""}, "model"),
        ({"model": 3}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hello"}, "messages"),
        ({"messages": ["Hello"]}, "messages[0]"),
        ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "Hello"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [USER, {"role": "tool", "content": "Hello", "tool_call_id": "c"}]},
            "messages[1].tool_call_id",
        ),
        ({"messages": [{"role": "function", "content": "Hello"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "assistant", "content": "Hi"}]}, "messages[1].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"stream": "yes"}, "stream"),
        ({"include_agents": 1}, "include_agents"),
        ({"stream_options": True}, "stream_options"),
        ({"stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL], "regex": "a"}, "tools"),
        (
            {"tools": [CLASHING, TOOL], "tool_choice": "required"},
            "tools[1].function.parameters.$defs.city",
        ),
        ({"chat_template_kwargs": 1}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"style": "x" * 2**14}}, "chat_template_kwargs"),
        ({"max_thinking_tokens": 0}, "max_thinking_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"audio": {}}, "audio"),
        ({"verbosity": "low"}, "verbosity"),
        ({"top_a": 0.1}, "top_a"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"temperature": 2.5}, "temperature"),
        ({"temprature": 1}, "temprature"),
        ({"max_new_tokens": 1}, "max_new_tokens"),
        ({"stream_option": {}}, "stream_option"),
        ({"prediction": "text"}, "prediction"),
        ({"prediction": {"content": "text"}}, "prediction.type"),
        ({"prediction": {"type": "content"}}, "prediction.content"),
    ],
)
def test_a_wrong_field_is_named_with_its_path(fields: dict[str, object], at: str) -> None:
    with pytest.raises(InvalidField) as refused:
        read_chat(body(**fields))
    assert refused.value.field == at
    assert at in str(refused.value)


def test_a_prediction_is_read_in_both_of_its_forms() -> None:
    parts = [{"type": "text", "text": "so it "}, {"type": "text", "text": "begins"}]
    for content in ("so it begins", parts):
        assert (
            read_chat(body(prediction={"type": "content", "content": content})).prediction
            == "so it begins"
        )


def test_fields_that_ask_for_nothing_special_are_accepted() -> None:
    read_chat(
        body(
            n=1,
            tools=[],
            tool_choice="auto",
            logprobs=False,
            modalities=["text"],
            stop=None,
            top_a=0,
        )
    )


def test_the_tenants_user_is_the_cache_key_else_the_user_and_never_by_name() -> None:
    assert (
        read_chat(body()).end_user
        is read_chat(body(user="", prompt_cache_key=None)).end_user
        is None
    )
    ann, key = (
        read_chat(body(**{name: "ann@example.org"})).end_user
        for name in ("user", "prompt_cache_key")
    )
    assert ann == key is not None and "ann" not in ann
    assert read_chat(body(user="ben", prompt_cache_key="ann@example.org")).end_user == ann
    assert read_chat(body(user="ben")).end_user != ann


def test_unknown_fields_are_listed_and_those_without_effect_are_not() -> None:
    read = body(colour=0.5, user="me", metadata={"a": "b"}, top_p=0.5)
    read_chat(read)
    assert {*read.unread} - INERT == {"colour"}


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b'"x"', b"null", b'{"a": NaN}', b"\xff", b"[" * 5000]
)
def test_what_is_not_a_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_body(raw)
