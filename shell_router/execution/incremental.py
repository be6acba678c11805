"""Fills an agent's slots from its precursors' logs and prefills what is there meanwhile (Faster-MoA, 4.3).

The paper's loop is fetch, append, prefill-only, slot by slot. Here two coroutines share the prompt: the reader appends
whatever the precursors write; the sender, one update at a time, sends what has become stable. Only the sender touches
the engine, so a slow update delays no reading, and the next one then carries all that came meanwhile.

The first update, which is mostly the fixed prefix, goes out with the first precursor's first tokens. The paper sends it
at once, but where layers share an engine it would then delay the very prompts that are waited for.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_cache import AgentPromptCache, End, LogKey, LogRead, LogTimeout
from shell_router.core.events import Event
from shell_router.core.hints import NO_HINTS, Hints
from shell_router.core.model import ServedModel, Tokenizer
from shell_router.errors import AgentFailed, PrecursorTimeout
from shell_router.execution.pace import Pace
from shell_router.execution.prompt import Draft, GrowingPrompt, Part, Slot
from shell_router.execution.updates import PrefillUpdates, common_prefix
from shell_router.scheduling import tokens_per_increment
from shell_router.topology import Prefill

LONG_TEXT = 4096  # characters; tokenizing more takes milliseconds, which the event loop must not lose


@dataclass(frozen=True, slots=True)
class Source:
    """Where a slot's output comes from. `shares_ids`: the writer's ids are this model's too, and all of its output."""

    key: LogKey
    shares_ids: Callable[[], bool]


def ids_are_text(writer: ServedModel, sampling: Mapping[str, Any], reader: ServedModel) -> bool:
    """Whether `reader` may take a writer's ids for its text.

    They must share a tokenizer; and where a stop string ended the output, it is in the ids but not in the text.
    """
    return writer.tokenizer.fingerprint == reader.tokenizer.fingerprint and not sampling.get("stop")


@dataclass(frozen=True, slots=True)
class Filling:
    """One agent's prompt to be filled.

    A slot whose precursor was aborted or failed is left out with the text around it, or, with `all_needed`, fails the
    agent. `begin_s` limits the wait for a precursor's first sign, `silence_s` any later one. `hints` go with every
    request.
    """

    agent: str
    rid: str
    model: ServedModel
    parts: Sequence[Part]
    sources: Mapping[str, Source]
    prefill: Prefill
    all_needed: bool
    begin_s: float
    silence_s: float
    hints: Hints = NO_HINTS


