"""A client's body keeps its bytes; what would confuse the pair is refused."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.core.engine import DEFAULT_MAX_NEW_TOKENS, NativeRoute
from shell_router.engines.native_body import FIELDS, MEDIA, NativeRules, read_native
from shell_router.errors import InvalidField, InvalidRequest, PromptTooLong

PD = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def test_unknown_fields_and_number_formats_keep_their_bytes() -> None:
    body = b'{ "input_ids":[1, 2],\t"temperature": 1.50e0, "new_field": {"a" : 1.0} }\n\n'
    sent = read_native(
        body, "fresh", NativeRules(fields=frozenset(["new_field", "temperature"]))
    ).with_fields(PD)
    assert sent.startswith(
        b'{ "input_ids":[1, 2],\t"temperature": 1.50e0, "new_field": {"a" : 1.0}'
    )
    assert orjson.loads(sent) == {**orjson.loads(body), "rid": "fresh", **PD}


def _has_no_rule(field: str) -> bool:
    return not field.startswith("rid") and field not in FIELDS["generate"]


@given(
    st.dictionaries(st.text(max_size=6).filter(_has_no_rule), JSON, max_size=5),
    st.sampled_from(["", " \r\n"]),
)
def test_every_object_gains_exactly_the_new_fields(found: dict[str, object], tail: str) -> None:
    rules = NativeRules(fields=frozenset(found))
    sent = read_native(
        orjson.dumps(found) + tail.encode(), "fresh", rules, {"extra_key": "alice"}
    ).with_fields(PD)
    assert orjson.loads(sent) == {**found, "rid": "fresh", "extra_key": "alice", **PD}


def test_without_fields_only_the_rid_is_added() -> None:
    assert read_native(b"{}", "fresh").with_fields({}) == b'{"rid":"fresh"}'


ROUTES: tuple[NativeRoute, ...] = (
    "generate",
    "prefill_only",
    "v1/chat/completions",
    "v1/completions",
)


@pytest.mark.parametrize("route", ROUTES)
def test_a_field_that_is_false_asks_for_nothing(route: NativeRoute) -> None:
    for name in ("return_routed_experts", "return_hidden_states", "of_a_later_sglang"):
        read_native(orjson.dumps({name: False}), "fresh", route=route)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "field", ["data_parallel_rank", "priority", "log_metrics", "bootstrap_room"]
)
def test_a_field_that_means_something_by_false_is_refused(field: str, route: NativeRoute) -> None:
    with pytest.raises(InvalidRequest, match=field):
        read_native(orjson.dumps({field: False}), "fresh", route=route)


@pytest.mark.parametrize(
    "field",
    [
        "image_data",
        "custom_logit_processor",
        "session_params",
        "lora_path",
        "priority",
        "data_parallel_rank",
        "extra_key",
        "return_hidden_states",
        "of_a_later_sglang",
    ],
)
@pytest.mark.parametrize("route", ROUTES)
def test_what_loads_code_or_chooses_servers_is_forwarded_only_where_an_operator_says_so(
    field: str, route: NativeRoute
) -> None:
    body = orjson.dumps({field: "x"})
    with pytest.raises(InvalidRequest, match="native_fields"):
        read_native(body, "fresh", route=route)
    read_native(orjson.dumps({field: None}), "fresh", route=route)
    assert (
        field.encode()
        in read_native(body, "fresh", NativeRules(fields=frozenset([field])), route=route).opened
    )


@pytest.mark.parametrize("url", ["http://10.0.0.1/x.png", "file:///etc/passwd", "/etc/passwd"])
@pytest.mark.parametrize(
    "part", [{"image_url": {"url": "%s"}}, {"audio_url": "%s"}, {"video_url": {"url": "%s"}}]
)
def test_engines_fetch_no_media_unless_an_operator_says_so(
    url: str, part: dict[str, object]
) -> None:
    content = orjson.loads(orjson.dumps([part]).replace(b"%s", url.encode()))
    body = orjson.dumps({"messages": [{"role": "user", "content": content}]})
    with pytest.raises(InvalidRequest, match="data: URL"):
        read_native(body, "fresh", route="v1/chat/completions")
    read_native(body, "fresh", NativeRules(fields=frozenset([MEDIA])), route="v1/chat/completions")
    read_native(body.replace(url.encode(), b"data:,"), "fresh", route="v1/chat/completions")


@pytest.mark.parametrize(
    "field", [{"stop_token_ids": [100]}, {"logit_bias": {"100": 1}}, {"stop": ["x"] * 33}]
)
def test_a_chats_sampling_fields_are_checked_as_all_others(field: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        read_native(orjson.dumps(field), "fresh", NativeRules(100), route="v1/chat/completions")


@pytest.mark.parametrize(
    "body", [{"text": "x" * 1601}, {"text": ["x", "x" * 1601]}, {"input_ids": [1] * 101}]
)
def test_a_prompt_that_cannot_fit_is_refused_before_an_engine_tokenizes_it(
    body: dict[str, object],
) -> None:
    with pytest.raises(PromptTooLong):
        read_native(orjson.dumps(body), "fresh", NativeRules(1000, 100))


@pytest.mark.parametrize(
    ("body", "rids"),
    [
        (b'{"text": "x"}', ("fresh",)),
        (b'{"text": ["x", "y"]}', ("fresh_0", "fresh_1")),
        (b'{"input_ids": [[1], [2]]}', ("fresh_0", "fresh_1")),
    ],
)
def test_every_request_of_a_body_can_be_aborted_by_its_rid(
    body: bytes, rids: tuple[str, ...]
) -> None:
    assert read_native(body, "fresh").rids == rids


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[1]",
        b'"text"',
        b"null",
        b'{"a": 1',
        b'{"a": NaN}',
        b'{"bootstrap_room": 1}',
        b'{"bootstr\\u0061p_host": "2.2.2.2"}',
        b'{"rid": 3}',
        b'{"rid": "too-short-to-be-unique"}',
        b'{"rid": ""}',
        b'{"rid": null}',
        b'{"rid": []}',
        b'{"rid": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}',
        b'{"token_ids_logprob": [-1], "top_logprobs_num": 1000}',
        b'{"text": [%s]}' % b",".join([b'""'] * 1025),
        b'{"sampling_params": [1]}',
    ],
)
def test_bodies_that_would_confuse_the_pair_are_refused_with_a_remedy(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_native(body, "fresh")
    assert refused.value.remedy


@pytest.mark.parametrize(
    "ids", ["[100]", "[-1]", "[1, 2, 100]", "[[1], [100]]", "[true]", "[1.0]", '["1"]']
)
def test_ids_outside_the_vocabulary_never_reach_an_engine(ids: str) -> None:
    with pytest.raises(InvalidRequest, match="below 100"):
        read_native(b'{"input_ids": %s}' % ids.encode(), "fresh", NativeRules(100))


SHAPES = {
    "sampling_params": ([{"top_k": 1}], 1, "x", True),
    "return_logprob": ([True], 1, "true", {}),
    "logprob_start_len": ([0], -2, 1.0, "0", True, 2**31, {}),
    "top_logprobs_num": ([1], -1, 129, 1.0, "1", True, [[1]], {}),
    "token_ids_logprob": ([[1]], 1, [-1], [100], ["1"], [1.0], [True], [[1], 1], {"1": 1}),
    "stream": ([True], 1, "true", {}),
    "return_text_in_logprobs": ([True], 1, "x"),
    "return_prompt_token_ids": ([True], 1, "x"),
}
"""Wrong values of a single prompt's fields."""
EACH = {
    "sampling_params": {"top_k": 1},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 1,
    "token_ids_logprob": [1],
}
"""Good values of the fields that may have one for each prompt of a batch."""
ROUTES: tuple[NativeRoute, ...] = ("generate", "prefill_only")


