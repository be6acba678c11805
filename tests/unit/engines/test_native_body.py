"""A client's body keeps its bytes; what would confuse the pair is refused."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.engines.native_body import NativeRules, read_native
from shell_router.errors import InvalidRequest

PD = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def test_unknown_fields_and_number_formats_keep_their_bytes() -> None:
    body = b'{ "input_ids":[1, 2],\t"temperature": 1.50e0, "new_field": {"a" : 1.0} }\n\n'
    sent = read_native(body, "fresh").with_fields(PD)
    assert sent.startswith(b'{ "input_ids":[1, 2],\t"temperature": 1.50e0, "new_field": {"a" : 1.0}')
    assert orjson.loads(sent) == {**orjson.loads(body), "rid": "fresh", **PD}


@given(
    st.dictionaries(st.text(max_size=6).filter(lambda key: key != "rid"), JSON, max_size=5),
    st.sampled_from(["", " \r\n"]),
)
def test_every_object_gains_exactly_the_new_fields(found: dict[str, object], tail: str) -> None:
    sent = read_native(orjson.dumps(found) + tail.encode(), "fresh").with_fields(PD)
    assert orjson.loads(sent) == {**found, "rid": "fresh", **PD}


def test_without_fields_only_the_rid_is_added() -> None:
    assert read_native(b"{}", "fresh").with_fields({}) == b'{"rid":"fresh"}'
    own = b'{"rid":"55555555555555555555555555555555"}'
    assert read_native(own + b" ", "fresh").with_fields({}) == own


@pytest.mark.parametrize(
    ("body", "rids"),
    [
        (b'{"rid": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "text": "x"}', ("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",)),
        (b'{"text": "x"}', ("fresh",)),
        (b'{"text": ["x", "y"]}', ("fresh_0", "fresh_1")),
        (b'{"input_ids": [[1], [2]], "rid": "%s"}' % (b"b" * 32), (f"{'b' * 32}_0", f"{'b' * 32}_1")),
        (b'{"input_ids": [[1], [2]], "rid": ["%s", "%s"]}' % (b"c" * 32, b"d" * 32), ("c" * 32, "d" * 32)),
    ],
)
def test_every_request_of_a_body_can_be_aborted_by_its_rid(body: bytes, rids: tuple[str, ...]) -> None:
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
        b'{"rid": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "rid": "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"}',
        b'{"sampling_params": [1]}',
    ],
)
def test_bodies_that_would_confuse_the_pair_are_refused_with_a_remedy(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_native(body, "fresh")
    assert refused.value.remedy


@pytest.mark.parametrize("ids", ["[100]", "[-1]", "[1, 2, 100]", "[[1], [100]]", "[true]", "[1.0]", '["1"]'])
def test_ids_outside_the_vocabulary_never_reach_an_engine(ids: str) -> None:
    with pytest.raises(InvalidRequest, match="below 100"):
        read_native(b'{"input_ids": %s}' % ids.encode(), "fresh", NativeRules(100))


@pytest.mark.parametrize("body", ['{"input_ids": [0, 99]}', '{"input_ids": [[0], [99]]}', '{"text": "x"}'])
def test_ids_of_the_vocabulary_pass(body: str) -> None:
    read_native(body.encode(), "fresh", NativeRules(100))


def test_a_batch_may_have_sampling_parameters_for_each_of_its_requests() -> None:
    native = read_native(b'{"text": ["x", "y"], "sampling_params": [{"top_k": 1}, {"max_new_tokens": 9}]}', "fresh")
    found = orjson.loads(native.replaced({"sampling_params": {"max_new_tokens": 1}}))
    assert found["sampling_params"] == [{"top_k": 1, "max_new_tokens": 1}, {"max_new_tokens": 1}]


def test_the_word_rid_elsewhere_in_the_body_is_no_repetition() -> None:
    body = b'{"rid": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "text": "say \\"rid\\"", "meta": {"rid": 1}}'
    assert read_native(body, "fresh").rids == ("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",)


def test_replacing_sampling_parameters_keeps_the_clients_others() -> None:
    native = read_native(b'{"sampling_params": {"temperature": 0, "max_new_tokens": 9}, "x": 1}', "fresh")
    found = orjson.loads(native.replaced({"sampling_params": {"max_new_tokens": 1}, "stream": False}))
    assert found["sampling_params"] == {"temperature": 0, "max_new_tokens": 1}
    assert (found["x"], found["stream"]) == (1, False)


@pytest.mark.parametrize("several", [b'{"n": 2}', b'[{"n": 1}, {"n": 3}]', b'{"n": 0}'])
def test_several_samples_of_one_prompt_are_refused(several: bytes) -> None:
    with pytest.raises(InvalidRequest, match="Send the request n times"):
        read_native(b'{"sampling_params": %s}' % several, "fresh")
    read_native(b'{"sampling_params": {"n": 1}}', "fresh")


@pytest.mark.parametrize("start", ["-2", "[0, -7]"])
def test_a_start_of_log_probabilities_that_ends_a_prefill_server_is_refused(start: str) -> None:
    with pytest.raises(InvalidRequest, match="logprob_start_len"):
        read_native(b'{"logprob_start_len": %s}' % start.encode(), "fresh")
    read_native(b'{"logprob_start_len": [-1, 0, null]}', "fresh")
