"""Sessions: a worker loads a model, the model answers its share of the prompts, and the worker goes on to the next.

A session that fails gives what it has not answered to the other workers. A model that does not load, or never answers,
is given up: its prompts become outputs that say why, and everything else goes on. What an engine held when it died
without any answer is asked one by one, so that a prompt that kills engines is found and costs only itself.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol, TypeVar, get_args

from shell_router.batch.journal import Output
from shell_router.batch.planner import Session
from shell_router.batch.profile import Load, ModelProfile, SessionRun, profile_of
from shell_router.batch.prompts import Prompt, answered
from shell_router.batch.queues import Share, WorkerQueue, WorkerQueues
from shell_router.core.engine import ServedModel
from shell_router.errors import ConfigError, EngineError, ShellRouterError, require

log = logging.getLogger(__name__)
T = TypeVar("T")

Clock = Callable[[], float]
OnOutput = Callable[[Output], None]
Left = tuple[list[Prompt], str]
"""Prompts that stay without an output, and the error of one of them."""


class Workers(Protocol):
    """Workers that hold one model at a time."""

    def session(self, worker: int, model: str) -> AbstractAsyncContextManager[tuple[ServedModel, Load]]:
        """`model`, loaded on `worker` while the context is open. Its engine may stay up for the next one.

        Raises EngineError, ConfigError and OSError where it cannot be loaded.
        """
        ...


class Sessions:
    """Runs what is queued for the workers.

    `on_output` and `on_progress` are called with each output and line of text, `on_load` with a load and its seconds.

    At most `concurrency` prompts of a session are with the engine at the same time. `clock` is monotonic seconds.
    """

    def __init__(
        self,
        queues: WorkerQueues,
        workers: Workers,
        on_output: OnOutput,
        on_progress: Callable[[str], None],
        on_load: Callable[[Load, float], None],
        *,
        concurrency: int,
        clock: Clock,
    ) -> None:
        self._queues = queues
        self._workers = workers
        self._on_output = on_output
        self._on_progress = on_progress
        self._on_load = on_load
        self._concurrency = concurrency
        self._clock = clock
        self._changed = asyncio.Condition()
        self._ended: list[Session] = []

    async def run(self) -> tuple[Session, ...]:
        """Every prompt is answered, or has an output that says why not; the sessions as they were, by worker and time.

        Raises what is raised by what it calls, in a group. Cancelled, or with such an error, no session is left open.
        """
        begun_s = self._clock()
        async with asyncio.TaskGroup() as tasks:
            for worker in range(len(self._queues)):
                tasks.create_task(self._work(worker, begun_s), name=f"worker {worker}")
        return tuple(sorted(self._ended, key=lambda one: (one.worker, one.begin_s)))

    @property
    def left_s(self) -> float:
        """How long the rest will take, by the models' costs."""
        return self._queues.left_s

    async def _work(self, worker: int, run_begun_s: float) -> None:
        while share := await self._next(self._queues[worker]):
            begun_s = self._clock() - run_begun_s
            if done := await self._session(worker, share):
                self._ended.append(Session(worker, share.model, done, begun_s, self._clock() - run_begun_s))

    async def _next(self, queue: WorkerQueue) -> Share | None:
        """What this worker does next; None once no worker has anything left that could fail."""
        async with self._changed:
            queue.running = None
            self._changed.notify_all()
            await self._changed.wait_for(lambda: queue.shares or not self._queues.busy)
            return queue.begin() if queue.shares else None

    async def _session(self, worker: int, share: Share) -> int:
        """How many of the share's prompts have an output; the others are handed on."""
        async with AsyncExitStack() as stack:
            begun_s = self._clock()
            try:
                model, load = await stack.enter_async_context(self._workers.session(worker, share.model))
            except (EngineError, ConfigError, OSError) as error:
                taken = self._queues.not_loaded(worker, share)
                self._report(worker, share.model, share.prompts, str(error), taken)
                return 0
            load_s = self._clock() - begun_s
            self._on_load(load, load_s)
            self._on_progress(
                f"worker {worker}: {share.model} answers {len(share.prompts)} prompts ({load} in {load_s:.1f} s)"
            )
            left, failure = await self._answer(model, self._queues[worker], share)
        done = len(share.prompts) - len(left)
        if done:
            self._queues.worked(share.model)
        if left:
            taken = self._queues.not_answered(worker, share, left)
            self._report(worker, share.model, left, failure, taken)
        return done

    async def _answer(self, model: ServedModel, queue: WorkerQueue, share: Share) -> Left:
        """What stays without an output.

        After a barren session, those that may have been with its engine come first, one by one, and one more. The one
        that an engine does not answer which has answered others is to blame.
        """

        def on_output(output: Output) -> None:
            queue.left -= 1
            self._on_output(output)

        blamed = share.prompts[: self._concurrency + 1] if share.barren else ()
        rest = share.prompts[len(blamed) :]
        left, failure = await one_by_one(model, blamed, on_output)
        if not left:
            return await in_rounds(model, rest, self._concurrency, on_output)
        first, *others = left
        if len(left) == len(blamed):  # the engine may be at fault: next time another prompt comes first
            return [*others, first, *rest], failure
        on_output(first.failed(failure))
        return [*others, *rest], failure

    def _report(self, worker: int, model: str, left: Sequence[Prompt], failure: str, taken: bool) -> None:
        """Log a failure; prompts that no worker takes get an output with it."""
        reason = f"worker {worker}: {len(left)} prompts of {model} were not answered: {failure}"
        if taken:
            log.warning("%s They are asked again.", reason)
            return
        log.error("%s They are given up.", reason)
        for prompt in left:
            self._on_output(prompt.failed(failure))


