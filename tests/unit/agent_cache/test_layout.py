import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_cache import Chunk, End, LogKey, LogRead
from agent_cache.redis.layout import Entry, Layout, decode, encode, read_entries

LAYOUT = Layout("prefix", "owner", 1.0)
chunks = st.builds(
    Chunk,
    text=st.text(min_size=1),  # readers refuse halves of surrogate pairs
    ids=st.lists(st.integers(0, 2**32 - 1)).map(tuple),
    vocabulary=st.just("words"),
)


def entry(position: int, *batch: Chunk) -> Entry:
    return f"{position}-0".encode(), {b"chunks": encode(batch)}


@given(st.lists(chunks))
def test_chunks_survive_the_way_through_redis(batch: list[Chunk]) -> None:
    assert decode(encode(batch), "words") == batch


@given(*[st.builds(LogKey, st.text(), st.text(), st.text())] * 2)
def test_two_logs_never_share_a_name(one: LogKey, other: LogKey) -> None:
    assert (LAYOUT.log(one) == LAYOUT.log(other)) == (one == other)


def test_a_programs_keys_share_a_hash_tag() -> None:
    names = LAYOUT.log(LogKey("t{}", "p:", "a}")), LAYOUT.agents("t{}", "p:")
    assert names == ("prefix:{t%7B%7D:p%3A}:log:a%7D", "prefix:{t%7B%7D:p%3A}:agents")


@given(st.lists(chunks, min_size=1), st.data())
def test_a_read_may_begin_at_any_boundary_within_an_entry(
    batch: list[Chunk], draw: st.DataObject
) -> None:
    skipped = draw.draw(st.integers(0, len(batch)))
    position, total = sum(map(len, batch[:skipped])), sum(map(len, batch))
    read, _ = read_entries([entry(total, *batch)], position)
    assert read.text == "".join(chunk.text for chunk in batch[skipped:])
    assert read.position == total


def test_a_read_may_not_begin_inside_a_chunk() -> None:
    with pytest.raises(ValueError, match="position 1 "):
        read_entries([entry(2, Chunk("ab"))], 1)


def test_an_end_mark_ends_the_read() -> None:
    end = b"2-2", {b"end": b"failed", b"detail": "ä".encode()}
    assert read_entries([entry(2, Chunk("ab")), end], 0) == (
        LogRead("ab", (), 2, End.FAILED, "ä"),
        0,
    )


NONSENSE: list[dict[bytes, bytes]] = [
    {},
    {b"evil": b"x"},
    {b"end": b"perhaps"},
    {b"end": b"\xff"},
    *(
        {b"chunks": field}
        for field in (
            b"",
            b"\xff",
            b'{"ab":1}',
            b"1",
            b"[[1]]",
            b'[["a", [1]], [2, [3]]]',
            b'[["a", "bc"]]',
        )
    ),
    *(
        {b"chunks": field}
        for field in (
            b'[["%s", []]]' % (b"a" * 2**24),
            b'[["\\ud800", [1]]]',
            b'[["\xed\xa0\x80", [1]]]',
            b'[["a", [-1]]]',
            b'[["a", [true]]]',
            b'[["a", null]]',
            b"[" * 100_000,
        )
    ),
]


@pytest.mark.parametrize("fields", NONSENSE)
def test_an_entry_that_makes_no_sense_ends_the_log_by_name(fields: dict[bytes, bytes]) -> None:
    entries = [entry(1, Chunk("a")), (b"1-7", fields), entry(2, Chunk("b"))]
    read, malformed = read_entries(entries, 0)
    assert (read.text, read.position, read.end, malformed) == ("a", 1, End.FAILED, 1)
    assert read.detail.startswith("What Redis has of the log is damaged. Entry 1-7 is neither")


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
).map(lambda value: json.dumps(value).encode())
spoiled = st.dictionaries(
    st.sampled_from([b"chunks", b"end", b"detail", b"odd"]),
    st.binary(max_size=8) | anything | st.sampled_from([b"finished", b"failed", b'[["b", [1]]]']),
)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), spoiled), max_size=4))
def test_whatever_redis_holds_a_read_answers(
    entries: list[tuple[int, int, dict[bytes, bytes]]],
) -> None:
    ordered = [
        (b"%d-%d" % (position, number), fields)
        for position, number, fields in sorted(entries, key=repr)
    ]
    read, skipped = read_entries(ordered, 0)
    assert 0 <= read.position <= 9 and skipped <= len(ordered)
    assert read_entries([entry(1, Chunk("a"))], 0)[0].text == "a"


@pytest.mark.parametrize(
    "last", [entry(3, Chunk("c")), (b"3-2", {b"end": b"finished", b"detail": b""})]
)
def test_a_log_that_lacks_an_entry_fails(last: Entry) -> None:
    read, malformed = read_entries([entry(1, Chunk("a")), last], 0)
    assert (read.text, read.position, read.end, malformed) == ("a", 1, End.FAILED, 0)
    assert "damaged" in read.detail


def test_the_mark_of_a_deletion_has_no_position() -> None:
    mark = b"1700000000000-0", {b"end": b"aborted", b"detail": b"\xff"}
    assert read_entries([mark], 5)[0].end is End.ABORTED
