"""Detokenizing step by step, and where an output ends."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shell_router.standins.embedded.output import DecodedOutput, Detokenizer, Piece
from shell_router.standins.embedded.sampling import Draw
from shell_router.standins.embedded.wire import SamplingParams

STOP_ID = 256


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and a special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<stop>"])
    return tokenizer


TOKENIZER = byte_tokenizer()


def accept_all(ids: Sequence[int], *, max_new_tokens: int = 1000, **params: Any) -> list[Piece]:
    """The pieces of `ids`, up to the first that ends the output."""
    draw = Draw(SamplingParams(**params), (), frozenset({STOP_ID}))
    output = DecodedOutput(draw, TOKENIZER, max_new_tokens=max_new_tokens)
    pieces: list[Piece] = []
    for token in ids:
        pieces.append(output.accept(token, None))
        if pieces[-1].finish_reason is not None:
            break
    return pieces


def said(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@given(st.text(max_size=30))
def test_fed_byte_by_byte_the_text_is_whole_and_no_character_comes_in_parts(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, (), skip_special_tokens=True)
    parts = [detokenizer.feed(token) for token in TOKENIZER.encode(text).ids]
    assert "".join(parts) + detokenizer.finish() == text
    assert all(part in text for part in parts)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_end_and_give_all_readable_characters(ids: list[int]) -> None:
    detokenizer = Detokenizer(TOKENIZER, (), skip_special_tokens=True)
    text = "".join(detokenizer.feed(token) for token in ids) + detokenizer.finish()
    readable = [character for character in TOKENIZER.decode(ids) if character.isascii()]
    assert [character for character in text if character.isascii()] == readable


def test_an_incomplete_character_at_the_end_is_a_replacement() -> None:
    ids = TOKENIZER.encode("aé").ids[:-1]
    assert said(accept_all(ids, max_new_tokens=2)) == "a\ufffd"


def test_the_length_limit_ends_the_output() -> None:
    pieces = accept_all(TOKENIZER.encode("abcdef").ids, max_new_tokens=3)
    assert said(pieces) == "abc"
    assert pieces[-1].finish_reason == {"type": "length", "length": 3}


def test_no_token_is_given_where_none_was_asked_for() -> None:
    (piece,) = accept_all(TOKENIZER.encode("a").ids, max_new_tokens=0)
    assert piece == Piece(finish_reason={"type": "length", "length": 0})


def test_a_stop_token_is_given_as_id_and_not_as_text() -> None:
    pieces = accept_all([*TOKENIZER.encode("ab").ids, STOP_ID], skip_special_tokens=False)
    assert said(pieces) == "ab"
    assert (pieces[-1].token_id, pieces[-1].finish_reason) == (
        STOP_ID,
        {"type": "stop", "matched": STOP_ID},
    )


def test_a_stop_token_is_text_too_when_stops_are_not_trimmed() -> None:
    pieces = accept_all(
        [*TOKENIZER.encode("ab").ids, STOP_ID], skip_special_tokens=False, no_stop_trim=True
    )
    assert said(pieces) == "ab<stop>"


@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop_string_and_never_shows_a_part_of_it(
    text: str, stops: list[str]
) -> None:
    pieces = accept_all(
        TOKENIZER.encode(text).ids, stop=tuple(stops), max_new_tokens=max(len(text), 1)
    )
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not ends:
        assert said(pieces) == text
        return
    shortest = text[: ends[0]]
    assert (
        said(pieces) == shortest[: min(shortest.find(stop) for stop in stops if stop in shortest)]
    )
    reason = pieces[-1].finish_reason
    assert reason is not None
    assert (reason["type"], len(pieces)) == ("stop", ends[0])


@pytest.mark.parametrize(("no_stop_trim", "expected"), [(False, "hel"), (True, "hello")])
def test_a_stop_string_is_kept_only_when_asked_for(no_stop_trim: bool, expected: str) -> None:
    assert (
        said(accept_all(TOKENIZER.encode("hello you").ids, stop=("lo",), no_stop_trim=no_stop_trim))
        == expected
    )
