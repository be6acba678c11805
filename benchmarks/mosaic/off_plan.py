"""Batches in virtual time whose models cost something else than their profiles say, by the
product's sessions.
"""

import asyncio
import heapq
import math
import random
import statistics
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from shell_router.batch.journal import Output
from shell_router.batch.planner import BatchPlan, ModelWork, Workload, plan_wrap_around
from shell_router.batch.profile import Load
from shell_router.batch.prompts import BatchPrompt
from shell_router.batch.queues import WorkerQueues
from shell_router.batch.sessions import Follow, Move, Replanning, Sessions
from shell_router.core.control_text import ControlText
from shell_router.core.engine import Finish, Generation, Prefilled, ServedModel, Tokens
from shell_router.lab.simulation.virtual_time import run_virtual

CONCURRENCY, SATURATED = 64, 16
BOUND = 0.25
NEVER = 1e9


@dataclass(frozen=True, slots=True)
class Words:
    """A tokenizer for prompts whose text is never read: the id is the question's number."""

    fingerprint: str = "numbers"
    control: ControlText = field(default_factory=ControlText)

    def encode(self, text: str) -> list[int]:
        return [int(text)]

    def encode_stable(self, text: str) -> list[int]:
        return self.encode(text)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *_: object) -> str:
        return str(messages[0]["content"])


class Shared:
    """An engine that answers in virtual time: the seconds that each prompt takes alone are shared
    by those in flight.

    With fewer than `SATURATED` of them, each goes no faster: the others' share of the engine is
    lost.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._served_s = self._at_s = 0.0
        self._in_flight: list[tuple[float, int, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        number = request.input_ids[0]
        self._advance()
        ended = self._loop.create_future()
        heapq.heappush(self._in_flight, (self._served_s + self._seconds[number], number, ended))
        self._wait()
        await ended
        yield Finish("stop", 1, 1, 0)

    async def prefill(self, request: Generation) -> Prefilled:
        raise NotImplementedError("a batch sends no prefill updates")

    @property
    def _sharing(self) -> int:
        return max(SATURATED, len(self._in_flight))

    def _advance(self) -> None:
        """Count what each in flight was served since the last change."""
        self._served_s += (self._loop.time() - self._at_s) / self._sharing
        self._at_s = self._loop.time()

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._in_flight:
            left_s = max(0.0, self._in_flight[0][0] - self._served_s)
            self._timer = self._loop.call_later(left_s * self._sharing, self._end)

    def _end(self) -> None:
        self._advance()
        while self._in_flight and self._in_flight[0][0] <= self._served_s + 1e-9:
            heapq.heappop(self._in_flight)[2].set_result(None)
        self._wait()


@dataclass(frozen=True, slots=True)
class TimedWorkers:
    """Workers whose loads and answers take what `true` says; `seconds` are those of each model's
    answers.
    """

    true: Workload
    seconds: Mapping[str, Sequence[float]]

    @asynccontextmanager
    async def session(self, _worker: int, model: str) -> AsyncIterator[tuple[ServedModel, Load]]:
        (work,) = (one for one in self.true.models if one.name == model)
        await asyncio.sleep(work.load_s)
        yield ServedModel(model, Shared(self.seconds[model]), Words(), 10**9), "engine started"


class Quiet(Follow):
    """Logs nothing."""

    def on_progress(self, line: str) -> None: ...


def with_tails(workload: Workload) -> Workload:
    """The workload with a `fixed_s` for the end of each session, when few are in flight: as a
    profile would find it.
    """
    one = Workload((ModelWork("one", 160, 0.0, 1.0),), 1, 1)
    rounds = [run(one, plan_wrap_around(one), off(one, 0.0, seed), "none")[0] for seed in range(9)]
    tail = statistics.median(rounds) - 160
    models = tuple(replace(model, fixed_s=tail * model.per_prompt_s) for model in workload.models)
    return replace(workload, models=models)


def off(
    workload: Workload, spread: float, seed: int
) -> tuple[Workload, Mapping[str, Sequence[float]]]:
    """What the workload's models really cost: per prompt and per load by lognormal factors of their
    own, mean 1.

    Of a model, answers differ from each other by a lognormal factor, too (0.5).
    """
    draw = random.Random(seed)

    def factor(sigma: float) -> float:
        return math.exp(draw.gauss(-(sigma**2) / 2, sigma))

    models = tuple(
        replace(
            one,
            per_prompt_s=one.per_prompt_s * (slower := factor(spread)),
            fixed_s=one.fixed_s * slower,
            load_s=one.load_s * factor(spread / 3),
        )
        for one in workload.models
    )
    seconds = {
        one.name: [one.per_prompt_s * factor(0.5) for _ in range(one.prompts)] for one in models
    }
    return replace(workload, models=models), seconds


def run(
    planned: Workload,
    plan: BatchPlan,
    real: tuple[Workload, Mapping[str, Sequence[float]]],
    moves: str,
) -> tuple[float, Counter[Move]]:
    """Seconds that the plan takes at the real costs, and the prompts that moved; `moves`: none,
    taken or all.
    """
    prompts = {
        one.name: [
            BatchPrompt(
                f"{number}", "proposer", one.name, [{"content": str(number)}], {"max_new_tokens": 1}
            )
            for number in range(one.prompts)
        ]
        for one in planned.models
    }

    async def ignore(_output: Output) -> None: ...

    async def ran() -> tuple[float, Counter[Move]]:
        replanning = Replanning(
            plan_wrap_around, planned.capacity, BOUND if moves == "all" else NEVER
        )
        sessions = Sessions(
            WorkerQueues(planned.models, prompts, plan, planned.workers),
            TimedWorkers(*real),
            ignore,
            Quiet(),
            concurrency=CONCURRENCY,
            clock=asyncio.get_running_loop().time,
            replanning=None if moves == "none" else replanning,
        )
        ended = await sessions.run()
        return max(session.end_s for session in ended), sessions.moved

    return run_virtual(ran())
