"""Text that models and tools wrote, which must not become control tokens in a prompt."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from os.path import commonprefix

BREAK = "\ufdd0"
"""A tokenizer reads what stands before and behind it apart. No text has this noncharacter."""


class ControlText:
    """The texts of a tokenizer's control tokens: its added tokens but blank ones.

    Attributes:
        plain_ids: The ids in place of each control token that a model wrote: none if its text does
            not show the token, else those of the quoted text.
    """

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        rests: dict[str, list[str]] = {}
        for token in tokens:
            if len(token) > 1 and token.strip():
                rests.setdefault(token[0], []).append(token[1:])
        begins = [f"{re.escape(first)}(?={_write_pattern(rests[first])})" for first in rests]
        self._begin = re.compile("|".join(begins)) if begins else None
        self.plain_ids: Mapping[int, Sequence[int]] = {}

    def quote(self, text: str) -> str:
        """Return `text` with a BREAK in each control token that it spells."""
        return text if self._begin is None else self._begin.sub(rf"\g<0>{BREAK}", text)

    def replace_ids(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the ids of an output without control tokens."""
        plain = self.plain_ids
        if plain.keys().isdisjoint(ids):
            return ids
        return [kept for token in ids for kept in plain.get(token, (token,))]


def _write_pattern(texts: Iterable[str]) -> str:
    """Return a pattern for the beginning of any of the texts that reads no character twice.

    A vocabulary may have thousands of them, which would be tried in turn.
    """
    ordered = sorted(texts)
    shared = commonprefix(ordered)  # noqa: RUF071 - texts, no paths
    if shared in ordered:  # the others begin with it
        return re.escape(shared)
    groups = groupby(ordered, key=lambda text: text[: len(shared) + 1])
    branches = [_write_pattern(text[len(shared) :] for text in group) for _, group in groups]
    return f"{re.escape(shared)}(?:{'|'.join(branches)})"
