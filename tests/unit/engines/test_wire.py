"""Server-sent events and `/generate` outputs, however the network cut them."""

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.core.engine import Finish, Tokens, error_message
from shell_router.engines.wire import MAX_EVENT_BYTES, EventSplitter, OutputReader, refusal_error
from shell_router.errors import AdapterMissing, EngineAborted, EngineRejected, PromptTooLong

META_PATHS = [
    f"meta_info.{name}"
    for name in (
        "completion_tokens",
        "prompt_tokens",
        "cached_tokens",
        "output_token_logprobs",
        "finish_reason.type",
    )
]
PIECES = ["Hé", "llo", "", "→ 世", "界", "!"]


def output(
    ids: list[int], text: str, completion: int, reason: dict[str, object] | None = None
) -> bytes:
    meta = {
        "finish_reason": reason,
        "prompt_tokens": 7,
        "completion_tokens": completion,
        "cached_tokens": 3,
    }
    meta["output_token_logprobs"] = [[-0.5 * token, token, None] for token in ids]
    return orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})


def events(
    *, cumulative: bool, reason: dict[str, object], pieces: list[str] = PIECES
) -> list[bytes]:
    made = []
    for end in range(1, len(pieces) + 1):
        start = 0 if cumulative else end - 1
        ids = list(range(10 + start, 10 + end))
        made.append(
            output(ids, "".join(pieces[start:end]), end, reason if end == len(pieces) else None)
        )
    return made


def read(payloads: list[bytes]) -> tuple[list[Tokens], Finish | None]:
    reader = OutputReader("decode engine", logprobs=True)
    tokens = [found for payload in payloads if (found := reader.take(payload)) is not None]
    return tokens, reader.finish


@given(st.lists(st.integers(1, 400), max_size=12), st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n"]))
def test_a_stream_reads_the_same_wherever_it_is_cut(sizes: list[int], end: bytes) -> None:
    payloads = [*events(cumulative=False, reason={"type": "length", "length": 6}), b"[DONE]"]
    wire = b"".join(b"data: " + payload + end for payload in payloads)
    splitter, found, start = EventSplitter(), [], 0
    for size in [*sizes, len(wire)]:
        found += splitter.feed(wire[start : start + size])
        start += size
    assert found == payloads


def test_comments_and_other_fields_are_no_events() -> None:
    assert EventSplitter().feed(b": ping\n\nevent: x\nid: 1\ndata:1\n\ndata: 2\n\n") == [b"1", b"2"]


odd = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 2**63)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "abort", "x"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "message"]), inner, max_size=2)
    ),
    max_leaves=4,
)
changes = st.lists(
    st.tuples(
        st.sampled_from(
            ["text", "output_ids", "meta_info", "error", "meta_info.finish_reason", *META_PATHS]
        ),
        odd,
    ),
    max_size=3,
)


def changed(payload: bytes, edits: list[tuple[str, Any]]) -> bytes:
    event = orjson.loads(payload)
    for path, value in edits:
        at, *names = event, *path.split(".")
        for name in names[:-1]:
            at = at.get(name) if isinstance(at, dict) else None
        if isinstance(at, dict):
            at[names[-1]] = value
    return orjson.dumps(event)


@given(st.lists(st.tuples(st.integers(0, 5), changes), max_size=6), st.binary(max_size=12))
def test_an_engine_that_writes_nonsense_is_refused_and_nothing_of_it_is_taken(
    edits: list[tuple[int, list[tuple[str, Any]]]], noise: bytes
) -> None:
    payloads = events(cumulative=False, reason={"type": "stop", "matched": 15})
    for place, changing in edits:
        payloads[place] = changed(payloads[place], changing)
    reader = OutputReader("decode engine", logprobs=True)
    try:
        for payload in [*payloads, noise]:
            if (found := reader.take(payload)) is not None:
                assert {*map(type, found.ids)} <= {int} and isinstance(found.text, str)
                assert {*map(type, found.logprobs)} <= {float}
    except (EngineRejected, EngineAborted, PromptTooLong) as error:
        assert str(error)
    if reader.finish is not None:
        assert isinstance(reader.finish.reason, str)
        counts = (
            reader.finish.prompt_tokens,
            reader.finish.completion_tokens,
            reader.finish.cached_tokens,
        )
        assert {*map(type, counts)} == {int}


