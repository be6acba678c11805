"""Gimbal's engines, which prefill and decode in one step, and requests served by the router's own
dispatcher.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from benchmarks.gimbal.requests import Request
from shell_router.core.engine import Finish, Generation, Hints, Tokens
from shell_router.lab.simulation.run import SimulatedFleet
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.engine_selection import SelectionSettings
from shell_router.routing.placement import EngineReport
from shell_router.routing.queue import QueueSettings
from shell_router.standins.simulated.costs import (
    DecodeCosts,
    PairCosts,
    PrefillCosts,
    TransferCosts,
    attended_pairs,
)
from shell_router.standins.simulated.pair import SimulatedPair
from shell_router.standins.simulated.processor import Processor
from shell_router.standins.simulated.text import Written

AT_ONCE = 256
"""vLLM's default of `max_num_seqs`."""


@dataclass(slots=True, eq=False)
class _Request:
    """`computed` of its tokens have KV; it gets each piece of `interval` tokens, and the first and
    last.
    """

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

    def __init__(
        self, costs: PairCosts, write: Callable[[Generation], Written], wake: Callable[[], None]
    ) -> None:
        self._costs = costs
        self._write = write
        self._wake = wake
        self._free = costs.decode.cache_tokens
        self._running: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._step: list[tuple[_Request, int]] = []
        self.preemptions = 0

    def report_load(self) -> EngineReport:
        """See `SimulatedPair.report_load`."""
        held, room = sum(one.computed for one in self._running), self._costs.decode.cache_tokens
        waiting = sum(one.prompt for one in self._waiting)
        return EngineReport(
            1 - self._free / room, held + waiting, len(self._running), len(self._waiting)
        )

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`."""
        output = self._write(request)
        ids, _ = output.part(0, len(output))
        one = _Request(len(request.input_ids), len(ids), request.sampling["stream_interval"])
        self._waiting.append(one)
        self._wake()
        sent = 0
        while sent < one.wanted:
            await one.news.wait()
            one.news.clear()
            yield Tokens(tuple(ids[sent : one.written]), "")
            sent = one.written
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

    @property
    def step_tokens(self) -> int:
        """That the step computes."""
        return sum(tokens for _, tokens in self._step)

    def end(self) -> None:
        """The step is done: each sequence with KV of all its tokens gets one more."""
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
        self.preemptions += 1
        return last

    def _seconds(self) -> float:
        """As the pair's costs have it; a step that prefills reads all weights once, for decode
        too."""
        prefill, decode = self._costs.prefill, self._costs.decode
        chunks = [
            (one, tokens) for one, tokens in self._step if one.computed < one.prompt or tokens > 1
        ]
        context = sum(one.computed for one, _ in self._step)
        if not chunks:
            return decode.steps_s(1, len(self._step), context)
        attended = sum(attended_pairs(tokens, one.computed) for one, tokens in chunks)
        return prefill.pass_s(self.step_tokens, attended) + context * decode.context_s


class Together:
    """Makes steps of its engines: each for itself, or with `in_step` all at once.

    `experts` are the seconds that a step takes on top, by the tokens of all engines that make it at
    once.
    """

    def __init__(
        self,
        costs: PairCosts,
        write: Callable[[Generation], Written],
        count: int,
        *,
        in_step: bool,
        experts: Callable[[int], float] | None = None,
    ) -> None:
        self.engines = [SteppedEngine(costs, write, self._wake) for _ in range(count)]
        self._experts = experts
        self._groups = [self.engines] if in_step else [[engine] for engine in self.engines]
        self._work = [asyncio.Event() for _ in self._groups]

    def _wake(self) -> None:
        for event in self._work:
            event.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        await asyncio.gather(*map(self._steps, self._groups, self._work))

    async def _steps(self, engines: Sequence[SteppedEngine], work: asyncio.Event) -> None:
        while True:
            seconds = max(engine.begin() for engine in engines)
            if not seconds:
                work.clear()
                await work.wait()
                continue
            if self._experts is not None:
                seconds += self._experts(sum(engine.step_tokens for engine in engines))
            await asyncio.sleep(seconds)
            for engine in engines:
                engine.end()


# NVIDIA A100 SXM 80 GB data sheet: BF16 without sparsity, HBM2e
FLOPS, BANDWIDTH, MEMORY = 312e12, 2.039e12, 80e9
# Qwen3 technical report (2505.09388), table 2, and the model's config.json: 30.5 billion
# parameters, 3.3 of them active, 48 layers, 32 heads, 4 of them for KV, each of 128 numbers; 128
# experts, of which a token takes 8
PARAMETERS, ACTIVE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30.5e9, 3.3e9, 48, 32, 4, 128
EXPERTS, CHOSEN, IN_EXPERTS = 128, 8, 29.0e9
BYTES = 2
KV_BYTES = 2 * LAYERS * KV_HEADS * HEAD_DIM * BYTES
# Assumed, as in configs/engines/h200.yaml: what kernels reach of the data sheet, and the memory an
# engine may fill; 2048 tokens of a pass are vLLM's default on an A100
COMPUTE_SHARE, MEMORY_SHARE, USABLE, CHUNK, PASS_S, REQUEST_S = 0.5, 0.7, 0.9, 2048, 0.0005, 0.004
FEW, MANY = 8, 64
VLLM_RESERVES = 0
"""vLLM lets a request in where its prompt fits (v1/core/sched/scheduler.py), and preempts where it
then runs out.
"""


def costs(*, cached: bool, reserved_tokens: int | None = VLLM_RESERVES) -> PairCosts:
    """Of an engine with all weights on its own GPU; with `cached` it keeps prefixes. See
    DecodeCosts for the other.

    A pass reads every expert that one of its tokens takes. For prefill these are all; a step of n
    sequences touches 1 - (1 - 8/128)^n of them, here a straight line through 8 and 64 sequences.
    """
    bandwidth, flops = BANDWIDTH * MEMORY_SHARE, FLOPS * COMPUTE_SHARE
    room = int((MEMORY * USABLE - PARAMETERS * BYTES) / KV_BYTES)
    token_s = 2 * ACTIVE / flops
    few_s, many_s = (step_s(n, bandwidth) for n in (FEW, MANY))
    per_sequence_s = (many_s - few_s) / (MANY - FEW)
    prefill = PrefillCosts(
        PASS_S + PARAMETERS * BYTES / bandwidth,
        token_s,
        4 * HEADS * HEAD_DIM * LAYERS / flops,
        CHUNK,
        cache_tokens=room if cached else 1,
    )
    decode = DecodeCosts(
        PASS_S + few_s - FEW * per_sequence_s,
        token_s + per_sequence_s,
        KV_BYTES / bandwidth,
        room,
        reserved_tokens=reserved_tokens,
    )
    return PairCosts(prefill, decode, TransferCosts(REQUEST_S))


def step_s(sequences: int, bandwidth: float) -> float:
    """Seconds in which the weights that `sequences` touch are read."""
    touched = 1 - (1 - CHOSEN / EXPERTS) ** sequences
    return (PARAMETERS - IN_EXPERTS + touched * IN_EXPERTS) * BYTES / bandwidth


PATIENT_S = 1e6


@dataclass(frozen=True, slots=True)
class Setting:
    """How requests are scheduled, and whether the lengths of outputs are known."""

    scheduling: SchedulingSettings
    known: bool = False


def scheduling(
    policy: str,
    order: str | None = None,
    *,
    room: int = 0,
    share: float = 1.0,
    age_s: float = 5.0,
    bind: str = "place",
) -> SchedulingSettings:
    """With an `order` the queue is the router's, and an engine gets what fits into `share` of its
    `room`.
    """
    if order is None:
        return SchedulingSettings(SelectionSettings(policy))
    queue = QueueSettings(order, bind, max_tokens=int(share * room), age_s=age_s, wait_s=PATIENT_S)
    return SchedulingSettings(SelectionSettings(policy), queue)


def settings(room: int) -> Mapping[str, Setting]:
    """By name. Gimbal's engines hold requests back themselves, here the router does for them:
    `bind` is their arrival.

    EDR, the paper's third part, places experts and is not the router's: see experts.py.
    """
    sjf = "shortest_prefill"
    return {
        "round robin": Setting(scheduling("round_robin")),
        "DPLB": Setting(scheduling("gimbal")),
        "SJFS": Setting(scheduling("round_robin", sjf, room=room, bind="arrival")),
        "DPLB+SJFS": Setting(scheduling("gimbal", sjf, room=room, bind="arrival")),
        "fewest requests": Setting(scheduling("least_running")),
        "ours": Setting(scheduling("scored", sjf, room=room)),
        "ours, lengths known": Setting(
            scheduling("scored", "shortest_total", room=room, share=1.1), known=True
        ),
    }


ENGINES = 2
EVENT_TOKENS = 16
Kind = Literal["pair", "shared", "stepped", "in step"]
"""How an engine prefills and decodes: on a GPU for each, on one that both share evenly, or step by
step, alone or all together.
"""
_FILLER = tuple(range(1 << 14))


@dataclass(slots=True)
class Served:
    """Per request, in the order of their ends: seconds to the first token, per token after it, and
    in all.

    `ended` has when it was, whose, and its tokens, outputs counted twice; `preemptions` counts how
    often engines ran out of KV and took some of a request that was being written.
    """

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ended: list[tuple[float, str, int]] = field(default_factory=list)
    elapsed_s: float = 0.0
    preemptions: int = 0


def served(
    requests: Sequence[Request],
    costs: PairCosts,
    scheduling: SchedulingSettings,
    *,
    kind: Kind = "shared",
    known: bool = False,
    experts: Callable[[int], float] | None = None,
    engines: int = ENGINES,
) -> Served:
    """Serve them all. With `known` the length of every output is known beforehand.

    `experts` are those of `Together`, of engines that are not shared.
    """
    return run_virtual(_served(requests, costs, scheduling, kind, known, experts, engines))


async def _served(
    requests: Sequence[Request],
    costs: PairCosts,
    scheduling: SchedulingSettings,
    kind: Kind,
    known: bool,
    experts: Callable[[int], float] | None,
    engines: int,
) -> Served:
    loop, done = asyncio.get_running_loop(), Served()
    outputs = {f"r{number}": one.output for number, one in enumerate(requests)}

    def write(request: Generation) -> Written:
        ids = _FILLER[: outputs[request.rid]]
        return Written(("",) * len(ids), ids, 0.0)

    in_step = kind == "in step"
    stepped = (
        None
        if kind in ("pair", "shared")
        else Together(costs, write, engines, in_step=in_step, experts=experts)
    )
    pairs = stepped.engines if stepped else [_engine(costs, write, kind) for _ in range(engines)]
    fleet = SimulatedFleet("qwen3-30b-a3b", pairs, scheduling)

    async def ask(number: int, one: Request) -> None:
        await asyncio.sleep(one.at_s)
        begun_s = loop.time()
        hints = Hints(one.user, output_tokens=one.output if known else None)
        sampling = {"max_new_tokens": 1 << 14, "stream_interval": EVENT_TOKENS}
        first_s = None
        async for item in fleet.generate(
            Generation(f"r{number}", _ids(number, one), sampling, hints=hints)
        ):
            if first_s is None:
                first_s = loop.time()
            if isinstance(item, Finish):
                done.ttft_s.append(first_s - begun_s)
                if one.output > 1:
                    done.tpot_s.append((loop.time() - first_s) / (one.output - 1))
                done.total_s.append(loop.time() - begun_s)
                done.ended.append((loop.time(), one.user, one.prompt + 2 * one.output))
                done.prompt_tokens += item.prompt_tokens
                done.cached_tokens += item.cached_tokens

    async with fleet.poll_pairs(), asyncio.TaskGroup() as running:
        steps = running.create_task(stepped.run()) if stepped else None
        async with asyncio.TaskGroup() as group:
            for number, one in enumerate(requests):
                group.create_task(ask(number, one))
        done.elapsed_s = loop.time()
        if steps:
            steps.cancel()
    done.preemptions = sum(
        pair.preemptions if stepped else pair.decoding.preemptions for pair in pairs
    )
    return done


def _engine(costs: PairCosts, write: Callable[[Generation], Written], kind: Kind) -> SimulatedPair:
    """Return a pair of GPUs, or one that prefills and decodes, chunk by chunk."""
    if kind == "pair":
        return SimulatedPair(costs, write)
    gpu = Processor()
    return SimulatedPair(costs, write, prefill_processor=gpu, decode_processor=gpu, one_engine=True)


def _ids(number: int, one: Request) -> list[int]:
    """Ids that begin with its user's prefix, and go on uniquely."""
    known = user_ids(one.user)
    own = (number + 1) << 40
    return [known + at for at in range(one.old)] + [own + at for at in range(one.prompt - one.old)]


def user_ids(user: str) -> int:
    """The first id of what a user says."""
    return sum(ord(letter) * 131**at for at, letter in enumerate(user)) % (1 << 30) << 14
