"""Texts with countable tokens, which simulated agents read and write, and their embedder."""

import asyncio
import re
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any, Self, TypeVar

import numpy as np

from shell_router.core.control_text import ControlText
from shell_router.core.engine import NO_OPTIONS
from shell_router.core.exact_json import Values
from shell_router.core.predictors import TokenStates
from shell_router.standins.simulated.processor import Processor

T = TypeVar("T", str, tuple[int, ...])

FIRST = 0x4E00
LAST = 0x51FF
"""Each of these characters is a token, whose id is its code point: few enough for a CPU's cache."""
_PIECE = re.compile(f"[{chr(FIRST)}-{chr(LAST)}]|[^{chr(FIRST)}-{chr(LAST)}]{{1,4}}", re.DOTALL)


class _Ids(dict[str, int]):
    """The id of each piece of text."""

    def __missing__(self, piece: str) -> int:
        return LAST + 1 + zlib.crc32(piece.encode())


_CHARACTERS = [chr(number) for number in range(FIRST, LAST + 1)]
_IDS = _Ids(zip(_CHARACTERS, range(FIRST, LAST + 1), strict=True))
_FILLER = "".join(Random(0).choices(_CHARACTERS, k=1 << 16))
_FILLER_IDS = tuple(map(_IDS.__getitem__, _FILLER))


CALL_MARK = "<tool_call>"
CALL = CALL_MARK + '{"name": "tool", "arguments": {}}</tool_call>'
"""A call of the one tool of simulated clients."""
TOOL: Values = {
    "type": "function",
    "function": {"name": "tool", "parameters": {"type": "object", "properties": {}}},
}


def filler(tokens: int, seed: str) -> str:
    """Return a text of `tokens` tokens; equal seeds give texts with equal beginnings."""
    return _cut(_FILLER, _place(seed), tokens)


def _place(seed: str) -> int:
    return zlib.crc32(seed.encode()) % len(_FILLER)


