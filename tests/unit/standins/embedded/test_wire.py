"""Reading request bodies."""

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from shell_router.errors import InvalidRequest
from shell_router.standins.embedded.wire import (
    WHOLE_VOCABULARY,
    GenerateRequest,
    RequestLimits,
    parse_body,
    parse_sampling_params,
    read_request,
)

LIMITS = RequestLimits(context_length=100, max_total_tokens=80, vocab_size=50)


def word_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"one": 1, "two": 2}, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def read(**body: Any) -> GenerateRequest:
    return read_request(body, word_tokenizer(), LIMITS)


def test_defaults_are_those_of_sglang() -> None:
    params = parse_sampling_params({}, 50)
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (
        128,
        1.0,
        1.0,
        WHOLE_VOCABULARY,
    )


def test_temperature_zero_is_greedy() -> None:
    params = parse_sampling_params({"temperature": 0}, 50)
    assert params.greedy
    assert params.temperature == 1.0


def test_nulls_are_defaults_but_a_null_length_is_no_limit() -> None:
    params = parse_sampling_params(
        {"temperature": None, "top_k": None, "stop": None, "max_new_tokens": None}, 50
    )
    assert (params.temperature, params.top_k, params.stop, params.max_new_tokens) == (
        1.0,
        WHOLE_VOCABULARY,
        (),
        None,
    )


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert parse_sampling_params({"stop": "x"}, 50).stop == ("x",)
    assert parse_sampling_params({"stop": ["x", "y"]}, 50).stop == ("x", "y")


@pytest.mark.parametrize(
    "raw",
    [
        {"temperature": -0.1},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"min_p": 2},
        {"max_new_tokens": -1},
        {"max_new_tokens": True},
        {"min_new_tokens": 5, "max_new_tokens": 4},
        {"min_new_tokens": 129},
        {"frequency_penalty": 3},
        {"repetition_penalty": 0},
        {"logit_bias": {"50": 1}},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"--1": 1}},
        {"stop": 3},
        {"stop_token_ids": ["a"]},
        {"n": 2},
        {"custom_params": "text"},
        {"custom_params": {"drafts": [[1], "text"]}},
        {"custom_params": {"drafts": [[49, 50]]}},
        {"json_schema": {}},
        {"json_schema": "{}", "regex": "a"},
        {"json_schema": "{}", "min_new_tokens": 1},
        {"structural_tag": "{}"},
        {"no_such_field": 1},
    ],
)
def test_what_sampling_cannot_honour_is_refused(raw: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse_sampling_params(raw, 50)


def test_drafts_are_asked_for_in_the_custom_parameters() -> None:
    assert parse_sampling_params({"custom_params": {"drafts": [[1, 2], []]}}, 50).drafts == (
        (1, 2),
        (),
    )
    assert parse_sampling_params({"custom_params": {"drafts": []}}, 50).drafts == ()
    for custom in (None, {}, {"other": 1}, {"drafts": "text"}):
        assert parse_sampling_params({"custom_params": custom}, 50).drafts is None


def test_text_is_tokenized_and_ids_win_over_it() -> None:
    assert read(text="one two").input_ids == (1, 2)
    assert read(text="one two", input_ids=[7]).input_ids == (7,)


def test_a_missing_rid_is_made_up() -> None:
    assert read(input_ids=[1]).rid != read(input_ids=[1]).rid
    assert read(input_ids=[1], rid="mine").rid == "mine"


def test_output_is_cut_to_what_the_engine_can_hold() -> None:
    assert read(input_ids=[1] * 30, sampling_params={"max_new_tokens": 70}).max_new_tokens == 50
    assert read(input_ids=[1] * 30, sampling_params={"max_new_tokens": None}).max_new_tokens == 50


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": [1] * 100}, "longer than the model's context length"),
        (
            {"input_ids": [1] * 90, "sampling_params": {"max_new_tokens": 11}},
            "total of 101 tokens: 90 tokens",
        ),
        (
            {"input_ids": [1] * 85, "sampling_params": {"max_new_tokens": 1}},
            "maximum allowed length",
        ),
        ({"input_ids": [50]}, "vocabulary"),
        ({"input_ids": [-1]}, "vocabulary"),
        ({"image_data": "x", "text": "one"}, "image_data"),
        ({"lora_path": "sums", "text": "one"}, "lora_path"),
        ({"text": ""}, "empty"),
    ],
)
def test_prompts_that_do_not_fit_are_refused_with_the_numbers(
    body: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read(**body)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'{"rid": 1}',
        b'{"text": ["a"]}',
        b'{"input_ids": [[1]]}',
        b'{"input_ids": [1.5]}',
        b'{"input_ids": [true]}',
        b'{"stream": 1}',
        b'{"sampling_params": []}',
        b'{"bootstrap_room": -1}',
        b'{"bootstrap_room": 9223372036854775808}',
    ],
)
def test_bodies_against_the_schema_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_body(raw)


def test_unknown_fields_are_ignored() -> None:
    body = parse_body(b'{"input_ids": [1], "user": {"name": "x"}}')
    assert read_request(body, word_tokenizer(), LIMITS).input_ids == (1,)
