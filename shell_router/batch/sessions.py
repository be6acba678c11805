"""Sessions: a worker loads a model, the model answers its share of the prompts, and the worker goes on to the next.

A session that fails gives what it has not answered to the other workers. A model that does not load, or never answers,
is given up: its prompts become outputs that say why, and everything else goes on. What an engine held when it died
without any answer is asked one by one, so that a prompt that engines die of is found and costs only itself.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from shell_router.batch.answering import Prompt
from shell_router.batch.journal import Output
from shell_router.batch.places import Place, Places, Share
from shell_router.batch.plan import Expert, Plan, Session
from shell_router.batch.rounds import Left, in_rounds, one_by_one
from shell_router.core.model import ServedModel
from shell_router.errors import ConfigError, EngineError

log = logging.getLogger(__name__)


class Workers(Protocol):
    """Places that hold one model at a time."""

    def session(self, worker: int, model: str) -> AbstractAsyncContextManager[ServedModel]:
        """`model`, loaded on `worker` while the context is open.

        Raises EngineError, ConfigError and OSError where it cannot be loaded.
        """
        ...


@dataclass(frozen=True, slots=True)
class Watch:
    """What is told while sessions run: each output, each session that ended, and lines of text."""

    output: Callable[[Output], None]
    session: Callable[[Session], None]
    tell: Callable[[str], None] = log.info


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
        self._experts = experts
        self._prompts = prompts
        self._workers = workers
        self._watch = watch
        self._at_once = at_once
        self._clock = clock
        self._places: Places | None = None
        self._changed = asyncio.Condition()

    async def run(self, plan: Plan, workers: int) -> None:
        """Every prompt of the plan is answered, or has an output that says why not.

        Raises what the watch raises, in a group. Cancelled, or with such an error, no session is left open.
        """
        self._places = places = Places(self._experts, self._prompts, plan, workers)
        begun_s = self._clock()
        async with asyncio.TaskGroup() as tasks:
            for worker in range(workers):
                tasks.create_task(self._work(places, worker, begun_s), name=f"worker {worker}")

    @property
    def left_s(self) -> float:
        """How long the rest will take, as far as costs tell."""
        return self._places.left_s if self._places else 0.0

    async def _work(self, places: Places, worker: int, run_begun_s: float) -> None:
        while share := await self._next(places, places[worker]):
            begun_s = self._clock() - run_begun_s
            if done := await self._session(places, worker, share):
                self._watch.session(Session(worker, share.model, done, begun_s, self._clock() - run_begun_s))

    async def _next(self, places: Places, place: Place) -> Share | None:
        """What this worker does next; None when nobody has anything left that could fail."""
        async with self._changed:
            place.running = None
            self._changed.notify_all()
            await self._changed.wait_for(lambda: place.queue or not places.busy)
            return place.begin() if place.queue else None

    async def _session(self, places: Places, worker: int, share: Share) -> int:
        """How many of the share's prompts have an output; the others are handed on."""
        async with AsyncExitStack() as stack:
            try:
                model = await stack.enter_async_context(self._workers.session(worker, share.model))
            except (EngineError, ConfigError, OSError) as error:
                taken = places.not_loaded(worker, share)
                self._told(worker, share.model, share.prompts, str(error), taken)
                return 0
            self._watch.tell(f"worker {worker}: {share.model} answers {len(share.prompts)} prompts")
            left, failure = await self._answer(model, places[worker], share)
        done = len(share.prompts) - len(left)
        if done:
            places.worked(share.model)
        if left:
            taken = places.not_answered(worker, share, left)
            self._told(worker, share.model, left, failure, taken)
        return done

    async def _answer(self, model: ServedModel, place: Place, share: Share) -> Left:
        """What stays without an output.

        After a barren session, those that may have been with its engine come first, one by one, and one more. Of
        them, the one that an engine does not answer that has answered others is to blame.
        """

        def heard(output: Output) -> None:
            place.left -= 1
            self._watch.output(output)

        suspects = share.prompts[: self._at_once + 1] if share.barren else ()
        rest = share.prompts[len(suspects) :]
        left, failure = await one_by_one(model, suspects, heard)
        if not left:
            return await in_rounds(model, rest, self._at_once, heard)
        first, *others = left
        if len(left) == len(suspects):  # the engine may be at fault: next time it is asked another one first
            return [*others, first, *rest], failure
        heard(first.failed(failure))
        return [*others, *rest], failure

    def _told(self, worker: int, model: str, left: Sequence[Prompt], failure: str, taken: bool) -> None:
        """Log a failure; prompts that nobody takes get an output with it."""
        told = f"worker {worker}: {len(left)} prompts of {model} were not answered: {failure}"
        if taken:
            log.warning("%s They are asked again.", told)
            return
        log.error("%s They are given up.", told)
        for prompt in left:
            self._watch.output(prompt.failed(failure))
