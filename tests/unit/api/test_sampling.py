"""OpenAI's sampling fields become SGLang's."""

import json

import pytest

from shell_router.api.fields import Fields, read_sampling
from shell_router.errors import InvalidField

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


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
    assert read_sampling(Fields(asked)) == native


@pytest.mark.parametrize(
    "asked",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        {"json_schema": SCHEMA},
        {"json_schema": json.dumps(SCHEMA)},
    ],
)
def test_a_schema_arrives_as_text_however_it_was_given(asked: dict[str, object]) -> None:
    assert json.loads(read_sampling(Fields(asked))["json_schema"]) == SCHEMA


@pytest.mark.parametrize(
    ("asked", "at"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop_token_ids": [True]}, "stop_token_ids"),
        ({"seed": 2**64}, "seed"),
        ({"regex": "a", "json_schema": "{}"}, "json_schema"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
    ],
)
def test_a_wrong_value_is_refused_by_name(asked: dict[str, object], at: str) -> None:
    with pytest.raises(InvalidField) as refused:
        read_sampling(Fields(asked))
    assert refused.value.field == at


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_tokens": 1.5}, "max_tokens must be a whole number, not 1.5."),
        ({"temperature": "hot"}, 'temperature must be a number, not "hot".'),
        ({"temperature": "h" * 1000}, "temperature must be a number, not a string."),
        ({"stop": ["a", 5]}, "stop[1] must be a string, not 5."),
        ({"ignore_eos": [1]}, "ignore_eos must be true or false, not an array."),
    ],
)
def test_a_refusal_shows_the_value(asked: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidField) as refused:
        read_sampling(Fields(asked))
    assert str(refused.value) == message
