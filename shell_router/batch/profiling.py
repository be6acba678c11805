"""Times a model's sessions on live engines, on every worker at the same time: in a batch all of them are busy, too."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from shell_router.batch.answering import Prompt, answered
from shell_router.batch.cost import SessionRun
from shell_router.batch.journal import Output
from shell_router.batch.profile import ModelProfile, profile_of
from shell_router.batch.sessions import Workers
from shell_router.batch.ungrouped import ungrouped
from shell_router.core.model import ServedModel
from shell_router.errors import ConfigError, EngineError

Clock = Callable[[], float]
T = TypeVar("T")


async def profiled(
    model: str,
    prompts: Sequence[Prompt],
    sizes: Sequence[int],
    workers: Workers,
    places: int,
    at_once: int,
    clock: Clock,
) -> tuple[ModelProfile, list[Output]]:
    """The model's profile from sessions of all `sizes` on all of `places` workers, and what it wrote.

    As in a batch, a session has at most `at_once` prompts with the engine at the same time.

    Every prompt is asked once: an engine would remember one that it has seen. Raises ConfigError for sizes or prompts
    that are too few, and EngineError where the model fails to load, or to answer one of them.
    """
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise ConfigError(
            "A model's cost needs sessions of two sizes or more, each of a prompt or more.",
            remedy="Name others, as in --sizes 8,16,32,64.",
        )
    needed = places * sum(sizes)
    if len(prompts) < needed:
        raise ConfigError(
            f"Sessions of {', '.join(map(str, sizes))} prompts on {places} workers need {needed} questions, and there"
            f" are {len(prompts)}.",
            remedy="Name a file with more questions, or smaller --sizes.",
        )
    timed = _Timed(model, sizes, workers, asyncio.Barrier(places), at_once, clock)
    each = needed // places
    await ungrouped(_together(timed.on(place, prompts[place * each : (place + 1) * each]) for place in range(places)))
    return profile_of(timed.runs, sum(timed.loads_s) / places), timed.outputs


class _Timed:
    """The sessions of one model on all workers. The barrier has all of them begin each size together."""

    def __init__(
        self,
        model: str,
        sizes: Sequence[int],
        workers: Workers,
        together: asyncio.Barrier,
        at_once: int,
        clock: Clock,
    ) -> None:
        self._model = model
        self._sizes = sizes
        self._workers = workers
        self._together = together
        self._at_once = at_once
        self._clock = clock
        self.runs: list[SessionRun] = []
        self.loads_s: list[float] = []
        self.outputs: list[Output] = []

    async def on(self, place: int, prompts: Sequence[Prompt]) -> None:
        begun_s = self._clock()
        async with self._workers.session(place, self._model) as model:
            load_s = self._clock() - begun_s
            done = 0
            for size in self._sizes:
                await self._together.wait()
                await self._run(model, prompts[done : done + size])
                done += size
            await self._together.wait()
            begun_s = self._clock()
        self.loads_s.append(load_s + self._clock() - begun_s)

    async def _run(self, model: ServedModel, prompts: Sequence[Prompt]) -> None:
        begun_s = self._clock()
        slots = asyncio.Semaphore(self._at_once)

        async def ask(prompt: Prompt) -> Output:
            async with slots:
                return await answered(model, prompt)

        outputs = await _together(map(ask, prompts))
        seconds = self._clock() - begun_s
        if failed := next((output for output in outputs if output.error), None):
            raise EngineError(f"{self._model} did not answer question {failed.question}: {failed.error}")
        tokens = [output.completion_tokens for output in outputs]
        self.runs.append(SessionRun(len(prompts), sum(tokens) / len(tokens), max(tokens), seconds))
        self.outputs += outputs


async def _together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What they return, in their order; the first error ends the others, and is raised in a group."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(work) for work in works]
    return [task.result() for task in running]
