"""The embedding model of a simulation: outputs with the same answer are about as alike as it is told."""

import asyncio
import re
import zlib
from collections import deque
from collections.abc import Sequence

import numpy as np

from shell_router.core.embedding import TokenStates
from shell_router.engines.simulated.processor import Processor
from shell_router.engines.simulated.text import SimulatedTokenizer
from shell_router.errors import ConfigError

FEATURES = 1024
AT_ONCE = 16
"""Texts of one batch, as many as the real embedder takes."""
_STATED = re.compile(r"\[(?P<question>[^\]]*)\] Answer: (?P<answer>.*)\.")


def closing(question: str, answer: str) -> str:
    """How an output ends that answers a question; the embedder reads it."""
    return f" [{question}] Answer: {answer}."


class SimulatedEmbedder:
    """See `Embedder`: texts that wait are embedded together, in `request_s` + all tokens * `token_s`, on `processor`.

    Every output has one row of features -1 and 1, so that the similarity of two is the square of their cosine. A
    question's features are drawn, a share of them turned over for each answer, and another for each output: two outputs
    with one answer are `same` alike, with different answers `different`, give or take 0.03.
    """

    def __init__(
        self,
        same: float,
        different: float,
        request_s: float = 0.0,
        token_s: float = 0.0,
        processor: Processor | None = None,
    ) -> None:
        if not 0 < different <= same <= 1:
            raise ConfigError(f"similarities must satisfy 0 < different <= same <= 1, not {different:g}, {same:g}")
        # two outputs agree in a feature's sign with mean product (1 - 2 o)^2, times (1 - 2 a)^2 across answers
        self._turned_by_output = (1 - same**0.25) / 2
        self._turned_by_answer = (1 - (different / same) ** 0.25) / 2
        self._request_s = request_s
        self._token_s = token_s
        self._processor = processor or Processor()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._embedding = False
        self._tokenizer = SimulatedTokenizer()

    async def embed(self, text: str) -> TokenStates:
        """See `Embedder.embed`; shape [1, 1024]."""
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
        while self._waiting and len(batch) < AT_ONCE:
            tokens, ended = self._waiting.popleft()
            if not ended.cancelled():
                batch.append((tokens, ended))
        self._embedding = bool(batch)
        if batch:
            seconds = self._request_s + sum(tokens for tokens, _ in batch) * self._token_s
            self._processor.start(seconds, lambda: self._embedded([ended for _, ended in batch]))

    def _embedded(self, batch: Sequence[asyncio.Future[None]]) -> None:
        for ended in batch:
            if not ended.done():
                ended.set_result(None)
        self._embed_waiting()


def _signs(seed: str, turned: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    draws = np.random.default_rng(zlib.crc32(seed.encode())).random(FEATURES)
    return np.where(draws < turned, -1.0, 1.0)