def read_refused_field(body: dict[str, object], route: NativeRoute) -> str:
    with pytest.raises(InvalidField) as refused:
        read_native(orjson.dumps(body), "fresh", NativeRules(100), route=route)
    assert refused.value.remedy
    return refused.value.field


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in SHAPES.items() for value in values]
)
def test_a_value_that_no_single_prompt_may_have_is_refused_by_its_field(
    field: str, value: object, route: NativeRoute
) -> None:
    for prompt in ({"text": "x"}, {"input_ids": [1]}, {}):
        assert read_refused_field({field: value, **prompt}, route) == field


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("batch", [{"text": ["x", "y"]}, {"input_ids": [[1], [2]]}])
@pytest.mark.parametrize("field", EACH)
def test_a_batch_has_one_value_for_all_of_its_prompts_or_one_for_each(
    field: str, batch: dict[str, object], route: NativeRoute
) -> None:
    good = EACH[field]
    for value in (good, [good] * 2, None):
        read_native(orjson.dumps({**batch, field: value}), "fresh", NativeRules(100), route=route)
    bad = [[good], [good] * 3, [good, None], [good, "x"], [good, [[good]]]]
    if field != "token_ids_logprob":
        bad.append([])
    for value in bad:
        assert read_refused_field({**batch, field: value}, route) == field


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"text": 1}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ["x", None]}, "text"),
        ({"text": ["x", ["y"]]}, "text"),
        ({"text": ["x"] * 1025}, "text"),
        ({"input_ids": "x"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": [[1], None]}, "input_ids"),
        ({"input_ids": [[[1]]]}, "input_ids"),
        ({"input_ids": [[1]] * 1025}, "input_ids"),
        ({"text": ["x", "y"], "input_ids": [1, 2]}, "input_ids"),
    ],
)
def test_wrong_prompts_are_refused_by_their_field(prompt: dict[str, object], field: str) -> None:
    assert read_refused_field(prompt, "generate") == field


