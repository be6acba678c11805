"""Runners of batch lines: the chat route, and the pools that lines name as their model."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from shell_router.api import Services
from shell_router.api.chat import Chats
from shell_router.api.replies import INTERNAL, is_retryable, problem_body, problem_of
from shell_router.app.topologies import load_topologies
from shell_router.batch.api.lines import BatchLine, Keep, LineResult
from shell_router.batch.api.storage import BatchRecord
from shell_router.batch.pool import Pool, load_pool
from shell_router.batch.pool_run import run_pool
from shell_router.batch.profile import Load
from shell_router.batch.prompts import Result
from shell_router.batch.questions import Question, Questions
from shell_router.batch.run import plan_apart
from shell_router.batch.sessions import Follow, Move
from shell_router.config import Config
from shell_router.errors import (
    AgentFailed,
    AgentTimeout,
    ConfigError,
    EngineAborted,
    EngineError,
    EngineRejected,
    EngineStalled,
    InvalidField,
    ShellRouterError,
)
from shell_router.routing.failures import RETRYABLE_STATUSES
from shell_router.telemetry.metrics import Metrics

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""Pauses between attempts; an engine that died is up again within about two minutes."""

SUSPECT_ATTEMPTS = 3
"""The most attempts at a line that may itself be why engines stall or fail."""

EXPIRY_MARGIN_S = 60.0

log = logging.getLogger(__name__)


