"""Sessions: a worker loads a model, which answers its share of the prompts.

The prompts that a failed session leaves go to the other workers. A model that does not load, or
never answers, is given up: its prompts get outputs with the error, and all else goes on. If an
engine dies without any answer, its prompts are asked one by one, so that a prompt that kills
engines is found and costs only itself.
"""

import asyncio
import logging
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Literal, Protocol, TypeVar, get_args

from shell_router.batch.journal import Output, Role
from shell_router.batch.planner import BatchPlan, Session, Workload
from shell_router.batch.profile import Load, ModelProfile, SessionRun, fit_profile
from shell_router.batch.prompts import BatchPrompt
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
"""Why a prompt leaves its planned worker: an idle one took it, or the rest was planned again."""
OnOutput = Callable[[Output], Awaitable[None]]
Left = tuple[Sequence[BatchPrompt], str]
"""Prompts without an output, and the error of one of them."""

CLIENT_ERRORS = frozenset(range(400, 500)) - {408, 429}
"""Statuses with which an engine refuses a prompt; with 408 and 429 it would refuse any."""
SPANNING = -1
"""The worker that spans the GPUs of all others."""


class Workers(Protocol):
    """Workers that hold one model at a time."""

    def session(
        self, worker: int, model: str
    ) -> AbstractAsyncContextManager[tuple[ServedModel, Load]]:
        """Load `model` on `worker` while the context is open; its engine may stay up after it.

        Raises EngineError, ConfigError and OSError if it cannot be loaded.
        """


@dataclass(frozen=True, slots=True)
class Spanning:
    """The worker that spans the GPUs of `workers`, as their only one."""

    workers: Workers

    def session(
        self, _worker: int, model: str
    ) -> AbstractAsyncContextManager[tuple[ServedModel, Load]]:
        """Open a session; see `Workers`."""
        return self.workers.session(SPANNING, model)


Planner = Callable[[Workload], BatchPlan | Awaitable[BatchPlan]]
"""A planner that is no coroutine blocks the event loop while it plans."""


async def make_plan(planner: Planner, workload: Workload) -> BatchPlan:
    """Return the planner's plan. Raises the planner's errors."""
    plan = planner(workload)
    if isinstance(plan, BatchPlan):
        return plan
    return await plan


@dataclass(frozen=True, slots=True)
class Replanning:
    """The rule by which the rest is planned again.

    Attributes:
        planner: The planner of the rest.
        capacity: Models that a worker loads at most by one plan.
        bound: The share of its planned time by which a session may be off.
        first_s: Seconds that a worker's first load takes longer.
    """

    planner: Planner
    capacity: int
    bound: float
    first_s: float = 0.0


MIN_GAIN = 0.05
"""A new plan must shorten the rest by this share: moved prompts cost loads, which may fail."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The sessions of the proposers or the aggregator, as planned and as they were."""

    role: Role
    plan: BatchPlan
    sessions: tuple[Session, ...] = ()
    moved: Mapping[Move, int] = field(default_factory=dict)
    """How many prompts left their planned workers."""

    @property
    def measured(self) -> BatchPlan:
        """The sessions as they were, in the form of a plan."""
        return BatchPlan(f"{self.plan.method}, measured", self.sessions, 0.0)


class Follow:
    """A follower that a batch calls as it goes on; this one logs lines of text."""

    def on_stage(self, stage: Stage, sessions: "Sessions") -> None:
        """Take note that a stage is planned and its sessions are about to run."""

    def on_output(self, output: Output) -> None:
        """Take note that an output is on disk."""

    def on_load(self, load: Load, seconds: float) -> None:
        """Take note that a worker has loaded a model."""

    def on_move(self, why: Move, prompts: int) -> None:
        """Take note that prompts go to another worker than the plan's."""

    def on_progress(self, line: str) -> None:
        """Log a line for a person."""
        log.info("%s", line)


