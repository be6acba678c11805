"""vLLM's scheduler, step by step (0.9, v1/core/sched/scheduler.py): prefill and decode share every pass.

A step takes a token of every request that decodes, and of prompts what is left of its budget, those that run before
those that wait. Where KV runs out the request that came last loses all of its own, and waits before all others. With
expert parallelism engines meet in every layer, so that a step of all takes as long as the slowest one's.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from shell_router.core.generation import Finish, Generation, Tokens
from shell_router.engines.simulated import PairCosts, Written
from shell_router.engines.simulated.costs import attended_pairs
from shell_router.scheduling.engine_state import Reported

AT_ONCE = 256
"""vLLM's default of `max_num_seqs`."""


@dataclass(slots=True, eq=False)
class _Request:
    """`computed` of its tokens have KV; it is told each piece of `interval` tokens, and the first and last."""

    prompt: int
    wanted: int
    interval: int
    computed: int = 0
    written: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def missing(self) -> int:
        return self.prompt + self.written - self.computed

    @property
    def worth_telling(self) -> bool:
        return self.written == self.wanted or (self.written - 1) % self.interval == 0


class SteppedEngine:
    """One engine; `Together` makes its steps. No request is ever abandoned, and no prefix kept."""

    def __init__(self, costs: PairCosts, write: Callable[[Generation], Written], wake: Callable[[], None]) -> None:
        self._costs = costs
        self._write = write
        self._wake = wake
        self._free = costs.decode.cache_tokens
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._step: list[tuple[_Request, int]] = []
        self.taken_back = 0

    def reported(self) -> Reported:
        """See `SimulatedPair.reported`."""
        held, room = sum(one.computed for one in self._running), self._costs.decode.cache_tokens
        waiting = sum(one.prompt for one in self._waiting)
        return Reported(1 - self._free / room, held + waiting, len(self._running), len(self._waiting))

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`."""
        output = self._write(request)
        ids, _ = output.part(0, len(output))
        one = _Request(len(request.input_ids), len(ids), request.sampling["stream_interval"])
        self._waiting.append(one)
        self._wake()
        told = 0
        while told < one.wanted:
            await one.news.wait()
            one.news.clear()
            yield Tokens(tuple(ids[told : one.written]), "")
            told = one.written
        yield Finish("stop", one.prompt, one.wanted, 0)

    def begin(self) -> float:
        """Choose what the next step computes; its seconds, 0 where there is nothing to do."""
        budget, self._step, taken = self._costs.prefill.chunk_tokens, [], False
        for one in list(self._running):
            if one not in self._running:
                continue  # it lost its KV to one before it
            tokens = min(one.missing, budget)
            while self._free < tokens and len(self._running) > 1:
                taken = True
                if self._take_back() is one:
                    break
            else:
                budget = self._schedule(one, tokens, budget)
        while self._waiting and budget and not taken and len(self._running) < AT_ONCE:
            tokens = min(self._waiting[0].missing, budget)
            if tokens > self._free and self._running:
                break
            self._running.append(self._waiting.popleft())
            budget = self._schedule(self._running[-1], tokens, budget)
        return self._seconds() if self._step else 0.0

    def end(self) -> None:
        """The step is done: whoever has KV of all its tokens has one token more."""
        for one, tokens in self._step:
            one.computed += tokens
            if one.missing:
                continue
            one.written += 1
            if one.worth_telling:
                one.news.set()
            if one.written == one.wanted:
                self._running.remove(one)
                self._free += one.computed

    def _schedule(self, one: _Request, tokens: int, budget: int) -> int:
        if tokens:
            self._free -= tokens
            self._step.append((one, tokens))
        return budget - tokens

    def _take_back(self) -> _Request:
        last = self._running.pop()
        self._free += last.computed
        last.computed = 0
        self._waiting.appendleft(last)
        self.taken_back += 1
        return last

    def _seconds(self) -> float:
        """As the pair's costs have it; a step that prefills reads all weights once, for decode too."""
        prefill, decode = self._costs.prefill, self._costs.decode
        chunks = [(one, tokens) for one, tokens in self._step if one.computed < one.prompt or tokens > 1]
        context = sum(one.computed for one, _ in self._step)
        if not chunks:
            return decode.steps_s(1, len(self._step), context)
        attended = sum(attended_pairs(tokens, one.computed) for one, tokens in chunks)
        return prefill.pass_s(sum(tokens for _, tokens in self._step), attended) + context * decode.context_s


class Together:
    """Makes steps of its engines: each for itself, or with `in_step` all at once."""

    def __init__(self, costs: PairCosts, write: Callable[[Generation], Written], count: int, *, in_step: bool) -> None:
        self.engines = [SteppedEngine(costs, write, self._wake) for _ in range(count)]
        self._groups = [self.engines] if in_step else [[engine] for engine in self.engines]
        self._work = [asyncio.Event() for _ in self._groups]

    def _wake(self) -> None:
        for event in self._work:
            event.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        await asyncio.gather(*map(_steps, self._groups, self._work))


async def _steps(engines: Sequence[SteppedEngine], work: asyncio.Event) -> None:
    while True:
        seconds = max(engine.begin() for engine in engines)
        if not seconds:
            work.clear()
            await work.wait()
            continue
        await asyncio.sleep(seconds)
        for engine in engines:
            engine.end()
