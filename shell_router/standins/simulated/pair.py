"""A simulated prefill-decode pair, with the protocol of a real one, and its prefill engine."""

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
    """A prompt of which `cached` ids were in the cache at its turn, and `done` are prefilled."""

    ids: list[int]
    ended: asyncio.Future[int]
    cached: int | None = None
    done: int = 0


class PrefillEngine:
    """A prefill engine with a radix cache: prompts in order of arrival, in bounded passes.

    One pass runs at a time; meanwhile the jobs of `holds` are paused.

    Attributes:
        busy_s: The time of all passes, had they the processor alone.
        computed: Tokens that were prefilled.
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
        """Prefill a prompt; return how many of its tokens were cached, which the last never is.

        A list is not copied, and must stay as it is. Other collections are copied into a list: the
        cache compares slices, and no list equals a tuple. An abandoned prompt leaves the queue; the
        pass that it is in is not cut short.
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
    """A pair that takes computed time; see `Engine`.

    As in SGLang's disaggregation, a request is first allocated KV on the decode side, then it is
    prefilled, then its KV is transferred, and the first token comes with it. A preempted sequence
    comes back from host memory at the speed of transfers, as on SGLang's decode servers
    (`--disaggregation-decode-retraction-backup`).

    Args:
        costs: The costs of both engines.
        write: Returns the output of a request, which is cut at its `max_new_tokens`.
        prefill_processor: The prefill engine's; one of its own by default.
        decode_processor: The decode engine's; one of its own by default.
        prefill_first: Pause decode while there is something to prefill, as an engine does both.
        one_engine: Prefill a preempted sequence again, with what it had written.
        host: Does the event loops' work per token, and the transfers, where these are not free: on
            one machine's CPU.
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

    def report_load(self) -> EngineReport:
        """Return the pair's load, as an engine's `/v1/loads` does."""
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
        length = min(len(output), DEFAULT_MAX_NEW_TOKENS if limit is None else max(1, limit))
        progress = _Progress()
        sequence = Sequence(
            prompt,
            length,
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
            while sent < length:
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
            passes = math.ceil((length - 1) / sequence.per_pass)
            drafted = passes * (sequence.width - 1)
            accepted = length - 1 - passes
            yield Finish(
                "stop" if length == len(output) else "length",
                prompt,
                length,
                cached,
                drafted,
                accepted,
            )
        finally:
            self.decoding.free(sequence)

    async def _do_transfer(self, seconds: float) -> None:
        await (asyncio.sleep(seconds) if self._host is None else self._host.work(seconds))

    async def _resume(self, sequence: Sequence, ids: tuple[int, ...]) -> None:
        """Get a preempted sequence its KV, the KV of `ids`, again."""
        await self.decoding.allocate(sequence)
        if self._one_engine:
            await self.prefilling.prefill(ids)
            self.decoding.add(sequence)
        else:
            await self._do_transfer(len(ids) * self._transfer.token_s)
            self.decoding.add(sequence, tokens=0)


class _Progress:
    """The number of tokens that a sequence has written, and whether it was preempted."""

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
        """Wait for more than `sent` tokens and return their number; `sent` after a preemption."""
        if self._written <= sent and not self._preempted:
            self._changed.clear()
            await self._changed.wait()
        if self._written <= sent:
            self._preempted = False
        return self._written
