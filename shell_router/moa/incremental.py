"""Fills an agent's slots from its precursors' logs, and prefills what is there meanwhile.

The paper's loop is fetch, append, prefill-only, slot by slot (Faster-MoA, 4.3). Here an update goes
out only when it pays (`routing.increments`), one at a time, and fetching goes on meanwhile: the end
of a precursor never waits for an update.

No update goes out before the first precursor's first tokens. The paper sends the prefix at once,
but if layers share an engine it would then delay the very prompts that are waited for.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from agent_cache import End, LogKey, LogRead, LogTimeout
from shell_router.core.engine import UNSTREAMED_INTERVAL, Generation
from shell_router.core.events import Degraded, PrefillIncrement
from shell_router.core.sampling import require_possible
from shell_router.core.spans import CURRENT, enter_span
from shell_router.errors import AgentFailed, EngineError, PrecursorTimeout, PromptTooLong
from shell_router.moa.agent import AgentTask, RunContext, Source
from shell_router.moa.prompt import (
    CHARACTERS_PER_TOKEN,
    CUT_MARK,
    GrowingPrompt,
    Slot,
    encode_text,
    run_off_loop,
)
from shell_router.routing.increments import Remainder, tokens_until_due

log = logging.getLogger(__name__)

T = TypeVar("T")


def count_common_prefix(before: list[int], now: list[int]) -> int:
    """Return the length of the common prefix."""
    # comparing whole slices first keeps the usual cases fast
    if now[: len(before)] == before:
        return len(before)
    if before[: len(now)] == now:
        return len(now)
    pairs = enumerate(zip(before, now, strict=False))
    return next((i for i, (a, b) in pairs if a != b), len(now))


@dataclass(frozen=True, slots=True)
class CompletePrompt:
    """The ids of a complete prompt; the first `sent` of them were prefilled while it grew."""

    ids: list[int]
    sent: int = 0


ExpectRemainder = Callable[[Collection[str]], Remainder]
"""Returns what a prompt still waits for after it has read the outputs of these agents."""


async def complete_prompt(
    task: AgentTask, context: RunContext, expect_remainder: ExpectRemainder
) -> CompletePrompt:
    """Return the task's prompt once its slots are filled; updates never change it.

    Raises:
        PrecursorTimeout: Nothing came from a precursor in time.
        AgentFailed: A precursor that is needed gave nothing.
        PromptTooLong: The parts together have more characters than the context holds.
    """
    if task.sources:
        return await _SlotFiller(task, context, expect_remainder).fill()
    text = "".join(part for part in task.parts if isinstance(part, str))
    return CompletePrompt(await encode_text(task.model.tokenizer, text))


def make_silence_error(agent: str, precursor: str, wait_s: float) -> PrecursorTimeout:
    """Return the error for an agent whose precursor has written nothing for `wait_s`."""
    return PrecursorTimeout(
        f"Agent {agent!r} waited {wait_s:g} s for {precursor!r}, and nothing came.",
        remedy="Send the precursor first, or allow a longer wait.",
    )


class _SlotFiller:
    """Fills the slots of one task, and prefills the growing prompt, one update at a time."""

    def __init__(
        self, task: AgentTask, context: RunContext, expect_remainder: ExpectRemainder
    ) -> None:
        self._task = task
        self._cache = context.cache
        self._load = context.estimates.get_load(task.model)
        self._expect_remainder = expect_remainder
        self._emit = context.emit
        self._clock = context.clock
        self._prompt = GrowingPrompt(task.model.tokenizer)
        self._slot: str | None = None
        self._slot_tokens = 0
        self._slot_room = sys.maxsize
        self._characters = 0
        self._read_agents: set[str] = set()
        self._filled = 0
        self._unsent = 0
        self._sends = task.prefill.incremental and not task.model.takes_messages
        self._update: asyncio.Task[None] | None = None
        self._updates = 0
        self._last_sent: list[int] = []

    async def fill(self) -> CompletePrompt:
        """Return the complete prompt.

        An update that is still under way is aborted, not waited for, as the real request holds all
        of it. The engine ends it in the background.
        """
        try:
            await self._read_parts()
            ids = await self._encode(self._prompt.encode_all)
        finally:
            if self._update is not None:
                self._update.cancel()
                await asyncio.wait([self._update])
                self._raise_defect(self._update)
        return CompletePrompt(ids, count_common_prefix(self._last_sent, ids))

    async def _encode(self, work: Callable[[], T]) -> T:
        return await run_off_loop(self._prompt.undecided, work)

    # --- reading

    async def _read_parts(self) -> None:
        slots = 0
        for part in self._task.parts:
            if isinstance(part, str):
                self._prompt.add_text(part)
                self._characters += len(part)
                self._unsent += len(part) // CHARACTERS_PER_TOKEN
            else:
                slots += 1
                await self._read_slot(part)
        if slots and not self._filled:
            raise AgentFailed(
                f"Agent {self._task.agent!r} has no precursor left: each failed, wrote nothing "
                "or was cut off.",
                remedy="Ask again, or let fewer agents of the cluster be dropped.",
            )

    async def _read_slot(self, slot: Slot) -> None:
        before = self._prompt.mark()
        characters_before = self._characters
        self._slot_tokens = 0
        self._slot_room = slot.most_tokens or sys.maxsize
        self._prompt.add_text(slot.before)
        end, detail = await self._follow(self._task.sources[slot.agent])
        self._read_agents.add(slot.agent)
        if end is End.FINISHED:
            self._prompt.add_text(slot.after if self._slot_room >= 0 else CUT_MARK + slot.after)
            self._filled += 1
        elif self._task.all_needed:
            raise AgentFailed(
                f"Agent {self._task.agent!r} needs the output of {slot.agent!r}, which "
                f"{end.value}: {detail}",
                remedy="Send the precursor again.",
            )
        else:
            self._prompt.rewind(before)
            self._characters = characters_before

    async def _follow(self, source: Source) -> tuple[End, str]:
        """Append all that one precursor writes; return its end mark and the mark's detail."""
        position = 0
        wait_s = self._task.begin_s
        while True:
            try:
                read = source.kept or await self._next(source.key, position, wait_s)
            except LogTimeout as error:
                if error.begun and wait_s < self._task.silence_s:
                    wait_s = self._task.silence_s
                    continue
                raise make_silence_error(self._task.agent, source.key.agent, wait_s) from error
            if read.position > position:
                self._slot = source.key.agent
                takes_ids = source.vocabulary != "" and read.vocabulary == source.vocabulary
                await self._append(read, takes_ids=takes_ids)
            if read.end is not None:
                return read.end, read.detail
            position = read.position
            wait_s = self._task.silence_s

    async def _next(self, key: LogKey, position: int, wait_s: float) -> LogRead:
        """Return what comes after `position`; text that is there already needs no new update."""
        if not self._sends or self._slot is None or not self._unsent:
            if self._sends or not self._slot_tokens:
                at_least = 1
            else:
                at_least = sys.maxsize
            return await self._cache.read(key, position, at_least=at_least, wait_s=wait_s)
        if not self._slot_tokens:
            with suppress(LogTimeout):
                return await self._cache.read(key, position, wait_s=0)
        tokens = UNSTREAMED_INTERVAL
        if self._update is None or self._update.done():
            tokens = self._tokens_until_due()
            if tokens == 0:
                self._unsent = 0
                self._begin_update(await self._encode(self._prompt.encode_stable_part))
        return await self._cache.read(key, position, at_least=max(1, tokens), wait_s=wait_s)

    async def _append(self, read: LogRead, *, takes_ids: bool) -> None:
        added = len(read.ids) or max(1, len(read.text) // CHARACTERS_PER_TOKEN)
        room = max(0, self._slot_room)
        self._slot_room -= len(read.ids) if takes_ids else added
        text = read.text[: room * CHARACTERS_PER_TOKEN]
        self._characters += len(text)
        require_possible(self._characters, self._task.model.context_length)
        if takes_ids:  # a piece may have text alone, whose ids came with earlier pieces
            await self._encode(partial(self._prompt.add_ids, read.ids[:room]))
        else:
            self._prompt.add_output(text)
        added = min(added, room)
        self._slot_tokens += added
        self._unsent += added

    def _tokens_until_due(self) -> int:
        chunk = self._task.prefill.chunk_tokens
        if chunk != "adaptive":
            return max(0, chunk - self._unsent)
        remainder = self._expect_remainder(self._read_agents)
        return tokens_until_due(self._load, self._clock(), self._unsent, remainder)

    # --- prefilling

    def _begin_update(self, ids: list[int]) -> None:
        """Have `ids` prefilled, if they hold anything new that the model could take.

        A complete prompt that is too long is refused by name.
        """
        resident = count_common_prefix(self._last_sent, ids)
        if self._sends and resident < len(ids) < self._task.model.context_length:
            if self._update is not None:
                self._raise_defect(self._update)
            self._update = asyncio.create_task(self._prefill(ids, resident, self._slot))

    async def _prefill(self, ids: list[int], resident: int, slot: str | None) -> None:
        """Send one update; if the engine refuses it, warn and send no more."""
        task = self._task
        started_s = self._clock()
        if CURRENT.get() is not None:
            enter_span(task.agent, started_s)
        request = Generation(
            f"{task.rid}.p{self._updates}",
            ids,
            affinity=task.affinity or task.rid,
            hints=task.hints,
        )
        self._updates += 1
        work = self._load.begin(started_s, len(ids) - resident, update=True)
        computed = None
        try:
            done = await task.model.engine.prefill(request)
            computed = done.prompt_tokens - done.cached_tokens
        except (EngineError, PromptTooLong) as error:
            self._sends = False
            log.warning("agent %s goes on without incremental prefill: %s", task.agent, error)
            self._emit(Degraded(self._clock(), task.agent, "increment", str(error)))
            return
        finally:
            self._load.end(work, self._clock(), computed)
        now_s = self._clock()
        prompt = done.prompt_tokens
        cached = done.cached_tokens
        self._emit(PrefillIncrement(now_s, task.agent, started_s, slot, prompt, cached, resident))
        self._last_sent = ids

    @staticmethod
    def _raise_defect(update: asyncio.Task[None]) -> None:
        if not update.cancelled():
            update.result()
