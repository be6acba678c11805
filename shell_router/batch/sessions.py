"""Sessions: a worker loads a model, the model answers its share of the prompts, and the worker goes
on to the next.

A session that fails gives what it has not answered to the other workers. A model that does not
load, or never answers, is given up: its prompts become outputs that say why, and everything else
goes on. What an engine held when it died without any answer is asked one by one, so that a prompt
that kills engines is found and costs only itself.
"""

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar, get_args

from shell_router.batch.journal import Output
from shell_router.batch.planner import Plan, Session, Workload
from shell_router.batch.profile import Load, ModelProfile, SessionRun, profile_of
from shell_router.batch.prompts import Prompt
from shell_router.batch.queues import Share, WorkerQueue, WorkerQueues
from shell_router.core.engine import Finish, Generation, ServedModel
from shell_router.early_exit.algorithm1 import Confidence
from shell_router.errors import (
    ConfigError,
    EngineError,
    EngineRejected,
    InvalidRequest,
    ShellRouterError,
    require,
)
from shell_router.moa.prompt import encode_text

log = logging.getLogger(__name__)
T = TypeVar("T")

Clock = Callable[[], float]
Move = Literal["taken", "replanned"]
"""Why a prompt is answered by another worker than the plan's: an idle one took it, or the rest was
planned again.
"""
OnOutput = Callable[[Output], Awaitable[None]]
Left = tuple[list[Prompt], str]
"""Prompts that stay without an output, and the error of one of them."""


CLIENT_ERRORS = frozenset(range(400, 500)) - {408, 429}
"""Statuses by which an engine refuses this prompt; with 408 and 429 it refuses any."""
SPANNING = -1
"""The worker that spans the GPUs of all others."""


class Workers(Protocol):
    """Workers that hold one model at a time."""

    def session(
        self, worker: int, model: str
    ) -> AbstractAsyncContextManager[tuple[ServedModel, Load]]:
        """`model`, loaded on `worker` while the context is open. Its engine may stay up for the
        next one.

        Raises EngineError, ConfigError and OSError where it cannot be loaded.
        """
        ...


@dataclass(frozen=True, slots=True)
class Spanning:
    """Of some workers the one that spans all of them, as their only one."""

    workers: Workers

    def session(
        self, _worker: int, model: str
    ) -> AbstractAsyncContextManager[tuple[ServedModel, Load]]:
        """See `Workers`."""
        return self.workers.session(SPANNING, model)


Planner = Callable[[Workload], Plan | Awaitable[Plan]]
"""One that is no coroutine holds up the event loop while it plans."""


async def planned(planner: Planner, workload: Workload) -> Plan:
    """The planner's plan. Raises what it raises."""
    made = planner(workload)
    if isinstance(made, Plan):
        return made
    return await made


@dataclass(frozen=True, slots=True)
class Replanning:
    """When the rest is planned again: a session takes more than `bound` longer or shorter than
    planned, as a share.

    `capacity` is what a worker loads at most by one plan. The first load of a worker takes
    `first_s` longer.
    """

    planner: Planner
    capacity: int
    bound: float
    first_s: float = 0.0


WORTH = 0.05
"""A new plan is followed if it shortens the rest by more than this share: moving prompts costs
loads that may fail.
"""