async def in_rounds(model: ServedModel, prompts: Sequence[Prompt], concurrency: int, on_output: OnOutput) -> Left:
    """`concurrency` of them at the same time, and those that failed once more for as long as a round answers some.

    What is left stands in the order in which it was given.
    """
    left, failure = list(prompts), ""
    while left:
        failed = await _round(model, left, concurrency, on_output)
        if not failed:
            return [], ""
        failure = next(iter(failed.values()))
        if len(failed) == len(left):
            break
        left = [prompt for prompt in left if prompt in failed]
    return left, failure


async def one_by_one(model: ServedModel, prompts: Sequence[Prompt], on_output: OnOutput) -> Left:
    """One after the other, up to the first that fails."""
    for number, prompt in enumerate(prompts):
        try:
            output = await answered(model, prompt)
        except EngineError as error:
            return list(prompts[number:]), str(error)
        on_output(output)
    return [], ""


async def _round(
    model: ServedModel, prompts: Sequence[Prompt], concurrency: int, on_output: OnOutput
) -> dict[Prompt, str]:
    """Ask each once; those that the engine failed to answer, with its errors."""
    failed: dict[Prompt, str] = {}
    slots = asyncio.Semaphore(concurrency)

    async def ask(prompt: Prompt) -> None:
        async with slots:
            try:
                output = await answered(model, prompt)
            except EngineError as error:
                failed[prompt] = str(error)
                return
        on_output(output)

    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts:
            tasks.create_task(ask(prompt))
    return failed


async def load_on_all(
    model: str,
    workers: Workers,
    count: int,
    clock: Clock,
    use: Callable[[int, ServedModel], Awaitable[None]] | None = None,
) -> tuple[float, Load]:
    """Load the model on `count` workers at the same time, and `use` it there.

    Returns the mean of the seconds of a load and its end, and the dearest kind of load among them. Raises EngineError.
    """
    loads_s: list[float] = []
    kinds: list[Load] = []

    async def on(worker: int) -> None:
        begun_s = clock()
        async with workers.session(worker, model) as (loaded, kind):
            load_s = clock() - begun_s
            if use is not None:
                await use(worker, loaded)
            begun_s = clock()
        loads_s.append(load_s + clock() - begun_s)
        kinds.append(kind)

    async def on_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            for worker in range(count):
                tasks.create_task(on(worker))

    await ungrouped(on_all())
    return sum(loads_s) / count, min(kinds, key=get_args(Load).index)


async def profiled(
    model: str,
    prompts: Sequence[Prompt],
    sizes: Sequence[int],
    workers: Workers,
    count: int,
    concurrency: int,
    clock: Clock,
) -> tuple[ModelProfile, list[Output], Load]:
    """The model's profile from sessions of all `sizes` on all of `count` workers, what it wrote, and how it was loaded.

    All workers begin each size at the same time: in a batch all of them are busy, too. As there, a session has at most
    `concurrency` prompts with the engine at the same time. Every prompt is asked once: an engine would remember one
    that it has seen. Raises ConfigError for sizes or prompts that are too few, and EngineError where the model fails to
    load, or to answer one of them.
    """
    needed = count * sum(sizes)
    require(
        len(set(sizes)) > 1 and min(sizes) > 0,
        "A model's cost needs sessions of two sizes or more, each of a prompt or more.",
        "Name others, as in --sizes 8,16,32,64.",
    )
    require(
        len(prompts) >= needed,
        f"Sessions of {', '.join(map(str, sizes))} prompts on {count} workers need {needed} questions, and there are"
        f" {len(prompts)}.",
        "Name a file with more questions, or smaller --sizes.",
    )
    runs: list[SessionRun] = []
    outputs: list[Output] = []
    together = asyncio.Barrier(count)

    async def time(worker: int, loaded: ServedModel) -> None:
        left = prompts[worker * sum(sizes) :]
        for size in sizes:
            await together.wait()
            run, written = await _timed(loaded, left[:size], concurrency, clock)
            runs.append(run)
            outputs.extend(written)
            left = left[size:]
        await together.wait()

    load_s, kind = await load_on_all(model, workers, count, clock, time)
    return profile_of(runs, load_s), outputs, kind


async def _timed(
    model: ServedModel, prompts: Sequence[Prompt], concurrency: int, clock: Clock
) -> tuple[SessionRun, list[Output]]:
    outputs: list[Output] = []
    begun_s = clock()
    errors = [*(await _round(model, prompts, concurrency, outputs.append)).values()]
    seconds = clock() - begun_s
    if errors := [*errors, *(output.error for output in outputs if output.error)]:
        raise EngineError(f"{model.alias} did not answer {len(errors)} questions: {errors[0]}")
    tokens = [output.completion_tokens for output in outputs]
    return SessionRun(len(prompts), sum(tokens) / len(tokens), max(tokens), seconds), outputs


async def ungrouped(work: Awaitable[T]) -> T:
    """What `work` returns. Of a group of nothing but ShellRouterErrors the first is raised as it is."""
    try:
        return await work
    except BaseExceptionGroup as group:
        if group.split(ShellRouterError)[1] is not None:
            raise
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