class ChatLines:
    """Runs each line as the chat completion of an online client.

    All batches together run `concurrency` lines of a model at once, on what online requests leave
    of their engines (`routing.dispatcher`). No online request waits or is refused for them. Lines
    that name one of `pools` as their model run last, as a pool plans all its lines at once.
    """

    def __init__(
        self,
        chats: Chats,
        concurrency: int,
        pools: Mapping[str, "PoolLines"],
        *,
        pauses_s: Sequence[float] = PAUSES_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._chats = chats
        self._concurrency = concurrency
        self._pools = pools
        # by model or topology, while lines hold them
        self._slots = WeakValueDictionary[str, asyncio.Semaphore]()
        self._pauses_s = pauses_s
        self._sleep = sleep

    async def run(self, batch: BatchRecord, lines: AsyncIterator[BatchLine], keep: Keep) -> None:
        """Answer the lines that have no result yet and await `keep` with each result.

        A line that fails has a result that says so. An error that `keep` raises ends the run.
        """
        # a batch reads no more lines ahead than can run
        ahead = asyncio.Semaphore(self._concurrency)
        pooled: dict[str, dict[Question, BatchLine]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                async for line in lines:
                    model = line.body.get("model")
                    if isinstance(model, str) and model in self._pools:
                        question = _read_question(line)
                        if isinstance(question, Question):
                            pooled.setdefault(model, {})[question] = line
                        elif not line.is_answered:
                            await keep(refuse_line(line, self._chats.services.new_id(), question))
                    elif not line.is_answered:
                        await ahead.acquire()
                        answering = group.create_task(self._answer(batch, line, keep))
                        answering.add_done_callback(lambda _: ahead.release())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        for name, questions in pooled.items():
            await self._pools[name].run(batch.id, questions, keep)

    async def _answer(self, batch: BatchRecord, line: BatchLine, keep: Keep) -> None:
        """Answer a line, again after a pause if the engine failed; other lines run meanwhile."""
        result, most = await self._attempt(batch, line)
        for attempts, pause_s in enumerate(self._pauses_s, 1):
            if attempts >= most:
                break
            await self._sleep(pause_s)
            result, most = await self._attempt(batch, line)
        await keep(result)

    async def _attempt(self, batch: BatchRecord, line: BatchLine) -> tuple[LineResult, float]:
        """Return the result, and the most attempts at a line that ended like this."""
        services = self._chats.services
        request_id = services.new_id()
        target = str(line.body.get("model"))
        slots = self._slots.setdefault(target, asyncio.Semaphore(self._concurrency))
        async with slots:
            with services.metrics.running_batch_lines.track_inprogress():
                try:
                    # it may wait for online requests until its batch expires, and is cancelled
                    limit_s = max(0.0, batch.expires_at - services.wall()) + EXPIRY_MARGIN_S
                    run, frames = await self._chats.begin(
                        line.body, batch.tenant, "batch", timeout_s=limit_s
                    )
                    body = frames.whole(await run.answer())
                except Exception as error:
                    return refuse_line(line, request_id, error), count_attempts(error)
        return LineResult(line.custom_id, request_id, 200, body), 1


def count_attempts(error: BaseException) -> float:
    """Return the most attempts at a line that failed with `error`."""
    if isinstance(error, AgentFailed) and error.__cause__ is not None:
        return count_attempts(error.__cause__)
    if is_retryable(error):
        return inf
    if isinstance(error, EngineRejected):
        passes = error.status in RETRYABLE_STATUSES
    else:
        is_stalled = isinstance(error, EngineStalled) and not isinstance(error, AgentTimeout)
        passes = is_stalled or isinstance(error, EngineAborted)
    return SUSPECT_ATTEMPTS if passes else 1


def refuse_line(line: BatchLine, request_id: str, error: Exception) -> LineResult:
    """Return the result of a line that failed with `error`: the reply to an online client."""
    problem = problem_of(error)
    if problem is INTERNAL:
        log.error("request %s: line %d of a batch failed", request_id, line.number, exc_info=error)
    return LineResult(line.custom_id, request_id, problem.status, problem_body(error, request_id))


POOL_FIELDS = {"model", "messages", "user", "metadata"}


def load_pools(config: Config) -> dict[str, Pool]:
    """Load the pools of a deployment. Raises ConfigError, also for a name that is taken."""
    if not config.batches.pools:
        return {}
    kinds = dict.fromkeys(load_topologies(config), "topology")
    kinds |= dict.fromkeys(config.models, "model")
    for name in config.batches.pools:
        if name in kinds:
            raise ConfigError(
                f"batches.pools: {name!r} is a {kinds[name]}.", remedy="Give the pool another name."
            )
    return {name: load_pool(file) for name, file in config.batches.pools.items()}


@dataclass(frozen=True, slots=True)
class PoolLines:
    """A pool that answers lines, one batch at a time.

    The pool's run of a batch stays in `folder`, under the batch's id.
    """

    name: str
    pool: Pool
    folder: Path
    services: Services
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, batch_id: str, lines: Mapping[Question, BatchLine], keep: Keep) -> None:
        """Answer the lines that have no result yet and await `keep` with each result.

        `lines` holds all the pool's lines of the batch, so that a batch that was interrupted
        continues the pool's run of the same questions.
        """
        left = await asyncio.to_thread(_list_unanswered, lines.values())
        if left:
            async with self._busy:  # a batch's id stands for its input, which never changes
                await self._answer(Questions(tuple(lines), (), batch_id), left, keep)

    async def _answer(
        self, questions: Questions, left: Mapping[str, BatchLine], keep: Keep
    ) -> None:
        folder = self.folder / questions.fingerprint / self.name
        log.info("pool %s: %d lines of %s", self.name, len(left), questions.fingerprint)
        try:
            report = await run_pool(
                self.pool, questions, folder, plan_apart, _MeteredRun(self.services.metrics)
            )
        except ShellRouterError as error:
            log.error("pool %s: %s", self.name, error)
            failure = EngineError(f"The pool could not run: {error}")
            for line in left.values():
                await keep(refuse_line(line, self.services.new_id(), failure))
            return
        for result in report.results:
            if result.id in left:
                await keep(self._build_result(left[str(result.id)], result))

    def _build_result(self, line: BatchLine, result: Result) -> LineResult:
        request_id = self.services.new_id()
        if result.by == "none":
            return refuse_line(line, request_id, EngineError(result.error))
        body = self._build_completion(request_id, result)
        return LineResult(line.custom_id, request_id, 200, body)

    def _build_completion(self, request_id: str, result: Result) -> dict[str, Any]:
        """Build a chat completion; `pool` says whose answer it is and how far proposers agree."""
        message = {"role": "assistant", "content": result.text}
        return {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion",
            "created": int(self.services.wall()),
            "model": self.name,
            "choices": [
                {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
            ],
            "usage": {
                "prompt_tokens": result.prompt_tokens,
                "completion_tokens": result.completion_tokens,
                "total_tokens": result.prompt_tokens + result.completion_tokens,
            },
            "pool": {
                "by": result.by,
                "confidence": result.confidence,
                "error": result.error or None,
            },
        }


class _MeteredRun(Follow):
    """A follower that counts loads and moves in metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def on_load(self, load: Load, seconds: float) -> None:
        self._metrics.pool_loads.labels(load).observe(seconds)

    def on_move(self, why: Move, prompts: int) -> None:
        self._metrics.pool_moved.labels(why).inc(prompts)


def _list_unanswered(lines: Iterable[BatchLine]) -> dict[str, BatchLine]:
    return {line.custom_id: line for line in lines if not line.is_answered}


def _read_question(line: BatchLine) -> Question | InvalidField:
    """Return the line's question, or its error; a field that a pool ignores is one."""
    for name in line.body:
        if name not in POOL_FIELDS:
            return InvalidField(
                f"A pool takes no {name}.", field=name, remedy="Set it in the pool's file."
            )
    match line.body.get("messages"):
        case [{"role": "user", "content": str(content)}] if content.strip():
            return Question(line.custom_id, content, line=line.number)
    return InvalidField(
        "A pool answers one message of the user, which is text.",
        field="messages",
        remedy="Send one message.",
    )
