"""Fills an agent's slots from its precursors' logs and prefills what is there meanwhile (Faster-MoA, 4.3).

The paper's loop is fetch, append, prefill-only, slot by slot. Here an update goes out only when it pays
(`routing.increments`), one at a time, and fetching goes on meanwhile: the end of a precursor never waits for an update.

No update goes out before the first precursor's first tokens. The paper sends the prefix at once, but where layers share
an engine it would then delay the very prompts that are waited for.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from agent_cache import AgentPromptCache, End, LogKey, LogRead, LogTimeout
from shell_router.core.engine import UNSTREAMED_INTERVAL, Generation
from shell_router.core.events import Degraded, Event, PrefillIncrement
from shell_router.core.spans import enter_span
from shell_router.errors import AgentFailed, EngineError, PrecursorTimeout, PromptTooLong
from shell_router.moa.agent import AgentTask, Source
from shell_router.moa.prompt import CHARACTERS_PER_TOKEN, GrowingPrompt, Slot, encoded, off_loop
from shell_router.routing.increments import PrefillLoad, Remainder, tokens_until_due

log = logging.getLogger(__name__)

T = TypeVar("T")


class PrefillUpdates:
    """Sends a prompt's ids as they grow, one update at a time. `sent` is what the last one that was answered held."""

    def __init__(
        self, task: AgentTask, load: PrefillLoad, emit: Callable[[Event], None], clock: Callable[[], float]
    ) -> None:
        self._task = task
        self._load = load
        self._emit = emit
        self._clock = clock
        self._count = 0
        self.refused = False
        self._under_way: asyncio.Task[None] | None = None
        self.sent: list[int] = []

    @property
    def is_under_way(self) -> bool:
        """Whether an update is under way."""
        return self._under_way is not None and not self._under_way.done()

    def send(self, ids: list[int], slot: str | None) -> None:
        """Begin to have `ids` prefilled, if they hold anything new.

        Nothing is sent that the model could not take (the complete prompt will be refused by name), nor after the
        engine refused an update: that costs only the overlap, and a warning and an event say so.
        """
        resident = common_prefix(self.sent, ids)
        if resident < len(ids) < self._task.model.context_length and not self.refused:
            self._raise_defect()
            self._under_way = asyncio.create_task(self._send(ids, slot, resident))

    async def _send(self, ids: list[int], slot: str | None, resident: int) -> None:
        task, started_s = self._task, self._clock()
        enter_span(task.agent, started_s)
        request = Generation(f"{task.rid}.p{self._count}", ids, affinity=task.rid, hints=task.hints)
        self._count += 1
        work, computed = self._load.begin(started_s, len(ids) - resident, update=True), None
        try:
            done = await task.model.engine.prefill(request)
            computed = done.prompt_tokens - done.cached_tokens
        except (EngineError, PromptTooLong) as error:
            self.refused = True
            log.warning("agent %s goes on without incremental prefill: %s", task.agent, error)
            self._emit(Degraded(self._clock(), task.agent, "increment", str(error)))
            return
        finally:
            self._load.end(work, self._clock(), computed)
        self._emit(
            PrefillIncrement(
                self._clock(), task.agent, started_s, slot, done.prompt_tokens, done.cached_tokens, resident
            )
        )
        self.sent = ids

    async def aclose(self) -> None:
        """Abort what is under way. The engine's part of that happens in the background, so this takes no time."""
        if self.is_under_way and self._under_way is not None:
            self._under_way.cancel()
            await asyncio.wait([self._under_way])
        self._raise_defect()

    def _raise_defect(self) -> None:
        if self._under_way is not None and not self._under_way.cancelled():
            self._under_way.result()


def common_prefix(before: list[int], now: list[int]) -> int:
    """Length of the common prefix; comparing whole slices first keeps the usual cases fast."""
    if now[: len(before)] == before:
        return len(before)
    if before[: len(now)] == now:
        return len(now)
    pairs = enumerate(zip(before, now, strict=False))
    return next((i for i, (a, b) in pairs if a != b), len(now))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A complete prompt's ids, of which the first `sent` were prefilled while it grew."""

    ids: list[int]
    sent: int = 0


async def complete_prompt(
    task: AgentTask,
    cache: AgentPromptCache,
    load: PrefillLoad,
    remainder: Callable[[Collection[str]], Remainder],
    emit: Callable[[Event], None],
    clock: Callable[[], float],
) -> Prompt:
    """The task's prompt, once all of its slots are filled.

    `remainder` says what is expected of the prompt after it has read the outputs of the agents given. Raises
    PrecursorTimeout, and AgentFailed when a precursor that is needed gave nothing.
    """
    if task.sources:
        return await SlotFiller(task, cache, load, remainder, emit, clock).fill()
    return Prompt(await encoded(task.model.tokenizer, "".join(part for part in task.parts if isinstance(part, str))))


