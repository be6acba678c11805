"""An in-process engine that answers by script, and paces by which a test decides when it goes on."""

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

from shell_router.core.engine import (
    Finish,
    FinishReason,
    Generation,
    Placement,
    Prefilled,
    Tokenizer,
    Tokens,
)
from shell_router.errors import EngineError
from shell_router.standins.prefix_cache import PrefixCache

PLACED = Placement("engine-0", "scripted", "only_engine")


@dataclass(frozen=True, slots=True)
class Script:
    """The script of one answer: text in pieces of `piece_words`, log-probabilities, and the end.

    Every token has one log-probability. `drafted_tokens` and `accepted_tokens` are reported at the
    end. With `error` the answer breaks off with it after `error_after` pieces.
    """

    text: str
    piece_words: int = 4
    logprob: float = -0.1
    reason: FinishReason = "stop"
    error: EngineError | None = None
    error_after: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    matched: str = ""


async def at_once(_rid: str, _piece: int) -> None:
    """The pace of an engine that never makes anyone wait; it only lets others run."""
    await asyncio.sleep(0)


class ScriptedEngine:
    """An engine that answers by `answer(request)`.

    It waits for `pace(rid, piece)` before each piece and each prefill (piece -1). It is honest
    about cached tokens: it keeps earlier prompts in a prefix cache, and as on a real engine the
    last token of a prompt is always computed. `running` and `aborted` tell what an abandoned
    request left behind.
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
        self._cache = PrefixCache(cached_tokens)
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
            cached = self._cached(request)
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
            drafts = {
                "drafted_tokens": script.drafted_tokens,
                "accepted_tokens": script.accepted_tokens,
            }
            finish = Finish(script.reason, len(request.input_ids), decoded, cached, **drafts)
            yield replace(finish, matched=script.matched)
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
            return Prefilled(len(request.input_ids), self._cached(request))
        finally:
            self._leave(request.rid, ended)

    def _cached(self, request: Generation) -> int:
        """How many of its prompt's tokens were cached; now all are."""
        ids = list(request.input_ids)
        known = self._cache.match(ids)
        self._cache.add(ids)
        return max(0, min(known, len(ids) - 1))

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


class Gates:
    """Requests whose id ends with a held name wait; all others run at once."""

    def __init__(self, *held: str) -> None:
        self._gates = {name: asyncio.Event() for name in held}
        self.waiting: list[str] = []
        self._arrived = asyncio.Event()

    def open(self, name: str) -> None:
        """Let requests of `name` go on, now and later."""
        self._gates[name].set()

    async def pace(self, rid: str, piece: int) -> None:
        """Wait at the gate of this request, if it has one. Prefill increments (piece -1) pass."""
        await asyncio.sleep(0)
        gate = self._gates.get(rid.rpartition(".")[2])
        if gate and piece >= 0:
            self.waiting.append(rid)
            self._arrived.set()
            await gate.wait()

    async def until_waiting(self, count: int, limit_s: float = 10.0) -> None:
        """Return once `count` waits have begun."""
        async with asyncio.timeout(limit_s):
            while len(self.waiting) < count:
                self._arrived.clear()
                await self._arrived.wait()


class Hold:
    """A pace at which every request waits from piece `first` on, until released."""

    def __init__(self, first: int = -1) -> None:
        self._first = first
        self._arrived = asyncio.Event()
        self._released = asyncio.Event()

    def release(self) -> None:
        """Let all go on, now and later."""
        self._released.set()

    async def pace(self, _rid: str, piece: int) -> None:
        """Wait until released, if the piece is one to wait at."""
        if piece >= self._first:
            self._arrived.set()
            await self._released.wait()

    async def until_waiting(self, limit_s: float = 10.0) -> None:
        """Return once a request waits."""
        async with asyncio.timeout(limit_s):
            await self._arrived.wait()
