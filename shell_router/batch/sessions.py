"""Sessions: a worker loads a model, the model answers its share of the prompts, and the worker goes on to the next.

A session that fails gives what it has not answered to the other workers. A model that failed on several of them is
given up: its prompts become outputs that say why, and everything else goes on.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Protocol

from shell_router.batch.answering import Prompt, answered
from shell_router.batch.journal import Output
from shell_router.batch.plan import Expert, Plan, Session
from shell_router.batch.requeue import shared_out
from shell_router.core.model import ServedModel
from shell_router.errors import ConfigError, EngineError

log = logging.getLogger(__name__)

WORKERS_TO_TRY = 3
"""A model that fails on so many workers, or on all there are, is given up."""


class Workers(Protocol):
    """Places that hold one model at a time."""

    def session(self, worker: int, model: str) -> AbstractAsyncContextManager[ServedModel]:
        """`model`, loaded on `worker` while the context is open. Raises EngineError and ConfigError."""
        ...


@dataclass(frozen=True, slots=True)
class Watch:
    """What is told while sessions run: each output, each session that ended, and lines of text."""

    output: Callable[[Output], None]
    session: Callable[[Session], None]
    tell: Callable[[str], None] = log.info


@dataclass(slots=True)
class _Share:
    """Prompts of one model, meant for one worker."""

    model: str
    prompts: Sequence[Prompt]


@dataclass(slots=True)
class _Place:
    """One worker: what it has yet to do, and what it does now."""

    queue: deque[_Share] = field(default_factory=deque)
    running: _Share | None = None
    left: int = 0
    """Prompts of the running share that are not answered yet."""


class Sessions:
    """Runs a plan. `experts` are the models with their costs, `prompts` what each of them is asked, in order.

    At most `at_once` prompts of a session are with the engine at the same time.
    """

    def __init__(
        self,
        experts: Sequence[Expert],
        prompts: Mapping[str, Sequence[Prompt]],
        workers: Workers,
        watch: Watch,
        *,
        at_once: int,
        clock: Callable[[], float],
    ) -> None:
        self._experts = {expert.name: expert for expert in experts}
        self._prompts = prompts
        self._workers = workers
        self._watch = watch
        self._at_once = at_once
        self._clock = clock
        self._places: list[_Place] = []
        self._failed_on: dict[str, set[int]] = {}
        self._changed = asyncio.Condition()

    async def run(self, plan: Plan, workers: int) -> None:
        """Every prompt of the plan is answered, or has an output that says why not.

        Raises what the watch raises. Cancelled, or with such an error, no session is left open.
        """
        self._places = [_Place() for _ in range(workers)]
        taken = dict.fromkeys(self._prompts, 0)
        for session in plan.sessions:
            begin = taken[session.expert]
            taken[session.expert] = begin + session.prompts
            share = _Share(session.expert, self._prompts[session.expert][begin : taken[session.expert]])
            self._places[session.worker].queue.append(share)
        self._begun_s = self._clock()
        async with asyncio.TaskGroup() as tasks:
            for worker in range(workers):
                tasks.create_task(self._work(worker), name=f"worker {worker}")

    @property
    def left_s(self) -> float:
        """How long the rest will take, as far as costs tell."""
        return max((self._busy_s(place) for place in self._places), default=0.0)

    def _busy_s(self, place: _Place) -> float:
        queued_s = sum(self._experts[share.model].session_s(len(share.prompts)) for share in place.queue)
        running = place.running
        return queued_s + (self._experts[running.model].per_prompt_s * place.left if running else 0.0)

    async def _work(self, worker: int) -> None:
        while share := await self._next(self._places[worker]):
            await self._session(worker, share)

    async def _next(self, place: _Place) -> _Share | None:
        """What this worker does next; None when nobody has anything left that could fail."""
        async with self._changed:
            place.running = None
            self._changed.notify_all()
            await self._changed.wait_for(lambda: place.queue or not self._anything_left())
            if not place.queue:
                return None
            place.running = place.queue.popleft()
            place.left = len(place.running.prompts)
            return place.running

    def _anything_left(self) -> bool:
        return any(place.queue or place.running for place in self._places)

    async def _session(self, worker: int, share: _Share) -> None:
        begun_s = self._clock()
        left = list(share.prompts)
        async with AsyncExitStack() as stack:
            try:
                model = await stack.enter_async_context(self._workers.session(worker, share.model))
            except (EngineError, ConfigError) as error:
                failure = str(error)
            else:
                self._watch.tell(f"worker {worker}: {share.model} answers {len(left)} prompts")
                left, failure = await self._answer(model, self._places[worker], left)
        if done := len(share.prompts) - len(left):
            ended_s = self._clock() - self._begun_s
            self._watch.session(Session(worker, share.model, done, begun_s - self._begun_s, ended_s))
        if left:
            self._hand_on(worker, replace(share, prompts=left), failure, some=done > 0)

    async def _answer(self, model: ServedModel, place: _Place, prompts: list[Prompt]) -> tuple[list[Prompt], str]:
        """Those that stay without an answer, and why: rounds are repeated while each answers some."""
        failure = ""
        while prompts:
            failed = await self._round(model, place, prompts)
            failure = next(iter(failed.values()), "")
            if len(failed) == len(prompts):
                break
            prompts = list(failed)
        return (prompts, failure) if failure else ([], "")

    async def _round(self, model: ServedModel, place: _Place, prompts: Sequence[Prompt]) -> dict[Prompt, str]:
        """Ask each once; those that the engine failed to answer, with its errors."""
        failed: dict[Prompt, str] = {}
        slots = asyncio.Semaphore(self._at_once)

        async def ask(prompt: Prompt) -> None:
            async with slots:
                try:
                    output = await answered(model, prompt)
                except EngineError as error:
                    failed[prompt] = str(error)
                    return
            place.left -= 1
            self._watch.output(output)

        async with asyncio.TaskGroup() as tasks:
            for prompt in prompts:
                tasks.create_task(ask(prompt))
        return failed

    def _hand_on(self, worker: int, share: _Share, failure: str, *, some: bool) -> None:
        """To the workers that have not failed with this model; to nobody once enough of them have."""
        failed = self._failed_on.setdefault(share.model, set())
        if not some:
            failed.add(worker)
        others = {
            number: self._busy_s(place)
            for number, place in enumerate(self._places)
            if number not in failed and (number != worker or len(self._places) == 1)
        }
        told = f"worker {worker}: {len(share.prompts)} prompts of {share.model} were not answered: {failure}"
        if not others or len(failed) >= WORKERS_TO_TRY:
            log.error("%s Nobody is left to try them.", told)
            for prompt in share.prompts:
                self._watch.output(prompt.failed(failure))
            return
        log.warning("%s The others take them.", told)
        expert = replace(self._experts[share.model], prompts=len(share.prompts))
        begin = 0
        for number, count in shared_out(expert, others).items():
            self._places[number].queue.append(_Share(share.model, share.prompts[begin : begin + count]))
            begin += count