class SlotFiller:
    """Fills the slots of one task."""

    def __init__(
        self,
        task: AgentTask,
        cache: AgentPromptCache,
        load: PrefillLoad,
        remainder: Callable[[Collection[str]], Remainder],
        emit: Callable[[Event], None],
        clock: Callable[[], float],
    ) -> None:
        self._task = task
        self._cache = cache
        self._load = load
        self._remainder = remainder
        self._clock = clock
        self._updates = PrefillUpdates(task, load, emit, clock)
        self._prompt = GrowingPrompt(task.model.tokenizer)
        self._slot: str | None = None
        self._slot_tokens = 0
        self._read: set[str] = set()
        self._filled = 0
        self._unsent = 0

    async def fill(self) -> Prompt:
        """The complete prompt, the same with incremental prefill and without.

        It does not wait for an update: one that is still under way is aborted, as the real request holds all of it.
        """
        try:
            await self._read_parts()
            ids = await self._encoded(self._prompt.final_ids)
        finally:
            await self._updates.aclose()
        return Prompt(ids, common_prefix(self._updates.sent, ids))

    async def _encoded(self, work: Callable[[], T]) -> T:
        return await off_loop(self._prompt.undecided, work)

    # --- reading

    async def _read_parts(self) -> None:
        slots = 0
        for part in self._task.parts:
            if isinstance(part, str):
                self._prompt.add_text(part)
                self._unsent += len(part) // CHARACTERS_PER_TOKEN
            else:
                slots += 1
                await self._read_slot(part)
        if slots and not self._filled:
            raise AgentFailed(
                f"Agent {self._task.agent!r} has no precursor left: each failed or was cut off.",
                remedy="Ask again, or let fewer agents of the cluster be dropped.",
            )

    async def _read_slot(self, slot: Slot) -> None:
        before = self._prompt.mark()
        self._slot_tokens = 0
        self._prompt.add_text(slot.before)
        end, detail = await self._follow(self._task.sources[slot.agent])
        self._read.add(slot.agent)
        if end is End.FINISHED:
            self._prompt.add_text(slot.after)
            self._filled += 1
        elif self._task.all_needed:
            raise AgentFailed(
                f"Agent {self._task.agent!r} needs the output of {slot.agent!r}, which {end.value}: {detail}",
                remedy="Send the precursor again in a new program.",
            )
        else:
            self._prompt.back_to(before)

    async def _follow(self, source: Source) -> tuple[End, str]:
        """Append all that one precursor writes; its end mark and the mark's detail."""
        position, wait_s = 0, self._task.begin_s
        while True:
            try:
                read = await self._next(source.key, position, wait_s)
            except LogTimeout as error:
                if error.begun and wait_s < self._task.silence_s:
                    wait_s = self._task.silence_s
                    continue
                raise PrecursorTimeout(
                    f"Agent {self._task.agent!r} waited {wait_s:g} s for {source.key.agent!r}, and nothing came.",
                    remedy="Send the precursor first, or allow a longer wait.",
                ) from error
            if read.position > position:
                self._slot = source.key.agent
                await self._append(read, shares_ids=source.shares_ids())
            if read.end is not None:
                return read.end, read.detail
            position, wait_s = read.position, self._task.silence_s

    async def _next(self, key: LogKey, position: int, wait_s: float) -> LogRead:
        """What comes after `position`. What is there already is taken before an update is judged."""
        may_send = self._task.prefill.incremental and not self._updates.refused
        if not may_send or self._slot is None or not self._unsent:
            return await self._cache.read(
                key, position, at_least=1 if may_send or not self._slot_tokens else sys.maxsize, wait_s=wait_s
            )
        if not self._slot_tokens:
            with suppress(LogTimeout):
                return await self._cache.read(key, position, wait_s=0)
        wanted = UNSTREAMED_INTERVAL
        if not self._updates.is_under_way:
            wanted = self._tokens_until_due()
            if wanted == 0:
                self._unsent = 0
                self._updates.send(await self._encoded(self._prompt.stable_ids), self._slot)
        return await self._cache.read(key, position, at_least=max(1, wanted), wait_s=wait_s)

    async def _append(self, read: LogRead, *, shares_ids: bool) -> None:
        if shares_ids:  # a piece may have text alone: what its ids say came with earlier pieces
            await self._encoded(partial(self._prompt.add_ids, read.ids))
        else:
            self._prompt.add_text(read.text)
        added = len(read.ids) or max(1, len(read.text) // CHARACTERS_PER_TOKEN)
        self._slot_tokens += added
        self._unsent += added

    def _tokens_until_due(self) -> int:
        chunk = self._task.prefill.chunk_tokens
        if chunk != "adaptive":
            return max(0, chunk - self._unsent)
        return tokens_until_due(self._load, self._clock(), self._unsent, self._remainder(self._read))
