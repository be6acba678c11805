"""Texts in which no control token is left, for vocabularies of any size."""

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.core.control_text import BREAK, ControlText

TOKENS = ["<eos>", "<eos", "<unused1>", "<unused12>", "[x", "a(b*", "ab", "abc", "b|"]
TEXTS = st.lists(st.sampled_from([*TOKENS, "<", "<e", "unused", "x", "[e", "|", "a"])).map("".join)


def quote_naively(text: str) -> Iterator[str]:
    for at, character in enumerate(text):
        yield character
        if any(text.startswith(token, at) for token in TOKENS):
            yield BREAK


@given(TEXTS)
def test_each_token_that_begins_anywhere_has_a_break(text: str) -> None:
    assert ControlText(TOKENS).quote(text) == "".join(quote_naively(text))


@pytest.mark.parametrize("text", ["<unused", "<unused6399"])
def test_the_work_for_a_text_does_not_grow_with_the_tokens_of_a_vocabulary(text: str) -> None:
    control = ControlText([f"<unused{number}>" for number in range(6400)])
    begun_s = time.process_time()
    control.quote(text * 200_000)
    assert time.process_time() - begun_s < 1  # 3 s and more if all are tried in turn