class Sessions:
    """Runs what is queued for the workers.

    `on_output` is awaited with each output, `on_progress` called with each line of text, `on_load`
    with a load and its seconds, `on_move` with prompts that go to another worker.

    At most `concurrency` prompts of a session are with the engine at the same time. `clock` is
    monotonic seconds. Without `replanning` each prompt stays with its worker unless that fails.
    """

    def __init__(
        self,
        queues: WorkerQueues,
        workers: Workers,
        on_output: OnOutput,
        on_progress: Callable[[str], None],
        on_load: Callable[[Load, float], None],
        on_move: Callable[[Move, int], None],
        *,
        concurrency: int,
        clock: Clock,
        replanning: Replanning | None = None,
    ) -> None:
        self._queues = queues
        self._workers = workers
        self._on_output = on_output
        self._on_progress = on_progress
        self._on_load = on_load
        self._on_move = on_move
        self._concurrency = concurrency
        self._clock = clock
        self._changed = asyncio.Condition()
        self._ended: list[Session] = []
        self._replanning = replanning
        self._is_planning = False

    async def run(self) -> tuple[Session, ...]:
        """Every prompt is answered, or has an output that says why not; the sessions as they were,
        by worker and time.

        Raises what is raised by what it calls, in a group. Cancelled, or with such an error, no
        session is left open.
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
                self._ended.append(
                    Session(worker, share.model, done, begun_s, self._clock() - run_begun_s)
                )

    async def _next(self, queue: WorkerQueue) -> Share | None:
        """What this worker does next; None once no worker has anything left that could fail."""
        async with self._changed:
            queue.end()
            self._changed.notify_all()
            await self._changed.wait_for(lambda: queue.shares or not self._queues.busy)
            return queue.begin()

    async def _session(self, worker: int, share: Share) -> int:
        """How many prompts of the share, and of what is taken from others with it, have an output.

        What is left is handed on.
        """
        queue = self._queues[worker]
        done = 0
        is_first = not self._queues[worker].loads
        async with AsyncExitStack() as stack:
            begun_s = self._clock()
            try:
                model, load = await stack.enter_async_context(
                    self._workers.session(worker, share.model)
                )
            except (EngineError, ConfigError, OSError) as error:
                never_begun = queue.end()
                share = replace(share, prompts=share.prompts if share.barren else never_begun)
                taken = self._queues.not_loaded(worker, share)
                if share.prompts:
                    await self._report(worker, share.model, share.prompts, str(error), taken)
                return 0
            load_s = self._clock() - begun_s
            queue.loads += 1
            self._on_load(load, load_s)
            self._on_progress(
                f"worker {worker}: {share.model} answers {queue.left} prompts ({load} in "
                f"{load_s:.1f} s)"
            )
            following: Share | None = share
            starts = is_first and self._replanning is not None and self._replanning.first_s > 0
            if starts or load == "model kept":
                compared_s = None
            else:
                compared_s = load_s
            while following is not None:
                share = following
                queue.since_s = self._clock()
                left, failure = await self._answer(model, queue, share)
                done += queue.answered
                if queue.answered:
                    self._queues.worked(share.model)
                if left:
                    break
                ran_s = self._clock() - queue.since_s
                queue.since_s = None
                if self._replanning is not None:
                    await self._measured(self._replanning, worker, compared_s, ran_s)
                    compared_s = None  # further shares need no load
                following = queue.begin(share.model) or self._taken(worker, share.model)
        if left:
            taken = self._queues.not_answered(worker, share, left, answered=queue.answered > 0)
            await self._report(worker, share.model, left, failure, taken)
        return done

    async def _measured(
        self, replanning: Replanning, worker: int, load_s: float | None, run_s: float
    ) -> None:
        """A session took `run_s`: if that, or one that runs, is off the plan, have the rest planned
        again.

        Others go on by the old plan meanwhile. A new one that takes too long in the making comes
        too late.
        """
        off = self._queues.measured(worker, load_s, run_s, replanning.bound)
        off = self._queues.off(self._clock(), replanning.bound) or off
        if not off or self._is_planning:
            return
        work, before = self._queues.rest(replanning.capacity, replanning.first_s)
        if not work.asked:
            return
        self._is_planning = True
        left_s = self._queues.left_s
        try:
            async with asyncio.timeout(replanning.bound * left_s):
                plan = await planned(replanning.planner, work)
        except (TimeoutError, ShellRouterError) as error:
            if isinstance(error, TimeoutError):
                level = logging.INFO
            else:
                level = logging.WARNING
            log.log(
                level, "The rest is not planned again: %s", str(error) or "planning took too long"
            )
            return
        finally:
            self._is_planning = False
        begun_s = (
            work.ready_s[worker] for worker in range(len(before)) if self._queues[worker].loads
        )
        rest_s = max(plan.makespan_s, *begun_s)  # a plan leaves out workers that get nothing more
        if rest_s < (1 - WORTH) * left_s and (moved := self._queues.move(plan, before)):
            self._on_progress(
                f"sessions took longer or shorter than planned: {moved} prompts go to other "
                "workers, and the rest takes"
                f" about {rest_s:.0f} s instead of {left_s:.0f} s"
            )
            self._on_move("replanned", moved)
            async with self._changed:
                self._changed.notify_all()

    def _taken(self, worker: int, model: str) -> Share | None:
        """What a worker that has nothing left takes of the model that it holds: this needs no
        load."""
        idle = self._replanning is not None and not self._queues[worker].shares
        if not idle or (taken := self._queues.take(worker, model)) is None:
            return None
        share, other = taken
        self._on_progress(
            f"worker {worker}: takes {len(share.prompts)} prompts of {model} from worker {other}"
        )
        self._on_move("taken", len(share.prompts))
        return share

    async def _answer(self, model: ServedModel, queue: WorkerQueue, share: Share) -> Left:
        """What stays without an output.

        After a barren session, those that may have been with its engine come first, one by one, and
        one more. The one that an engine does not answer which has answered others is to blame.
        """

        async def on_output(output: Output) -> None:
            queue.output()
            await self._on_output(output)

        if share.barren:
            blamed = share.prompts[: self._concurrency + 1]
        else:
            blamed = ()
        rest = share.prompts[len(blamed) :]
        left, failure = await one_by_one(model, blamed, on_output)
        if left:
            first, *others = left
            if len(left) == len(
                blamed
            ):  # the engine may be at fault: next time another prompt comes first
                return [*others, first, *rest], failure
            await on_output(first.failed(failure))
            return [*others, *rest], failure
        if share.barren:
            queue.waiting.extend(rest)
        return await in_rounds(model, queue.waiting, self._concurrency, on_output)

    async def _report(
        self, worker: int, model: str, left: Sequence[Prompt], failure: str, taken: bool
    ) -> None:
        """Log a failure; prompts that no worker takes get an output with it."""
        reason = f"worker {worker}: {len(left)} prompts of {model} were not answered: {failure}"
        if taken:
            log.warning("%s They are asked again.", reason)
            return
        log.error("%s They are given up.", reason)
        for prompt in left:
            await self._on_output(prompt.failed(failure))


async def in_rounds(
    model: ServedModel, waiting: deque[Prompt], concurrency: int, on_output: OnOutput
) -> Left:
    """`concurrency` of them at the same time, and those that failed once more for as long as a
    round answers some.

    What is left stands in the order in which it was given. While the first round runs,
    other workers may take prompts from the end of `waiting`.
    """
    order = tuple(waiting)
    while True:
        failed, answered = await _round(model, waiting, concurrency, on_output)
        if failed:
            left = [prompt for prompt in order if prompt in failed]
        else:
            left = []
        if not (left and answered):
            return left, failed[left[0]] if left else ""
        waiting = deque(left)


async def one_by_one(model: ServedModel, prompts: Sequence[Prompt], on_output: OnOutput) -> Left:
    """One after the other, up to the first that fails."""
    for number, prompt in enumerate(prompts):
        try:
            output = await answered(model, prompt)
        except EngineError as error:
            return list(prompts[number:]), str(error)
        await on_output(output)
    return [], ""


async def _round(
    model: ServedModel, waiting: deque[Prompt], concurrency: int, on_output: OnOutput
) -> tuple[dict[Prompt, str], int]:
    """Ask each once; those that the engine failed to answer, with its errors, and the number of the
    others.
    """
    failed: dict[Prompt, str] = {}
    answered_prompts = 0

    async def ask() -> None:
        nonlocal answered_prompts
        while waiting:
            prompt = waiting.popleft()
            try:
                output = await answered(model, prompt)
            except EngineError as error:
                failed[prompt] = str(error)
                continue
            answered_prompts += 1
            await on_output(output)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(waiting))):
            tasks.create_task(ask())
    return failed, answered_prompts


async def answered(model: ServedModel, prompt: Prompt) -> Output:
    """What the model writes. A prompt that it refuses is an output too; raises other
    EngineErrors."""
    texts: list[str] = []
    confidence = Confidence()
    try:
        ids = await encode_text(model.tokenizer, model.tokenizer.render_chat(prompt.messages))
        new_tokens = prompt.sampling["max_new_tokens"]
        if len(ids) + new_tokens > model.context_length:
            return prompt.failed(
                f"A prompt of {len(ids)} tokens and {new_tokens} new ones are more than the "
                f"{model.context_length} that"
                f" {model.alias!r} takes. Shorten the question, or lower max_new_tokens."
            )
        request = Generation(uuid.uuid4().hex, ids, prompt.sampling, logprobs=True)
        async with aclosing(model.engine.generate(request)) as stream:
            async for item in stream:
                if isinstance(item, Finish):
                    counts = confidence.value or 0.0, item.prompt_tokens, item.completion_tokens
                    return Output(
                        prompt.question, prompt.role, prompt.model, "".join(texts), *counts
                    )
                texts.append(item.text)
                confidence.add(item.logprobs)
    except (InvalidRequest, ConfigError) as error:  # the chat template or the engine refuses it
        return prompt.failed(str(error))
    except EngineRejected as error:
        if error.status in CLIENT_ERRORS:
            return prompt.failed(str(error))
        raise
    raise EngineError(f"The stream of a prompt on {model.alias!r} ended without its last event.")


async def load_on_all(
    model: str,
    workers: Workers,
    count: int,
    clock: Clock,
    use: Callable[[int, ServedModel], Awaitable[None]] | None = None,
) -> tuple[float, Load]:
    """Load the model on `count` workers at the same time, and `use` it there.

    Returns the mean of the seconds of a load and its end, and the dearest kind of load among them.
    Raises EngineError.
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
    """The model's profile from sessions of all `sizes` on all of `count` workers, what it wrote,
    and how it was loaded.

    All workers begin each size at the same time: in a batch all of them are busy, too. As there, a
    session has at most `concurrency` prompts with the engine at the same time. Every prompt is
    asked once: an engine would remember one that it has seen. Raises ConfigError for sizes or
    prompts that are too few, and EngineError where the model fails to load, or to answer one of
    them.
    """
    needed = count * sum(sizes)
    require(
        len(set(sizes)) > 1 and min(sizes) > 0,
        "A model's cost needs sessions of two sizes or more, each of a prompt or more.",
        "Name others, as in --sizes 8,16,32,64.",
    )
    require(
        len(prompts) >= needed,
        f"Sessions of {', '.join(map(str, sizes))} prompts on {count} workers need {needed} "
        "questions, and there are"
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

    async def keep(output: Output) -> None:
        outputs.append(output)

    begun_s = clock()
    failed, _ = await _round(model, deque(prompts), concurrency, keep)
    seconds = clock() - begun_s
    if errors := [*failed.values(), *(output.error for output in outputs if output.error)]:
        raise EngineError(f"{model.alias} did not answer {len(errors)} questions: {errors[0]}")
    tokens = [output.completion_tokens for output in outputs]
    return SessionRun(len(prompts), sum(tokens) / len(tokens), max(tokens), seconds), outputs


async def ungrouped(work: Awaitable[T]) -> T:
    """What `work` returns. Of a group of nothing but ShellRouterErrors the first is raised as it
    is.
    """
    try:
        return await work
    except BaseExceptionGroup as group:
        if group.split(ShellRouterError)[1] is not None:
            raise
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
