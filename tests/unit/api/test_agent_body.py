"""Reading agent requests."""

from shell_router.api.agents import AGENT, read_agent
from shell_router.moa.requests import AgentRequest, OutputOf
from shell_router.topology import Prefill

WHOLE: dict[str, object] = {"program": "p", "agent": "a", "model": "m", "prompt": "Hello"}


def read(**fields: object) -> AgentRequest:
    return read_agent(AGENT.read({**WHOLE, **fields}), "tenant", 600.0)


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