@pytest.mark.parametrize("cumulative", [False, True])
@given(sizes=st.lists(st.integers(1, 400), max_size=12))
def test_the_events_of_one_chunk_are_read_as_one(cumulative: bool, sizes: list[int]) -> None:
    payloads = [*events(cumulative=cumulative, reason={"type": "length", "length": 6}), b"[DONE]"]
    wire = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
    reader, found, start = OutputReader("decode engine", logprobs=True), list[Tokens](), 0
    for size in [*sizes, len(wire)]:
        if (tokens := reader.feed(wire[start : start + size])) is not None:
            found.append(tokens)
        start += size
    assert [token for tokens in found for token in tokens.ids] == [10, 11, 12, 13, 14, 15]
    assert "".join(tokens.text for tokens in found) == "".join(PIECES)
    assert [one for tokens in found for one in tokens.logprobs] == [
        -0.5 * token for token in range(10, 16)
    ]
    assert len(found) <= len(sizes) + 1
    assert (reader.finish, reader.error) == (Finish("length", 7, 6, 3), None)


def test_tokens_before_an_error_in_the_same_chunk_are_read() -> None:
    reader = OutputReader("decode engine", logprobs=False)
    sent = [
        output([10], "H", 1),
        output([11], "i", 2),
        b'{"error": {"message": "out of memory", "code": 500}}',
    ]
    tokens = reader.feed(b"".join(b"data: " + payload + b"\n\n" for payload in sent))
    assert tokens == Tokens((10, 11), "Hi", ())
    assert isinstance(reader.error, EngineRejected)
    assert "out of memory" in str(reader.error)


def test_what_was_drafted_and_accepted_is_read() -> None:
    reader = OutputReader("decode engine", logprobs=False)
    event = orjson.loads(output([10], "H", 1, {"type": "length", "length": 1}))
    event["meta_info"] |= {
        "spec_verify_ct": 4,
        "spec_num_proposed_drafts": 12,
        "spec_num_correct_drafts": 9,
    }
    reader.take(orjson.dumps(event))
    assert reader.finish is not None
    assert (reader.finish.drafted_tokens, reader.finish.accepted_tokens) == (12, 9)


@pytest.mark.parametrize("cumulative", [False, True])
def test_incremental_and_cumulative_streams_read_alike(cumulative: bool) -> None:
    tokens, finish = read(events(cumulative=cumulative, reason={"type": "length", "length": 6}))
    assert [token for found in tokens for token in found.ids] == [10, 11, 12, 13, 14, 15]
    assert [found.text for found in tokens] == PIECES
    assert [found.logprobs for found in tokens] == [(-0.5 * token,) for token in range(10, 16)]
    assert finish == Finish("length", 7, 6, 3)


@pytest.mark.parametrize("cumulative", [False, True])
def test_the_stop_token_is_not_among_the_ids(cumulative: bool) -> None:
    pieces = [*PIECES[:-1], ""]
    tokens, finish = read(
        events(cumulative=cumulative, reason={"type": "stop", "matched": 15}, pieces=pieces)
    )
    ids = [token for found in tokens for token in found.ids]
    assert ids == [10, 11, 12, 13, 14]
    assert sum(len(found.logprobs) for found in tokens) == len(ids)
    assert finish is not None
    assert finish.completion_tokens == 6


def test_a_stop_string_strips_no_ids() -> None:
    tokens, finish = read(events(cumulative=False, reason={"type": "stop", "matched": "!"}))
    assert len([token for found in tokens for token in found.ids]) == 6
    assert finish is not None and finish.matched == "!"


def test_several_tokens_in_one_event_stay_one() -> None:
    payload = output([1, 2, 3], "abc", 3)
    assert read([payload])[0] == [Tokens((1, 2, 3), "abc", (-0.5, -1.0, -1.5))]