@dataclass(slots=True)
class Sessions:
    """The sessions of all workers, which run what is queued for them.

    Attributes:
        queues: The workers' queues.
        workers: The workers.
        write: Awaited with each output.
        follow: Called with loads, moves and lines of text.
        concurrency: Prompts of a session that an engine has at a time.
        clock: Monotonic seconds.
        replanning: When to plan again; with None a prompt leaves its worker only if that fails.
        moved: How many prompts left their planned workers.
    """

    queues: WorkerQueues
    workers: Workers
    write: OnOutput
    follow: Follow
    concurrency: int
    clock: Clock
    replanning: Replanning | None = None
    moved: Counter[Move] = field(default_factory=Counter)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _ended: list[Session] = field(default_factory=list)
    _is_planning: bool = False

    async def run(self) -> tuple[Session, ...]:
        """Run all queues; afterwards each prompt has an output, which may be an error.

        Returns the sessions as they were, by worker and time. An error of a callback ends the run,
        in a group. Then, and when cancelled, no session stays open.
        """
        run_begun_s = self.clock()
        async with asyncio.TaskGroup() as tasks:
            for worker in range(len(self.queues)):
                tasks.create_task(self._work(worker, run_begun_s), name=f"worker {worker}")
        return tuple(sorted(self._ended, key=attrgetter("worker", "begin_s")))

    async def _work(self, worker: int, run_begun_s: float) -> None:
        while share := await self._begin_next(self.queues[worker]):
            begun_s = self.clock() - run_begun_s
            done = await self._run_session(worker, share)
            if done:
                ended_s = self.clock() - run_begun_s
                self._ended.append(Session(worker, share.model, done, begun_s, ended_s))

    async def _begin_next(self, queue: WorkerQueue) -> Share | None:
        """Begin the worker's next share; None once no worker has any left that could fail."""
        async with self._changed:
            queue.end()
            self._changed.notify_all()
            await self._changed.wait_for(lambda: queue.shares or not self.queues.busy)
            return queue.begin_next()

    async def _run_session(self, worker: int, share: Share) -> int:
        """Run a session with the share, and with what the worker takes from others meanwhile.

        Prompts that it leaves unanswered are queued elsewhere. Returns how many have an output.
        """
        queue = self.queues[worker]
        is_first = not queue.loads
        async with AsyncExitStack() as stack:
            begun_s = self.clock()
            try:
                model, load = await stack.enter_async_context(
                    self.workers.session(worker, share.model)
                )
            except (EngineError, ConfigError, OSError) as error:
                await self._reassign_unloaded(worker, share, str(error))
                return 0
            load_s = self.clock() - begun_s
            queue.loads += 1
            self.follow.on_load(load, load_s)
            self.follow.on_progress(
                f"worker {worker}: {share.model} answers {queue.left} prompts ({load} in "
                f"{load_s:.1f} s)"
            )
            starts_engine = is_first and self.replanning is not None and self.replanning.first_s
            is_planned_load = load != "model kept" and not starts_engine
            planned_load_s = load_s if is_planned_load else None
            done, share, left = await self._answer_shares(worker, model, share, planned_load_s)
        if left[0]:
            is_reassigned = self.queues.reassign_unanswered(
                worker, share, left[0], answered=queue.answered > 0
            )
            await self._report(worker, share.model, left, is_reassigned)
        return done

    async def _reassign_unloaded(self, worker: int, share: Share, failure: str) -> None:
        waiting = self.queues[worker].end()
        if not share.failed_sessions:
            share = replace(share, prompts=waiting)
        is_reassigned = self.queues.reassign_unloaded(worker, share)
        if share.prompts:
            await self._report(worker, share.model, (share.prompts, failure), is_reassigned)

    async def _answer_shares(
        self, worker: int, model: ServedModel, share: Share, load_s: float | None
    ) -> tuple[int, Share, Left]:
        """Answer the share, and further ones of its model for as long as there are any.

        Args:
            worker: The worker that has the model loaded.
            model: The loaded model.
            share: The share to begin with.
            load_s: Seconds of the load, if the plan counted them.

        Returns:
            How many prompts have an output, the last share, and what it left unanswered.
        """
        queue = self.queues[worker]
        done = 0
        while True:
            begun_s = self.clock()
            queue.since_s = begun_s
            left = await self._answer(model, queue, share)
            done += queue.answered
            if queue.answered:
                self.queues.answering.add(share.model)
            if left[0]:
                return done, share, left
            run_s = self.clock() - begun_s
            queue.since_s = None
            if self.replanning is not None:
                await self._replan_if_off(self.replanning, worker, load_s, run_s)
                load_s = None  # further shares need no load
            following = queue.begin_next(share.model) or self._steal(worker, share.model)
            if following is None:
                return done, share, left
            share = following

    async def _replan_if_off(
        self, replanning: Replanning, worker: int, load_s: float | None, run_s: float
    ) -> None:
        """Plan the rest again if the session, which took `run_s`, or a running one is off the plan.

        The other workers go on by the old plan meanwhile. A new plan that takes too long is
        dropped.
        """
        is_off = self.queues.record_session(worker, load_s, run_s, replanning.bound)
        is_running_off = self.queues.compare_running(self.clock(), replanning.bound)
        if self._is_planning or not (is_off or is_running_off):
            return
        rest, before = self.queues.build_rest(replanning.capacity, replanning.first_s)
        if not rest.active_models:
            return
        left_s = self.queues.left_s
        plan = await self._plan_rest(replanning, rest, replanning.bound * left_s)
        if plan is None:
            return
        # a plan leaves out workers that get nothing more
        ready_s = [rest.ready_s[n] for n in range(len(before)) if self.queues[n].loads]
        rest_s = max(plan.makespan_s, *ready_s)
        if rest_s >= (1 - MIN_GAIN) * left_s:
            return
        moved = self.queues.apply_plan(plan, before)
        if moved:
            self.follow.on_progress(
                f"sessions took longer or shorter than planned: {moved} prompts go to other "
                f"workers, and the rest takes about {rest_s:.0f} s instead of {left_s:.0f} s"
            )
            self._count_moves("replanned", moved)
            async with self._changed:
                self._changed.notify_all()

    async def _plan_rest(
        self, replanning: Replanning, rest: Workload, limit_s: float
    ) -> BatchPlan | None:
        """Return a plan of the rest; None if that fails or takes longer than `limit_s`."""
        self._is_planning = True
        try:
            async with asyncio.timeout(limit_s):
                return await make_plan(replanning.planner, rest)
        except TimeoutError:
            log.info("The rest is not planned again: planning took too long")
        except ShellRouterError as error:
            log.warning("The rest is not planned again: %s", error)
        finally:
            self._is_planning = False
        return None

    def _steal(self, worker: int, model: str) -> Share | None:
        """Begin other workers' prompts of the model on an idle worker, which needs no load."""
        if self.replanning is None or self.queues[worker].shares:
            return None
        stolen = self.queues.steal_prompts(worker, model)
        if stolen is None:
            return None
        share, other = stolen
        count = len(share.prompts)
        self.follow.on_progress(
            f"worker {worker}: takes {count} prompts of {model} from worker {other}"
        )
        self._count_moves("taken", count)
        return share

    def _count_moves(self, why: Move, prompts: int) -> None:
        self.moved[why] += prompts
        self.follow.on_move(why, prompts)

    async def _answer(self, model: ServedModel, queue: WorkerQueue, share: Share) -> Left:
        """Answer a share, and return the prompts without an output.

        After a session without any answer the engine gets prompts one by one: those that may have
        been with it, and one more. If it answers some and then fails, the prompt of that moment is
        to blame and becomes an error.
        """

        async def on_output(output: Output) -> None:
            queue.answered += 1
            queue.left -= 1
            await self.write(output)

        suspects: Sequence[BatchPrompt] = ()
        if share.failed_sessions:
            suspects = share.prompts[: self.concurrency + 1]
        rest = share.prompts[len(suspects) :]
        left, failure = await answer_one_by_one(model, suspects, on_output)
        if left:
            first, *others = left
            if len(left) == len(suspects):
                # the engine may be at fault: next time another prompt comes first
                return [*others, first, *rest], failure
            await on_output(first.fail(failure))
            return [*others, *rest], failure
        if share.failed_sessions:
            queue.waiting.extend(rest)
        return await answer_in_rounds(model, queue.waiting, self.concurrency, on_output)

    async def _report(self, worker: int, model: str, left: Left, is_reassigned: bool) -> None:
        """Log a failure; prompts that no worker takes get an output with it."""
        prompts, failure = left
        reason = f"worker {worker}: {len(prompts)} prompts of {model} were not answered: {failure}"
        if is_reassigned:
            log.warning("%s They are asked again.", reason)
            return
        log.error("%s They are given up.", reason)
        for prompt in prompts:
            await self.write(prompt.fail(failure))