def _cut(source: T, begin: int, tokens: int) -> T:
    """Return `tokens` of an endless repetition of `source`, from `begin` on."""
    begin %= len(source)
    end = begin + max(0, tokens)
    return (source * (1 + end // len(source)))[begin:end]


@lru_cache(maxsize=64)
def _encode_cached(text: str) -> tuple[int, ...]:
    """Return the ids of `text`. Agents with the same prompt come one after the other."""
    return tuple(map(_IDS.__getitem__, _PIECE.findall(text)))


class SimulatedTokenizer:
    """A tokenizer with a token per character of filler, and one per four of other text.

    English has four characters to a token on average.
    """

    fingerprint = "simulated"
    control = ControlText()

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return list(_encode_cached(text))

    def encode_stable(self, text: str) -> list[int]:
        """See `Tokenizer.encode_stable`: a piece at the end that is no filler may still grow."""
        pieces = _PIECE.findall(text)
        if pieces and len(pieces[-1]) < 4 and not FIRST <= ord(pieces[-1][0]) <= LAST:
            pieces.pop()
        return list(map(_IDS.__getitem__, pieces))

    def render_chat(
        self,
        messages: Sequence[Values],
        tools: Sequence[Any] = (),
        options: Values = NO_OPTIONS,
    ) -> str:
        """Lay the messages out as ChatML; each call is `CALL`."""
        turns = (
            f"<|im_start|>{message['role']}\n{message['content']}"
            f"{CALL * len(message.get('tool_calls') or ())}<|im_end|>\n"
            for message in messages
        )
        return "".join(turns) + "<|im_start|>assistant\n"


@dataclass(frozen=True, slots=True)
class Written:
    """An output before it is written: a piece of text per token, their ids, their log-probability.

    Attributes:
        filled: Tokens of filler before the pieces, which are not copied: thousands of outputs wait
            to be written.
        place: The filler's offset.
        per_pass: Tokens that a pass gives in the mean; more than 1 if the request asks for drafts.
        width: Tokens that a pass computes.
    """

    pieces: tuple[str, ...]
    ids: tuple[int, ...]
    logprob: float
    filled: int = 0
    place: int = 0
    per_pass: float = 1
    width: int = 1

    @classmethod
    def of(cls, text: str, logprob: float) -> Self:
        """Return the output with this text."""
        pieces = _PIECE.findall(text)
        return cls(tuple(pieces), tuple(map(_IDS.__getitem__, pieces)), logprob)

    @classmethod
    def after_filler(cls, tokens: int, seed: str, end: str, logprob: float) -> Self:
        """Return `filler` and then `end`, `tokens` in all; never less than `end`."""
        last = cls.of(end, logprob)
        return replace(last, filled=max(0, tokens - len(last)), place=_place(seed))

    def __len__(self) -> int:
        return self.filled + len(self.ids)

    def part(self, start: int, end: int) -> tuple[tuple[int, ...], str]:
        """Return ids and text of the tokens from `start` to before `end`."""
        filled = min(end, self.filled) - start
        ids = _cut(_FILLER_IDS, self.place + start, filled)
        text = _cut(_FILLER, self.place + start, filled)
        if end > self.filled:
            rest = slice(max(0, start - self.filled), end - self.filled)
            ids = ids + self.ids[rest]
            text = text + "".join(self.pieces[rest])
        return ids, text


FEATURES = 1024
MAX_BATCH_SIZE = 16
"""Texts, as for the real embedder."""
_STATED = re.compile(r"\[(?P<question>[^\]]*)\] Answer: (?P<answer>.*)\.")


def write_closing(question: str, answer: str) -> str:
    """Return the end of an output that answers a question; the embedder reads it."""
    return f" [{question}] Answer: {answer}."


class SimulatedEmbedder:
    """An embedder whose texts have a similarity by their answers.

    Texts that wait are embedded together, in `request_s` + all tokens * `token_s`, on `processor`.
    Every output has one row of features -1 and 1, so the similarity of two is the square of their
    cosine. A question's features are drawn, a share of them is inverted for each answer, and
    another for each output: two outputs with one answer have the similarity `same`, with different
    answers `different`, give or take 0.03. It must hold that 0 < `different` <= `same` <= 1.
    """

    def __init__(
        self,
        same: float,
        different: float,
        request_s: float = 0.0,
        token_s: float = 0.0,
        processor: Processor | None = None,
    ) -> None:
        # two outputs agree in a feature's sign with mean product (1 - 2 o)^2, times (1 - 2 a)^2
        # across answers
        self._turned_by_output = (1 - same**0.25) / 2
        self._turned_by_answer = (1 - (different / same) ** 0.25) / 2
        self._request_s = request_s
        self._token_s = token_s
        self._processor = processor or Processor()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._embedding = False
        self._tokenizer = SimulatedTokenizer()

    async def embed(self, text: str) -> TokenStates:
        """Return states of shape [1, 1024]; see `Embedder.embed`."""
        ended = asyncio.get_running_loop().create_future()
        self._waiting.append((len(self._tokenizer.encode(text)), ended))
        if not self._embedding:
            self._embed_waiting()
        await ended
        stated = _STATED.search(text)
        question, answer = (stated["question"], stated["answer"]) if stated else ("", text)
        signs = _signs(question, 0.5) * _signs(f"{question}/{answer}", self._turned_by_answer)
        return (signs * _signs(text, self._turned_by_output)).astype(np.float32)[None, :]

    def _embed_waiting(self) -> None:
        batch: list[tuple[int, asyncio.Future[None]]] = []
        while self._waiting and len(batch) < MAX_BATCH_SIZE:
            tokens, ended = self._waiting.popleft()
            if not ended.cancelled():
                batch.append((tokens, ended))
        self._embedding = bool(batch)
        if batch:
            seconds = self._request_s + sum(tokens for tokens, _ in batch) * self._token_s
            self._processor.start(seconds, lambda: self._end_batch([ended for _, ended in batch]))

    def _end_batch(self, batch: Sequence[asyncio.Future[None]]) -> None:
        for ended in batch:
            if not ended.done():
                ended.set_result(None)
        self._embed_waiting()


def _signs(seed: str, turned: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    draws = np.random.default_rng(zlib.crc32(seed.encode())).random(FEATURES)
    return np.where(draws < turned, -1.0, 1.0)
