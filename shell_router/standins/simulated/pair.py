"""A simulated prefill-decode pair, behind the same contract as a real one, and its prefill
engine."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass

from shell_router.core.engine import DEFAULT_MAX_NEW_TOKENS, Finish, Generation, Prefilled, Tokens
from shell_router.routing.placement import EngineReport
from shell_router.standins.kv_capacity import Sequence
from shell_router.standins.prefix_cache import PrefixCache
from shell_router.standins.simulated.costs import PairCosts, PrefillCosts, attended_pairs
from shell_router.standins.simulated.decode import DecodeEngine
from shell_router.standins.simulated.processor import Processor
from shell_router.standins.simulated.text import Written


@dataclass(slots=True, eq=False)
class _Prompt:
    """`cached` ids were found when its turn came, `done` of all are prefilled."""

    ids: list[int]
    ended: asyncio.Future[int]
    cached: int | None = None
    done: int = 0


class PrefillEngine:
    """Prompts in the order they come, in passes of bounded size, on top of a radix cache.

    One pass at a time, during which what runs on `holds` stands still.

    `busy_s` is the time of its passes, had it the processor alone, `computed` counts the tokens
    prefilled.
    """

    def __init__(
        self, costs: PrefillCosts, processor: Processor, holds: Processor | None = None
    ) -> None:
        self._costs = costs
        self._processor = processor
        self._holds = holds
        self._loop = asyncio.get_running_loop()
        self._cache = PrefixCache(costs.cache_tokens)
        self._waiting: deque[_Prompt] = deque()
        self._passing = False
        self.busy_s = 0.0
        self.computed = 0

    async def prefill(self, ids: Collection[int]) -> int:
        """Prefill a prompt; how many of its tokens were cached. The last one is always computed.

        A list is kept, and must stay as it is. All else is made one: the cache compares parts, and
        no list is a tuple. A prompt that is abandoned leaves the queue; the pass that it is in is
        not cut short.
        """
        prompt = _Prompt(ids if isinstance(ids, list) else list(ids), self._loop.create_future())
        self._waiting.append(prompt)
        if not self._passing:
            self._next_pass()
        return await prompt.ended

    def _next_pass(self) -> None:
        passed: list[tuple[_Prompt, int]] = []
        left = self._costs.chunk_tokens
        new = 0
        attended = 0
        while self._waiting and left > 0 and len(passed) < self._costs.prompts:
            prompt = self._waiting[0]
            if prompt.ended.cancelled():
                self._waiting.popleft()
                continue
            if prompt.cached is None:
                prompt.cached = prompt.done = min(
                    self._cache.match(prompt.ids), max(0, len(prompt.ids) - 1)
                )
            taken = min(left, len(prompt.ids) - prompt.done)
            new = new + taken
            attended = attended + attended_pairs(taken, prompt.done)
            passed.append((prompt, taken))
            left -= taken
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

    def _end_pass(self, passed: Collection[tuple[_Prompt, int]], new: int) -> None:
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


class SimulatedPair:
    """See `Engine`. `write` says what a request will answer; it is cut at the request's
    `max_new_tokens`.

    As in SGLang's disaggregation, a request first claims KV on the decode side, then is prefilled,
    then its KV is transferred, and the first token comes with it. Where no processors are given,
    each engine has its own. With `prefill_first` decode stands still while there is something to
    prefill, as in one engine that does both. `host` does the event loops' work per token and the
    transfers, where these are not free: on one machine's CPU.

    A preempted sequence comes back from host memory at the speed of transfers, as on SGLang's
    decode servers (`--disaggregation-decode-retraction-backup`). In `one_engine` it is prefilled
    again, with what it had written.
    """

    def __init__(
        self,
        costs: PairCosts,
        write: Callable[[Generation], Written],
        *,
        prefill_processor: Processor | None = None,
        decode_processor: Processor | None = None,
        prefill_first: bool = False,
        one_engine: bool = False,
        host: Processor | None = None,
    ) -> None:
        self._transfer = costs.transfer
        self._capacity = costs.decode.cache_tokens
        self._write = write
        self._host = host
        self._one_engine = one_engine
        decodes = decode_processor or Processor()
        held = decodes if prefill_first else None
        self.prefilling = PrefillEngine(costs.prefill, prefill_processor or Processor(), held)
        self.decoding = DecodeEngine(costs.decode, decodes, host)

    def reported(self) -> EngineReport:
        """What the pair says of itself, as an engine's `/v1/loads`."""
        used, (running, waiting) = self.decoding.used_tokens, self.decoding.requests
        return EngineReport(
            used / self._capacity, used + self.decoding.waiting_tokens, running, waiting
        )

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`."""
        return Prefilled(len(request.input_ids), await self.prefilling.prefill(request.input_ids))

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`."""
        output = self._write(request)
        prompt = len(request.input_ids)
        limit = request.sampling.get("max_new_tokens")
        wanted = min(len(output), DEFAULT_MAX_NEW_TOKENS if limit is None else max(1, limit))
        progress = _Progress()
        sequence = Sequence(
            prompt,
            wanted,
            request.sampling.get("stream_interval") or 1,
            progress.report,
            progress.preempt,
        )
        if "drafts" in (request.sampling.get("custom_params") or {}):
            sequence.per_pass = output.per_pass
            sequence.width = output.width
        await self.decoding.allocate(sequence)
        try:
            cached = await self.prefilling.prefill(request.input_ids)
            await self._do_transfer(self._transfer.seconds(prompt))
            self.decoding.add(sequence)
            sent = 0
            while sent < wanted:
                if (now := await progress.more_than(sent)) == sent:
                    await self._resume(
                        sequence, (*request.input_ids, *output.part(0, sequence.written)[0])
                    )
                    continue
                if request.logprobs:
                    logprobs = (output.logprob,) * (now - sent)
                else:
                    logprobs = ()
                yield Tokens(*output.part(sent, now), logprobs)
                sent = now
            passes = math.ceil((wanted - 1) / sequence.per_pass)
            drafted = passes * (sequence.width - 1)
            accepted = wanted - 1 - passes
            yield Finish(
                "stop" if wanted == len(output) else "length",
                prompt,
                wanted,
                cached,
                drafted,
                accepted,
            )
        finally:
            self.decoding.free(sequence)

    async def _do_transfer(self, seconds: float) -> None:
        await (asyncio.sleep(seconds) if self._host is None else self._host.work(seconds))

    async def _resume(self, sequence: Sequence, ids: tuple[int, ...]) -> None:
        """Get a preempted sequence its KV, which is that of `ids`, again."""
        await self.decoding.allocate(sequence)
        if self._one_engine:
            await self.prefilling.prefill(ids)
            self.decoding.add(sequence)
        else:
            await self._do_transfer(len(ids) * self._transfer.token_s)
            self.decoding.add(sequence, tokens=0)


class _Progress:
    """How many tokens a sequence has written and whether it was preempted, to be waited for."""

    __slots__ = ("_changed", "_preempted", "_written")

    def __init__(self) -> None:
        self._written = 0
        self._preempted = False
        self._changed = asyncio.Event()

    def report(self, written: int) -> None:
        self._written = written
        self._changed.set()

    def preempt(self) -> None:
        self._preempted = True
        self._changed.set()

    async def more_than(self, sent: int) -> int:
        """The tokens written so far; `sent` itself where the sequence was preempted."""
        if self._written <= sent and not self._preempted:
            self._changed.clear()
            await self._changed.wait()
        if self._written <= sent:
            self._preempted = False
        return self._written
