"""Input log probabilities in decode's answer. The answers are SGLang 0.5.23's, shortened."""

from typing import Any

import orjson
import pytest

from shell_router.engines.native_body import wants_input_logprobs
from shell_router.engines.relay import InputLogprobs
from shell_router.errors import EngineRejected

TOKENS = b'"input_token_logprobs":[[null,23,"5"],[-9.744879722595215,24,"6"],[-11.520793914794922,25,"7"]]'
TOP = (
    b'"input_top_logprobs":[null,[[-1.1002237796783447,728," '
    b'changes"]],[[-0.2642475962638855,652," agent"]]]'
)
IDS = (
    b'"input_token_ids_logprobs":[null,[[-9.744879722595215,5,"#"]],[[-11.520793914794922,5,"#"]]]'
)
OF_PREFILL = (
    b'{"text":" str","output_ids":[383],"meta_info":{"id":"all","finish_reason":{"type":"length","length":0},'
    b'"prompt_tokens":5,%b,"output_token_logprobs":[[-1.272092342376709,383," '
    b'str"]],"output_token_logprobs_length":1,'
    b'%b,"output_top_logprobs":[[[-1.272092342376709,383," str"]]],%b,"output_token_ids_logprobs":'
    b'[[[-10.007936477661133,5,"#"]]],"completion_tokens":1,"cached_tokens":2}}'
    % (TOKENS, TOP, IDS)
)
OF_DECODE = (
    b'{"text":" str '
    b'orange","output_ids":[383,640],"meta_info":{"id":"all","finish_reason":{"type":"length",'
    b'"length":2},"prompt_tokens":5,%b,"output_token_logprobs":[[-1.272092342376709,383," '
    b'str"],[-0.9241472482681274,'
    b'640," orange"]],"output_token_logprobs_length":2,%b,"output_top_logprobs":[[[-1.272092342376709,383," str"]],'
    b'[[-0.9241472482681274,640," '
    b'orange"]]],%b,"output_token_ids_logprobs":[null,[[-9.945125579833984,5,"#"]]],'
    b'"completion_tokens":2,"cached_tokens":2,"dp_rank":null,"e2e_latency":0.08344957799999975}}'
)
NOTHING = (
    b'"input_token_logprobs":[]',
    b'"input_top_logprobs":[]',
    b'"input_token_ids_logprobs":[]',
)
DONE = b"data: [DONE]\n\n"

FLAT = b"""{"meta_info":{"id":"flat","input_token_logprobs":[[null,21,null],[-9.215781211853027,22,null]],
"input_top_logprobs_val_flat":[-1.2529304027557373],"input_top_logprobs_idx_flat":[411],
"input_top_logprobs_shape":[1,1],"input_top_logprobs_null_prefix":1}}"""
FLAT_OF_DECODE = b"""{"meta_info":{"id":"flat","input_token_logprobs":[],"input_top_logprobs_val_flat":[],
"input_top_logprobs_idx_flat":[],"input_top_logprobs_shape":[0,1],"input_top_logprobs_null_prefix":0}}"""


def output(rid: str, tokens: list[Any] | None, **more: Any) -> dict[str, Any]:
    """One output as both servers write it: without the field where its request asked for no log
    probabilities.
    """
    asked = {} if tokens is None else {"input_token_logprobs": tokens}
    return {"text": " str", "meta_info": {"id": rid, **asked, "cached_tokens": 0}, **more}


def event(found: object) -> bytes:
    return b"data: " + orjson.dumps(found) + b"\n\n"


def read(answer: object) -> InputLogprobs:
    return InputLogprobs("prefill", answer if isinstance(answer, bytes) else orjson.dumps(answer))


FIRST, SECOND = [[None, 21, None], [-9.2, 22, None]], [[None, 31, None], [-9.3, 32, None]]


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"return_logprob": True, "logprob_start_len": 0}, True),
        ({"return_logprob": True, "logprob_start_len": 7}, True),
        ({"return_logprob": [False, True], "logprob_start_len": [-1, 3]}, True),
        ({"return_logprob": [False, True], "logprob_start_len": 0}, True),
        ({"return_logprob": True, "logprob_start_len": [-1, 0]}, True),
        ({}, False),
        ({"return_logprob": True}, False),
        ({"return_logprob": True, "logprob_start_len": None}, False),
        ({"return_logprob": True, "logprob_start_len": -1}, False),
        ({"return_logprob": True, "logprob_start_len": [-1, -1]}, False),
        ({"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5]}, False),
        ({"return_logprob": False, "logprob_start_len": 0}, False),
        ({"logprob_start_len": 0}, False),
        ({"return_logprob": [False, False], "logprob_start_len": [0, 0]}, False),
    ],
)
def test_input_log_probabilities_are_wanted_from_a_start_on(
    body: dict[str, Any], wanted: bool
) -> None:
    assert wants_input_logprobs(body) is wanted


