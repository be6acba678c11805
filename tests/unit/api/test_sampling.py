"""OpenAI's sampling fields become SGLang's."""

import json

import pytest

from shell_router.api.bodies import read_sampling
from shell_router.api.fields import CHAT

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


def sampling(fields: dict[str, object]) -> dict[str, object]:
    return read_sampling(CHAT.read({"messages": [{"role": "user", "content": "x"}], **fields}))


@pytest.mark.parametrize(
    ("asked", "native"),
    [
        ({"temperature": 0}, {"temperature": 0}),
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_completion_tokens": 6}, {"max_new_tokens": 6}),
        ({"max_tokens": 7, "max_completion_tokens": 7}, {"max_new_tokens": 7}),
        ({"stop": "END"}, {"stop": "END"}),
        ({"stop": ["a", "b"]}, {"stop": ["a", "b"]}),
        ({"seed": 3}, {"sampling_seed": 3}),
        (
            {"min_tokens": 2, "top_k": 40, "min_p": 0.1},
            {"min_new_tokens": 2, "top_k": 40, "min_p": 0.1},
        ),
        (
            {"ignore_eos": True, "skip_special_tokens": False},
            {"ignore_eos": True, "skip_special_tokens": False},
        ),
        ({"stop_token_ids": [1, 2]}, {"stop_token_ids": [1, 2]}),
        ({"regex": "[0-9]+"}, {"regex": "[0-9]+"}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": '{"type": "object"}'}),
        ({"temperature": None, "stop": None, "seed": None}, {}),
    ],
)
def test_fields_are_renamed_and_absent_ones_left_to_the_engine(
    asked: dict[str, object], native: dict[str, object]
) -> None:
    assert sampling(asked) == native


@pytest.mark.parametrize("asked", [{"json_schema": SCHEMA}, {"json_schema": json.dumps(SCHEMA)}])
def test_a_schema_arrives_as_text_however_it_was_given(asked: dict[str, object]) -> None:
    assert json.loads(sampling(asked)["json_schema"]) == SCHEMA


def test_a_response_format_lets_through_the_properties_that_it_names() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    sent = json.loads(sampling({"response_format": form})["json_schema"])
    assert sent == {**SCHEMA, "additionalProperties": False}