def test_a_finish_without_new_tokens_yields_none() -> None:
    tokens, finish = read(
        [output([1], "a", 1), output([], "", 1, {"type": "stop", "matched": None})]
    )
    assert [found.ids for found in tokens] == [(1,)]
    assert finish is not None
    assert finish.reason == "stop"


def test_a_gap_in_the_ids_is_refused() -> None:
    with pytest.raises(EngineRejected, match="native format"):
        read([output([1], "a", 1), output([3], "c", 3)])


@pytest.mark.parametrize(
    "payload", [b"{broken", b"[]", b"3", b'{"text": "x"}', b'{"meta_info": {}}', b"null"]
)
def test_what_is_no_output_is_refused(payload: bytes) -> None:
    with pytest.raises(EngineRejected) as refused:
        read([payload])
    assert refused.value.status == 502


def test_an_error_event_keeps_the_engines_words_and_code() -> None:
    with pytest.raises(EngineRejected, match="KV pool is full") as refused:
        read([b'{"error": {"message": "KV pool is full", "code": 503}}'])
    assert refused.value.status == 503


def test_an_abort_before_the_first_token_is_no_failure_of_the_engine() -> None:
    seen = (
        "Decode transfer failed for request 'r' with exception KVTransferError: Aborted by "
        "AbortReq."
    )
    with pytest.raises(EngineAborted, match=r"Aborted by AbortReq\. Ask again"):
        read([output([], "", 0, {"type": "abort", "message": seen, "status_code": 500})])
    assert isinstance(refusal_error("prefill engine", 500, seen), EngineAborted)


def test_an_abort_that_was_not_asked_for_is_an_error() -> None:
    with pytest.raises(EngineRejected, match="transfer failed"):
        read(
            [output([], "", 0, {"type": "abort", "message": "transfer failed", "status_code": 500})]
        )


@pytest.mark.parametrize(
    "message",
    [
        "The input (5 tokens) is longer than the model's context length (4 tokens).",
        "Requested token count exceeds the model's maximum context length of 4 tokens.",
    ],
)
def test_a_400_about_the_context_length_is_prompt_too_long(message: str) -> None:
    assert isinstance(refusal_error("decode engine", 400, message), PromptTooLong)
    assert isinstance(refusal_error("decode engine", 500, message), EngineRejected)


def test_an_engine_says_how_many_tokens_are_too_many() -> None:
    message = (
        "Requested token count exceeds the model's maximum context length of 4096 tokens. You "
        "requested a total of 4104 tokens: 100 tokens from the input messages and 4004 tokens for "
        "the completion."
    )
    error = refusal_error("decode engine", 400, message)
    assert isinstance(error, PromptTooLong) and error.excess == 8


@pytest.mark.parametrize(
    "message",
    [
        "Got LoRA adapter that has never been loaded: algebra\nAll loaded adapters: dict_keys([]).",
        "The following requested LoRA adapters are not loaded: algebra\nLoaded adapters: [].",
        "LoRA adapter 'algebra' was requested, but LoRA is not enabled. Please launch the server",
    ],
)
def test_an_adapter_that_an_engine_does_not_know_is_the_operators_to_mend(message: str) -> None:
    error = refusal_error("decode engine", 400, message)
    assert isinstance(error, AdapterMissing)
    assert "algebra" in str(error) and "--lora-paths" in str(error)


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "no room"}}',
        b'{"object": "error", "message": "no room", "code": 400}',
        b'{"detail": "no room"}',
        b"no room",
    ],
)
def test_error_bodies_of_every_shape_give_their_message(body: bytes) -> None:
    assert error_message(body) == "no room"


@pytest.mark.parametrize("cut", [1, MAX_EVENT_BYTES // 2])
def test_an_event_has_at_most_its_limit_and_one_byte_more_is_the_engines_error(cut: int) -> None:
    for over in (0, 1):
        line, splitter = b"x" * (MAX_EVENT_BYTES + over), EventSplitter("decode engine")
        splitter.feed(line[:cut])
        if over:
            with pytest.raises(EngineRejected, match=f"decode engine .* {MAX_EVENT_BYTES} bytes"):
                splitter.feed(line[cut:])
        else:
            assert splitter.feed(line[cut:]) == splitter.feed(b"\n") == []
