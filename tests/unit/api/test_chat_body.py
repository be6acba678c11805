"""Chat bodies, as they are understood; test_bodies.py has those that are refused."""

import pytest

from shell_router.api.bodies import ChatRequest, find_ignored, read_chat
from shell_router.api.fields import CHAT
from shell_router.core.validation import parse_object
from shell_router.errors import InvalidRequest

USER = {"role": "user", "content": "Hello"}


def read(**fields: object) -> ChatRequest:
    sent = {"model": "m", "messages": [USER], **fields}
    return read_chat(CHAT.read(sent), sent, "run", "me", 60.0)


def ignored(**fields: object) -> list[str]:
    sent = {"model": "m", "messages": [USER], **fields}
    return find_ignored(CHAT.read(sent), sent, is_panel=False)


def test_a_plain_body_is_read_with_defaults() -> None:
    chat = read()
    assert (chat.messages, chat.sampling) == ((USER,), {"stream_interval": 32})
    assert not (chat.stream or chat.include_usage or chat.include_agents)


def test_text_parts_are_joined_as_sglang_joins_them_and_developer_counts_as_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    instructions = {"role": "developer", "content": "Be brief."}
    chat = read(messages=[instructions, {"role": "user", "content": parts}])
    assert chat.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one two"},
    )


def test_an_assistant_message_that_says_nothing_is_empty_text() -> None:
    said = {"role": "assistant", "content": None}
    chat = read(messages=[USER, said, USER])
    assert chat.messages == (USER, {"role": "assistant", "content": ""}, USER)


def test_a_prediction_is_read_in_both_of_its_forms() -> None:
    parts = [{"type": "text", "text": "so it "}, {"type": "text", "text": "begins"}]
    for content in ("so it begins", parts):
        assert read(prediction={"type": "content", "content": content}).prediction == "so it begins"


def test_fields_that_ask_for_nothing_special_are_accepted() -> None:
    nothing = {"n": 1, "logprobs": False, "modalities": ["text"], "top_a": 0}
    read(**nothing, tools=[], tool_choice="auto", stop=None)


def test_the_tenants_user_is_the_cache_key_else_the_user_and_never_by_name() -> None:
    assert read().end_user is read(user="", prompt_cache_key=None).end_user is None
    ann, key = (read(**{name: "ann@example.org"}).end_user for name in ("user", "prompt_cache_key"))
    assert ann == key is not None and "ann" not in ann
    assert read(user="ben", prompt_cache_key="ann@example.org").end_user == ann
    assert read(user="ben").end_user != ann


def test_unknown_fields_are_listed_and_those_without_effect_are_not() -> None:
    assert ignored(colour=0.5, user="me", metadata={"a": "b"}, top_p=0.5, store=True) == ["colour"]
    assert ignored(nothing=None, quorum=2, audio=None) == ["quorum"]  # of no panel


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b'"x"', b"null", b'{"a": NaN}', b"\xff", b"[" * 5000]
)
def test_what_is_not_a_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_object(raw)