async def answer_in_rounds(
    model: ServedModel, waiting: deque[BatchPrompt], concurrency: int, on_output: OnOutput
) -> Left:
    """Answer prompts, `concurrency` at a time.

    Those that failed are tried again for as long as a round answers some. During the first round
    other workers may take prompts from the end of `waiting`. Returns the prompts without an output,
    in their order.
    """
    order = tuple(waiting)
    while True:
        failed, answered = await _ask_each(model, waiting, concurrency, on_output)
        left = [prompt for prompt in order if prompt in failed] if failed else []
        if not left:
            return [], ""
        if not answered:
            return left, failed[left[0]]
        waiting = deque(left)


async def answer_one_by_one(
    model: ServedModel, prompts: Sequence[BatchPrompt], on_output: OnOutput
) -> Left:
    """Answer prompts one after the other, up to the first that fails; return it and the rest."""
    for number, prompt in enumerate(prompts):
        try:
            output = await answer_prompt(model, prompt)
        except EngineError as error:
            return prompts[number:], str(error)
        await on_output(output)
    return [], ""


async def _ask_each(
    model: ServedModel, waiting: deque[BatchPrompt], concurrency: int, on_output: OnOutput
) -> tuple[dict[BatchPrompt, str], int]:
    """Ask each prompt once; return the errors of those that failed and the number of others."""
    failed: dict[BatchPrompt, str] = {}
    answered = 0

    async def ask() -> None:
        nonlocal answered
        while waiting:
            prompt = waiting.popleft()
            try:
                output = await answer_prompt(model, prompt)
            except EngineError as error:
                failed[prompt] = str(error)
                continue
            answered += 1
            await on_output(output)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(waiting))):
            tasks.create_task(ask())
    return failed, answered


