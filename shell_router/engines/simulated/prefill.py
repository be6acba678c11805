"""The prefill engine: prompts in the order they come, in passes of bounded size, on top of a radix cache."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shell_router.engines.simulated.costs import PrefillCosts, attended_pairs
from shell_router.engines.simulated.processor import Processor
from shell_router.engines.simulated.radix import RadixCache


@dataclass(slots=True, eq=False)
class _Prompt:
    """`cached` ids were found when its turn came, `done` of all are prefilled."""

    ids: list[int]
    ended: asyncio.Future[int]
    cached: int | None = None
    done: int = 0


class PrefillEngine:
    """One pass at a time, during which what runs on `holds` stands still.

    `busy_s` is the time of its passes, had it the processor alone, `computed` counts the tokens prefilled.
    """

    def __init__(self, costs: PrefillCosts, processor: Processor, holds: Processor | None = None) -> None:
        self._costs = costs
        self._processor = processor
        self._holds = holds
        self._loop = asyncio.get_running_loop()
        self._cache = RadixCache(costs.cache_tokens)
        self._waiting: deque[_Prompt] = deque()
        self._passing = False
        self.busy_s = 0.0
        self.computed = 0

    async def prefill(self, ids: Sequence[int]) -> int:
        """Prefill a prompt; how many of its tokens were cached. The last one is always computed.

        A list is kept, and must stay as it is. All else is made one: the cache compares parts, and no list is a tuple.
        A prompt that is abandoned leaves the queue; the pass that it is in is not cut short.
        """
        prompt = _Prompt(ids if isinstance(ids, list) else list(ids), self._loop.create_future())
        self._waiting.append(prompt)
        if not self._passing:
            self._next_pass()
        return await prompt.ended

    def _next_pass(self) -> None:
        passed: list[tuple[_Prompt, int]] = []
        room, new, attended = self._costs.chunk_tokens, 0, 0
        while self._waiting and room > 0 and len(passed) < self._costs.prompts:
            prompt = self._waiting[0]
            if prompt.ended.cancelled():
                self._waiting.popleft()
                continue
            if prompt.cached is None:
                prompt.cached = prompt.done = min(self._cache.match(prompt.ids), max(0, len(prompt.ids) - 1))
            taken = min(room, len(prompt.ids) - prompt.done)
            new, attended = new + taken, attended + attended_pairs(taken, prompt.done)
            passed.append((prompt, taken))
            room -= taken
            if prompt.done + taken < len(prompt.ids):
                break  # it goes on with the next pass, before all that wait
            self._waiting.popleft()
        self._passing = bool(passed)
        if passed:
            if self._holds:
                self._holds.hold()
            seconds = self._costs.pass_s(new, attended)
            self.busy_s += seconds
            self._processor.start(seconds, lambda: self._end_pass(passed, new))

    def _end_pass(self, passed: Sequence[tuple[_Prompt, int]], new: int) -> None:
        if self._holds:
            self._holds.release()
        self.computed += new
        for prompt, taken in passed:
            prompt.done += taken
            complete = prompt.done == len(prompt.ids)
            self._cache.add(prompt.ids if complete else prompt.ids[: prompt.done])
            if complete and not prompt.ended.done():
                assert prompt.cached is not None
                prompt.ended.set_result(prompt.cached)
        self._next_pass()
