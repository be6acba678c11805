"""Fills an agent's slots from its precursors' logs and prefills what is there meanwhile (Faster-MoA, 4.3).

The paper's loop is fetch, append, prefill-only, slot by slot, and so it is here. A fetch waits until enough has come
for the next update, or the slot has ended. While an update is under way nothing is fetched: the logs keep what comes,
and that a precursor has failed is seen after it.

The first update, which is mostly the fixed prefix, goes out with the first precursor's first tokens. The paper sends it
at once, but where layers share an engine it would then delay the very prompts that are waited for.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from agent_cache import AgentPromptCache, End, LogKey, LogRead, LogTimeout
from shell_router.core.events import Event
from shell_router.core.hints import NO_HINTS, Hints
from shell_router.core.model import ServedModel
from shell_router.errors import AgentFailed, PrecursorTimeout
from shell_router.execution.pace import Pace
from shell_router.execution.prompt import GrowingPrompt, Part, Slot
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
    agent. `begin_s` limits the wait for a precursor's first sign, `silence_s` any later one, which may be noticed up
    to twice as late. `hints` go with every request.
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
        self._incremental = filling.prefill.incremental and bool(filling.sources)
        self._until_complete = ExitStack()
        self._growing = False
        self._slot: str | None = None
        self._filled = 0
        # what decides when to send: tokens not yet sent, and how fast those of the slot come
        self._unsent = 0
        self._slot_tokens = 0
        self._slot_began: tuple[float, int] = 0.0, 0  # when its first tokens were there, and how many

    async def fill(self) -> list[int]:
        """The complete prompt's ids, the same with incremental prefill and without.

        Raises PrecursorTimeout, and AgentFailed when a precursor that is needed gave nothing.
        """
        with self._until_complete:
            await self._read_parts()
        ids = await self._encoded(self._prompt.final_ids)
        if self._incremental:
            left = len(ids) - common_prefix(self._updates.sent, ids)
            if left > self._filling.prefill.increments.tail_share * len(ids):
                await self._updates.send(ids, self._slot)
        return ids

    async def _encoded(self, ids_of: Callable[[], list[int]]) -> list[int]:
        return ids_of() if self._prompt.undecided < LONG_TEXT else await asyncio.to_thread(ids_of)

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
        before = self._prompt.mark()
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

    async def _follow(self, source: Source) -> tuple[End, str]:
        """Append all that one precursor writes; its end mark and the mark's detail."""
        position, wait_s = 0, self._filling.begin_s
        while True:
            try:
                read = await self._next(source.key, position, wait_s)
            except LogTimeout as error:
                if error.begun and wait_s < self._filling.silence_s:
                    wait_s = self._filling.silence_s
                    continue
                raise PrecursorTimeout(
                    f"Agent {self._filling.agent!r} waited {wait_s:g} s for {source.key.agent!r}, and nothing came.",
                    remedy="Send the precursor first, or allow a longer wait.",
                ) from error
            if read.position > position:
                self._slot = source.key.agent
                self._append(read, shares_ids=source.shares_ids())
            if read.end is not None:
                return read.end, read.detail
            position, wait_s = read.position, self._filling.silence_s

    async def _next(self, key: LogKey, position: int, wait_s: float) -> LogRead:
        """What comes after `position`. Where an update is due, it goes out before anything is waited for."""
        if self._is_due():
            if not self._slot_tokens:  # much may be there already: it goes along
                with suppress(LogTimeout):
                    return await self._cache.read(key, position, wait_s=0)
            await self._send()
        return await self._cache.read(key, position, at_least=self._enough(), wait_s=wait_s)

    def _append(self, read: LogRead, *, shares_ids: bool) -> None:
        if shares_ids:  # a piece may have text alone: what its ids say came with earlier pieces
            self._prompt.add_ids(read.ids)
        else:
            self._prompt.add_text(read.text)
        added = len(read.ids) or max(1, len(read.text) // 4)  # about four characters a token, where ids are not known
        if self._slot_tokens == 0:
            self._slot_began = self._clock(), added
        self._slot_tokens += added
        self._unsent += added

    # --- sending

    def _is_due(self) -> bool:
        """Whether the next update is worth its cost, or nothing may come for long: at the start, and between slots."""
        if not self._incremental or not self._unsent:
            return False
        return not self._growing or not self._slot_tokens or self._unsent >= self._worth_sending()

    def _enough(self) -> int:
        """Tokens to wait for: those of the next update, at most as many as have come, as the rate is a guess."""
        if not self._incremental:
            return sys.maxsize if self._slot_tokens else 1
        return max(1, min(self._worth_sending() - self._unsent, self._slot_tokens))

    def _worth_sending(self) -> int:
        began_s, first = self._slot_began
        later, elapsed_s = self._slot_tokens - first, self._clock() - began_s
        return tokens_per_increment(
            self._filling.prefill.increments,
            cost=self._pace.update_cost(self._filling.model.alias),
            arrival_tokens_per_s=later / elapsed_s if later and elapsed_s > 0 else None,
            prompts=self._pace.growing_prompts(self._filling.model.alias),
        )

    async def _send(self) -> None:
        if not self._growing:
            self._growing = True
            self._until_complete.enter_context(self._pace.growing(self._filling.model.alias))
        self._unsent = 0
        await self._updates.send(await self._encoded(self._prompt.stable_ids), self._slot)