async def answer_prompt(model: ServedModel, prompt: BatchPrompt) -> Output:
    """Have the model answer a prompt.

    A prompt that the chat template or the engine refuses gets an output with the error. Raises
    other EngineErrors.
    """
    texts: list[str] = []
    confidence = Confidence()
    try:
        messages = prompt.messages
        if prompt.role == "aggregator":
            quote = model.tokenizer.control.quote
            messages = [{**turn, "content": quote(turn["content"])} for turn in messages]
        ids = await encode_text(model.tokenizer, model.tokenizer.render_chat(messages))
        new_tokens = prompt.sampling["max_new_tokens"]
        if len(ids) + new_tokens > model.context_length:
            return prompt.fail(
                f"A prompt of {len(ids)} tokens and {new_tokens} new ones are more than the "
                f"{model.context_length} that {model.alias!r} takes. Shorten the question, or "
                "lower max_new_tokens."
            )
        request = Generation(uuid.uuid4().hex, ids, prompt.sampling, logprobs=True)
        async with aclosing(model.engine.generate(request)) as stream:
            async for item in stream:
                if isinstance(item, Finish):
                    return Output(
                        *prompt.key,
                        text="".join(texts),
                        confidence=confidence.value or 0.0,
                        prompt_tokens=item.prompt_tokens,
                        completion_tokens=item.completion_tokens,
                    )
                texts.append(item.text)
                confidence.add(item.logprobs)
    except (InvalidRequest, ConfigError) as error:
        return prompt.fail(str(error))
    except EngineRejected as error:
        if error.status in CLIENT_ERRORS:
            return prompt.fail(str(error))
        raise
    raise EngineError(f"The stream of a prompt on {model.alias!r} ended without its last event.")