def test_a_whole_answer_gets_the_three_kinds_and_keeps_every_other_byte() -> None:
    assert read(OF_PREFILL).in_whole("decode", OF_DECODE % NOTHING) == OF_DECODE % (
        TOKENS,
        TOP,
        IDS,
    )


def test_a_streamed_prefill_answer_is_read_alike() -> None:
    found = read(b"data: " + OF_PREFILL + b"\n\n" + DONE)
    assert found.in_whole("decode", OF_DECODE % NOTHING) == OF_DECODE % (TOKENS, TOP, IDS)


def test_flat_top_log_probabilities_replace_decodes_empty_ones() -> None:
    assert orjson.loads(read(FLAT).in_whole("decode", FLAT_OF_DECODE)) == orjson.loads(FLAT)


def test_a_batch_is_matched_by_place_and_leaves_out_who_did_not_ask() -> None:
    found = read([output("r_0", FIRST), output("r_1", None), output("r_2", SECOND)])
    decoded = [output("r_0", [], new=[1]), output("r_1", None), output("r_2", [])]
    merged = orjson.loads(found.in_whole("decode", orjson.dumps(decoded)))
    assert merged == [output("r_0", FIRST, new=[1]), output("r_1", None), output("r_2", SECOND)]


def test_parallel_samples_are_matched_although_each_server_names_them_itself() -> None:
    found = read([output("339e81", FIRST), output("4bb282", FIRST)])
    merged = orjson.loads(
        found.in_whole("decode", orjson.dumps([output("71db67", []), output("68f4f4", [])]))
    )
    assert merged == [output("71db67", FIRST), output("68f4f4", FIRST)]


def test_every_event_of_a_stream_repeats_them() -> None:
    found = read(output("r", FIRST))
    sent = b"".join(event(output("r", [], at=at)) for at in range(3)) + DONE
    assert (
        found.in_chunk("decode", sent)
        == b"".join(event(output("r", FIRST, at=at)) for at in range(3)) + DONE
    )


def test_the_events_of_a_batch_are_distinguished_by_index() -> None:
    prefilled = event(output("r_1", SECOND, index=1)) + event(output("r_0", FIRST, index=0)) + DONE
    found = read(prefilled)
    sent = [output("r_0", [], index=0), output("r_1", [], index=1), output("r_0", [], index=0)]
    expected = [
        output("r_0", FIRST, index=0),
        output("r_1", SECOND, index=1),
        output("r_0", FIRST, index=0),
    ]
    assert found.in_chunk("decode", b"".join(map(event, sent))) == b"".join(map(event, expected))


@pytest.mark.parametrize("size", [1, 7, 50])
def test_events_are_whole_however_the_network_cut_the_stream(size: int) -> None:
    found = read(output("r", FIRST))
    sent = event(output("r", [])) + event(output("r", [])) + DONE
    pieces = [
        found.in_chunk("decode", sent[start : start + size]) for start in range(0, len(sent), size)
    ]
    assert b"".join(pieces) == event(output("r", FIRST)) * 2 + DONE
    assert all(piece.endswith(b"\n\n") for piece in pieces if piece)


def test_an_error_event_passes_as_it_came() -> None:
    seen = b'{"error": {"message": "gone",  "code": 503}}'
    assert read(output("r", FIRST)).in_event("decode", seen) == seen


def test_an_event_that_ends_as_aborted_holds_them_too() -> None:
    aborted = output("r", [])
    aborted["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
    merged = orjson.loads(read(output("r", FIRST)).in_event("decode", orjson.dumps(aborted)))
    assert merged["meta_info"] == {**aborted["meta_info"], "input_token_logprobs": FIRST}


@pytest.mark.parametrize(
    "answer", [b"", b"{", b"[1]", b'"text"', b"{}", b"data: {}\n\n", b'{"meta_info":[]}']
)
def test_a_prefill_answer_that_is_no_output_is_named(answer: bytes) -> None:
    with pytest.raises(EngineRejected, match="the prefill server sent what is not"):
        InputLogprobs("the prefill server", answer)


@pytest.mark.parametrize(
    "answer", [b"{", b"7", b"[1]", b'{"text":""}', b'{"meta_info":null}', b"[]", b"[{},{}]"]
)
def test_a_decode_answer_that_is_no_output_is_named(answer: bytes) -> None:
    with pytest.raises(EngineRejected, match="the decode server sent what is not"):
        read(output("r", FIRST)).in_whole("the decode server", answer)


@pytest.mark.parametrize(
    "payload",
    [
        b"{",
        b"7",
        b'{"text":""}',
        b'{"meta_info":[]}',
        b'{"meta_info":{},"index":1}',
        b'{"index":[]}',
    ],
)
def test_an_event_that_is_no_output_of_the_body_is_named(payload: bytes) -> None:
    with pytest.raises(EngineRejected, match="the decode server sent what is not"):
        read(output("r", FIRST)).in_event("the decode server", payload)
