"""An engine that says what it is told to: for tests, for load without models, and as the shortest example of one."""

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from shell_router.core.generation import Finish, FinishReason, Generation, Prefilled, Tokens
from shell_router.core.model import Tokenizer
from shell_router.core.placement import Placed
from shell_router.errors import EngineError

PLACED = Placed("engine-0", "scripted", "only_engine")


@dataclass(frozen=True, slots=True)
class Script:
    """One answer: its text in pieces of `piece_words`, one log-probability for every token, and how it ends.

    With `error` the answer breaks off with it after `error_after` pieces.
    """

    text: str
    piece_words: int = 4
    logprob: float = -0.1
    reason: FinishReason = "stop"
    error: EngineError | None = None
    error_after: int = 0


async def at_once(_rid: str, _piece: int) -> None:
    """The pace of an engine that never makes anyone wait; it only lets others run."""
    await asyncio.sleep(0)


class ScriptedEngine:
    """Answers by `answer(request)`, waiting for `pace(rid, piece)` before each piece and each prefill (piece -1).

    It is honest about cached tokens: the prompts it has seen are kept in a trie of ids, and as on a real engine the
    last token of a prompt is always computed. `running` and `aborted` tell what an abandoned request left behind.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        answer: Callable[[Generation], Script],
        *,
        pace: Callable[[str, int], Awaitable[None]] = at_once,
        kept_requests: int = 10_000,
        cached_tokens: int = 1_000_000,
    ) -> None:
        self._tokenizer = tokenizer
        self.answer = answer
        self.pace = pace
        self._seen = _Trie(cached_tokens)
        self.running: set[str] = set()
        self.aborted: deque[str] = deque(maxlen=kept_requests)
        self.generated: deque[Generation] = deque(maxlen=kept_requests)
        self.prefilled: deque[Generation] = deque(maxlen=kept_requests)

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """Yield the script's pieces, then its end."""
        self.generated.append(request)
        request.on_placed(PLACED)
        self.running.add(request.rid)
        ended = False
        try:
            cached = self._seen.add(request.input_ids)
            script, decoded = self.answer(request), 0
            for piece, tokens in enumerate(self._pieces(script)):
                await self.pace(request.rid, piece)
                if script.error and piece >= script.error_after:
                    break
                decoded += len(tokens.ids)
                yield tokens
            ended = True
            if script.error:
                raise script.error
            yield Finish(script.reason, len(request.input_ids), decoded, cached)
        finally:
            self._leave(request.rid, ended)

    async def prefill(self, request: Generation) -> Prefilled:
        """Remember the prompt as prefilled."""
        self.prefilled.append(request)
        self.running.add(request.rid)
        ended = False
        try:
            await self.pace(request.rid, -1)
            ended = True
            return Prefilled(len(request.input_ids), self._seen.add(request.input_ids))
        finally:
            self._leave(request.rid, ended)

    def _leave(self, rid: str, ended: bool) -> None:
        self.running.discard(rid)
        if not ended:
            self.aborted.append(rid)

    def _pieces(self, script: Script) -> Iterator[Tokens]:
        words = re.findall(r"\s*\S+|\s+", script.text)
        for start in range(0, len(words), script.piece_words):
            text = "".join(words[start : start + script.piece_words])
            ids = tuple(self._tokenizer.encode(text))
            yield Tokens(ids, text, (script.logprob,) * len(ids))


class _Trie:
    """Prompts' ids as paths; emptied when it holds more than `max_tokens`."""

    def __init__(self, max_tokens: int) -> None:
        self._root: dict[int, dict] = {}  # type: ignore[type-arg] # a recursive type would only name itself
        self._tokens = 0
        self._max_tokens = max_tokens

    def add(self, ids: Sequence[int]) -> int:
        """Insert `ids`; how many of them were there, at most all but the last."""
        if self._tokens > self._max_tokens:
            self._root, self._tokens = {}, 0
        node, known = self._root, 0
        for depth, token in enumerate(ids):
            if token in node and known == depth:
                known = depth + 1
            node = node.setdefault(token, {})
        self._tokens += len(ids) - known
        return max(0, min(known, len(ids) - 1))