@pytest.mark.parametrize(
    "body", ['{"input_ids": [0, 99]}', '{"input_ids": [[0], [99]]}', '{"text": "x"}']
)
def test_ids_of_the_vocabulary_pass(body: str) -> None:
    read_native(body.encode(), "fresh", NativeRules(100))


def test_a_batch_may_have_sampling_parameters_for_each_of_its_requests() -> None:
    native = read_native(
        b'{"text": ["x", "y"], "sampling_params": [{"top_k": 1}, {"max_new_tokens": 9}]}', "fresh"
    )
    found = orjson.loads(native.replace_fields({"sampling_params": {"max_new_tokens": 1}}))
    assert found["sampling_params"] == [{"top_k": 1, "max_new_tokens": 1}, {"max_new_tokens": 1}]


def test_replacing_sampling_parameters_keeps_the_clients_others() -> None:
    native = read_native(
        b'{"sampling_params": {"temperature": 0, "max_new_tokens": 9}, "text": "x"}', "fresh"
    )
    found = orjson.loads(
        native.replace_fields({"sampling_params": {"max_new_tokens": 1}, "stream": False})
    )
    assert found["sampling_params"] == {"temperature": 0, "max_new_tokens": 1}
    assert (found["text"], found["stream"]) == ("x", False)


@pytest.mark.parametrize("several", [b'{"n": 2}', b'[{}, {"n": 3}]', b'{"n": 0}'])
def test_several_samples_of_one_prompt_are_refused(several: bytes) -> None:
    with pytest.raises(InvalidRequest, match="Send the request n times"):
        read_native(b'{"text": ["x", "y"], "sampling_params": %s}' % several, "fresh")
    read_native(b'{"sampling_params": {"n": 1}}', "fresh")


@pytest.mark.parametrize(
    ("route", "body", "most"),
    [
        ("generate", {}, DEFAULT_MAX_NEW_TOKENS),
        ("generate", {"sampling_params": {"max_new_tokens": 4096}}, 4096),
        (
            "generate",
            {
                "input_ids": [[1], [2]],
                "sampling_params": [{"max_new_tokens": 3}, {"max_new_tokens": 5}],
            },
            5,
        ),
        ("generate", {"sampling_params": {"max_new_tokens": 0}}, 0),
        ("v1/completions", {"prompt": "x", "max_tokens": 4096}, 4096),
        ("v1/chat/completions", {"messages": [], "max_completion_tokens": 7}, 7),
    ],
)
def test_the_limit_of_an_output_is_read_by_the_name_that_its_route_has(
    route: NativeRoute, body: dict[str, object], most: int
) -> None:
    assert read_native(orjson.dumps(body), "fresh", route=route).max_output_tokens == most


def test_a_chat_without_a_limit_writes_as_long_as_it_likes() -> None:
    assert (
        read_native(b'{"messages": []}', "fresh", route="v1/chat/completions").max_output_tokens
        > 10**6
    )