class SlotFiller:
    """Runs one `Filling` to its end."""

    def __init__(
        self,
        filling: Filling,
        cache: AgentPromptCache,
        pace: Pace,
        emit: Callable[[Event], None],
        *,
        clock: Callable[[], float],
    ) -> None:
        self._filling = filling
        self._cache = cache
        self._pace = pace
        self._clock = clock
        self._updates = PrefillUpdates(
            filling.agent, filling.rid, filling.model, filling.hints, pace, emit, clock=clock
        )
        self._prompt = GrowingPrompt(filling.model.tokenizer)
        self._news = asyncio.Event()
        self._complete = False
        self._slot: str | None = None
        self._filled = 0
        # what the sender decides by: tokens not yet sent, and how fast they come
        self._unsent = 0
        self._send_all = False
        self._slot_tokens = 0
        self._slot_started_s = 0.0

    async def fill(self) -> list[int]:
        """The complete prompt's ids, the same with incremental prefill and without.

        Raises PrecursorTimeout, and AgentFailed when a precursor that is needed gave nothing.
        """
        if not (self._filling.prefill.incremental and self._filling.sources):
            await self._read_parts()
            return await self._encoded(Draft.final_ids)
        await self._read_and_send()
        ids = await self._encoded(Draft.final_ids)
        left = len(ids) - common_prefix(self._updates.sent, ids)
        if left > self._filling.prefill.increments.tail_share * len(ids):
            await self._updates.send(ids, self._slot)
        return ids

    async def _read_and_send(self) -> None:
        sender = asyncio.create_task(self._send_increments())
        try:
            await self._read_parts()
            self._complete = True
            self._news.set()
            await sender
        finally:
            sender.cancel()
            await asyncio.wait([sender])

    async def _encoded(self, ids_of: Callable[[Draft, Tokenizer], list[int]]) -> list[int]:
        draft, tokenizer = self._prompt.draft(), self._filling.model.tokenizer
        if len(draft.text) < LONG_TEXT:
            return ids_of(draft, tokenizer)
        return await asyncio.to_thread(ids_of, draft, tokenizer)

    # --- reading

    async def _read_parts(self) -> None:
        slots = 0
        for part in self._filling.parts:
            if isinstance(part, str):
                self._prompt.add_text(part)
            else:
                slots += 1
                await self._read_slot(part)
        if slots and not self._filled:
            raise AgentFailed(
                f"Agent {self._filling.agent!r} has no precursor left: each failed or was cut off.",
                remedy="Ask again, or let fewer agents of the cluster be dropped.",
            )

    async def _read_slot(self, slot: Slot) -> None:
        before = self._prompt.draft()
        self._slot_tokens = 0
        self._prompt.add_text(slot.before)
        end, detail = await self._follow(self._filling.sources[slot.agent])
        if end is End.FINISHED:
            self._prompt.add_text(slot.after)
            self._filled += 1
        elif self._filling.all_needed:
            raise AgentFailed(
                f"Agent {self._filling.agent!r} needs the output of {slot.agent!r}, which {end.value}: {detail}",
                remedy="Send the precursor again in a new program.",
            )
        else:
            self._prompt.back_to(before)
        # nothing may come for long in the next slot: send what this one left
        self._send_all = True
        self._news.set()

    async def _follow(self, source: Source) -> tuple[End, str]:
        """Append all that one precursor writes; its end mark and the mark's detail."""
        position, wait_s = 0, self._filling.begin_s
        while True:
            try:
                read = await self._cache.read(source.key, position, wait_s=wait_s)
            except LogTimeout as error:
                if error.begun and wait_s < self._filling.silence_s:
                    wait_s = self._filling.silence_s
                    continue
                raise PrecursorTimeout(
                    f"Agent {self._filling.agent!r} waited {wait_s:g} s for {source.key.agent!r}, and nothing came.",
                    remedy="Send the precursor first, or allow a longer wait.",
                ) from error
            if read.position > position:
                if self._slot is None:  # the prefix has waited: the precursors' own prompts were to be prefilled first
                    self._send_all = True
                self._slot = source.key.agent
                self._append(read, shares_ids=source.shares_ids())
            if read.end is not None:
                return read.end, read.detail
            position, wait_s = read.position, self._filling.silence_s

    def _append(self, read: LogRead, *, shares_ids: bool) -> None:
        if shares_ids:  # a piece may have text alone: what its ids say came with earlier pieces
            self._prompt.add_ids(read.ids)
        else:
            self._prompt.add_text(read.text)
        if self._slot_tokens == 0:
            self._slot_started_s = self._clock()
        added = len(read.ids) or max(1, len(read.text) // 4)  # about four characters a token, where ids are not known
        self._slot_tokens += added
        self._unsent += added
        self._news.set()

    # --- sending

    async def _send_increments(self) -> None:
        while not (self._complete or self._send_all):
            await self._more()
        with self._pace.growing(self._filling.model.alias):
            while not self._complete:
                if self._worth_sending():
                    self._unsent, self._send_all = 0, False
                    await self._updates.send(await self._encoded(Draft.stable_ids), self._slot)
                else:
                    await self._more()

    async def _more(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _worth_sending(self) -> bool:
        if self._send_all:
            return True
        elapsed_s = self._clock() - self._slot_started_s
        wanted = tokens_per_increment(
            self._filling.prefill.increments,
            cost=self._pace.update_cost(self._filling.model.alias),
            arrival_tokens_per_s=self._slot_tokens / elapsed_s if elapsed_s > 0 else None,
            prompts=self._pace.growing_prompts(self._filling.model.alias),
        )
        return self._unsent >= wanted
