"""Reading agent requests."""

import pytest

from shell_router.api.agents import read_agent_body
from shell_router.api.fields import Fields
from shell_router.errors import InvalidField
from shell_router.moa.requests import AgentRequest, OutputOf
from shell_router.topology import Prefill

WHOLE: dict[str, object] = {"program": "p", "agent": "a", "model": "m", "prompt": "Hello"}


def read(**fields: object) -> AgentRequest:
    return read_agent_body(Fields({**WHOLE, **fields}), "tenant", 600.0)[0]


def test_a_prompt_is_text_or_segments() -> None:
    assert read().prompt == ("Hello",)
    segments = ["One: ", {"output_of": "one"}, {"text": " Two: "}, {"output_of": "two"}]
    assert read(prompt=segments).prompt == ("One: ", OutputOf("one"), " Two: ", OutputOf("two"))


def test_messages_hold_segments_too() -> None:
    messages = [
        {"role": "system", "content": "Judge."},
        {"role": "user", "content": ["A: ", {"output_of": "one"}, {"type": "text", "text": "!"}]},
    ]
    assert read(prompt=None, messages=messages).messages == (
        ("system", ("Judge.",)),
        ("user", ("A: ", OutputOf("one"), "!")),
    )


def test_sampling_is_openai_named_or_native() -> None:
    assert read(max_tokens=4, temperature=0).sampling == {"max_new_tokens": 4, "temperature": 0}
    assert read(sampling_params={"custom_thing": 1}).sampling == {"custom_thing": 1}


def test_limits_default_to_the_servers_and_waiting_to_a_minute() -> None:
    assert (read().timeout_s, read().wait_s) == (600.0, 60.0)
    assert (read(timeout_s=5).timeout_s, read(timeout_s=5).wait_s) == (5, 5)
    assert read(wait_s=0).wait_s == 0


def test_prefill_settings_are_read() -> None:
    wanted = {"incremental": False, "chunk_tokens": 16}
    assert read(prefill=wanted).prefill == Prefill(False, 16)
    assert read(prefill={"chunk_tokens": "adaptive"}).prefill == Prefill()


@pytest.mark.parametrize(
    ("fields", "at"),
    [
        ({"program": None}, "program"),
        ({"program": "a b"}, "program"),
        ({"agent": "a/b"}, "agent"),
        ({"agent": "x" * 129}, "agent"),
        ({"model": None}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [5]}, "prompt[0]"),
        ({"prompt": [{}]}, "prompt[0]"),
        ({"prompt": [{"text": "a", "output_of": "b"}]}, "prompt[0]"),
        ({"prompt": ["a", {"output_of": "no spaces"}]}, "prompt[1].output_of"),
        ({"prompt": None, "messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"prompt": None, "messages": [{"role": "user", "content": [1]}]},
            "messages[0].content[0]",
        ),
        ({"timeout_s": 601}, "timeout_s"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"wait_s": -1}, "wait_s"),
        ({"sampling_params": {}, "temperature": 0}, "sampling_params"),
        ({"sampling_params": []}, "sampling_params"),
        ({"prefill": {"chunk": 5}}, "prefill.chunk"),
        ({"prefill": {"chunk_tokens": "big"}}, "prefill.chunk_tokens"),
        ({"prefill": {"min_tokens": 9, "max_tokens": 3}}, "prefill.min_tokens"),
        ({"prefill": {"slot_order": "random"}}, "prefill.slot_order"),
        ({"prefill": {"incremental": "no"}}, "prefill.incremental"),
        ({"stream": 1}, "stream"),
    ],
)
def test_a_wrong_field_is_named_with_its_path(fields: dict[str, object], at: str) -> None:
    with pytest.raises(InvalidField) as refused:
        read(**fields)
    assert refused.value.field == at
