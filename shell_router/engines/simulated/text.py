"""Texts whose tokens can be counted: what simulated agents read and write."""

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Self

FIRST, LAST = 0x4E00, 0x9FFF
"""Each of these characters is one token, whose id is its code point."""
_PIECE = re.compile(f"[{chr(FIRST)}-{chr(LAST)}]|[^{chr(FIRST)}-{chr(LAST)}]{{1,4}}", re.DOTALL)
_CHARACTERS = {(character := chr(number)): (character, number) for number in range(FIRST, LAST + 1)}
"""The same objects for all that is read and written: with thousands of programs it is hundreds of millions."""
_FILLER = "".join(map(chr, Random(0).choices(range(FIRST, LAST + 1), k=1 << 16)))


def filler(tokens: int, seed: str) -> str:
    """A text of so many tokens; equal seeds give texts with equal beginnings."""
    start = zlib.crc32(seed.encode()) % len(_FILLER)
    return (_FILLER[start:] + _FILLER * (1 + tokens // len(_FILLER)))[: max(0, tokens)]


class SimulatedTokenizer:
    """Filler has a token per character, all other text one per four, as English has on average."""

    fingerprint = "simulated"

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return [_token(piece)[1] for piece in _PIECE.findall(text)]

    def encode_stable(self, text: str) -> list[int]:
        """See `Tokenizer.encode_stable`: a piece at the end that is no filler may still grow."""
        pieces = _PIECE.findall(text)
        if pieces and len(pieces[-1]) < 4 and not FIRST <= ord(pieces[-1][0]) <= LAST:
            pieces.pop()
        return [_token(piece)[1] for piece in pieces]

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The layout of ChatML."""
        turns = (f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
        return "".join(turns) + "<|im_start|>assistant\n"


def _token(piece: str) -> tuple[str, int]:
    """The piece and its id."""
    return _CHARACTERS.get(piece) or (piece, LAST + 1 + zlib.crc32(piece.encode()))


@dataclass(frozen=True, slots=True)
class Written:
    """An output before it is written: a piece of text per token, their ids, and the log-probability of each."""

    pieces: Sequence[str]
    ids: Sequence[int]
    logprob: float

    @classmethod
    def of(cls, text: str, logprob: float) -> Self:
        """The output that says `text`, which must not be empty."""
        pieces, ids = zip(*map(_token, _PIECE.findall(text)), strict=True)
        return cls(pieces, ids, logprob)