async def load_on_workers(
    model: str,
    workers: Workers,
    count: int,
    clock: Clock,
    use: Callable[[int, ServedModel], Awaitable[None]] | None = None,
) -> tuple[float, Load]:
    """Load the model on `count` workers at the same time, and await `use` on each.

    Returns the mean seconds of a load and its end, and the dearest kind of load. Raises
    EngineError.
    """
    loads_s: list[float] = []
    kinds: list[Load] = []

    async def load_on(worker: int) -> None:
        begun_s = clock()
        async with workers.session(worker, model) as (loaded, kind):
            load_s = clock() - begun_s
            if use is not None:
                await use(worker, loaded)
            begun_s = clock()
        loads_s.append(load_s + clock() - begun_s)
        kinds.append(kind)

    async def load_on_all() -> None:
        async with asyncio.TaskGroup() as tasks:
            for worker in range(count):
                tasks.create_task(load_on(worker))

    await unwrap_errors(load_on_all())
    return sum(loads_s) / count, min(kinds, key=get_args(Load).index)


async def profile_model(
    model: str,
    prompts: Sequence[BatchPrompt],
    sizes: Sequence[int],
    workers: Workers,
    count: int,
    concurrency: int,
    clock: Clock,
) -> tuple[ModelProfile, list[Output], Load]:
    """Time sessions of all `sizes` of the model on `count` workers.

    All workers begin each size at the same time, as in a batch, with up to `concurrency` prompts in
    flight. Each prompt is asked once, as engines cache those that they have seen.

    Returns:
        The profile, the model's outputs, and how it was loaded.

    Raises:
        ConfigError: The sizes or prompts are too few.
        EngineError: The model fails to load, or to answer a prompt.
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
        f"questions, and there are {len(prompts)}.",
        "Name a file with more questions, or smaller --sizes.",
    )
    runs: list[SessionRun] = []
    outputs: list[Output] = []
    all_ready = asyncio.Barrier(count)

    async def time_sizes(worker: int, loaded: ServedModel) -> None:
        begin = worker * sum(sizes)
        for size in sizes:
            await all_ready.wait()
            share = prompts[begin : begin + size]
            begin += size
            run, share_outputs = await _time_session(loaded, share, concurrency, clock)
            runs.append(run)
            outputs.extend(share_outputs)
        await all_ready.wait()

    load_s, kind = await load_on_workers(model, workers, count, clock, time_sizes)
    return fit_profile(runs, load_s), outputs, kind


async def _time_session(
    model: ServedModel, prompts: Sequence[BatchPrompt], concurrency: int, clock: Clock
) -> tuple[SessionRun, list[Output]]:
    """Answer prompts; raise EngineError unless all have an answer."""
    outputs: list[Output] = []

    async def keep(output: Output) -> None:
        outputs.append(output)

    begun_s = clock()
    failed, _ = await _ask_each(model, deque(prompts), concurrency, keep)
    run_s = clock() - begun_s
    errors = [*failed.values(), *(output.error for output in outputs if output.error)]
    if errors:
        raise EngineError(f"{model.alias} did not answer {len(errors)} questions: {errors[0]}")
    tokens = [output.completion_tokens for output in outputs]
    return SessionRun(len(prompts), sum(tokens) / len(tokens), max(tokens), run_s), outputs


async def unwrap_errors(work: Awaitable[T]) -> T:
    """Await `work`; raise the first error itself of a group that has only ShellRouterErrors."""
    try:
        return await work
    except BaseExceptionGroup as group:
        if group.split(ShellRouterError)[1] is not None:
            raise
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
