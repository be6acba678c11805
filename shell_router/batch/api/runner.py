"""What answers a batch's lines: chat completions, or the pools that they name as their model."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shell_router.api import Services
from shell_router.api.chat import Chats
from shell_router.api.fields import Fields
from shell_router.api.replies import INTERNAL, is_retryable, problem_body, problem_of
from shell_router.app.topologies import load_topologies
from shell_router.batch.api.lines import BatchLine, Keep, LineResult
from shell_router.batch.api.storage import BatchRecord
from shell_router.batch.pool import Pool, load_pool
from shell_router.batch.pool_run import run_pool
from shell_router.batch.profile import Load
from shell_router.batch.prompts import Result
from shell_router.batch.questions import Question, Questions
from shell_router.batch.run import Follow, plan_apart
from shell_router.batch.sessions import Move
from shell_router.config import Config
from shell_router.errors import ConfigError, EngineError, InvalidField, ShellRouterError
from shell_router.telemetry.metrics import Metrics

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""An engine that died is started again, and loads its model, within about two minutes."""

log = logging.getLogger(__name__)


class ChatLines:
    """Runs each line as the chat completion that an online client would have asked for.

    Of all batches together `concurrency` lines run at once, shared out among them in turn. They do
    not count as running requests, so no online request is refused for them. Lines that name one of
    `pools` as their model are answered by it when all others are: a pool plans all its lines at
    once.
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
        self._metrics = chats.services.metrics
        self._concurrency = concurrency
        self._pools = pools
        self._slots = asyncio.Semaphore(concurrency)
        self._pauses_s = pauses_s
        self._sleep = sleep

    async def run(self, batch: BatchRecord, lines: AsyncIterator[BatchLine], keep: Keep) -> None:
        """Return once the results of all that are not answered have been kept. Cancelled, it leaves
        nothing running.

        What `keep` raises ends it. A line that fails has a result that says so.
        """
        ahead = asyncio.Semaphore(self._concurrency)  # a batch holds no more lines than could run
        pooled: dict[str, dict[Question, BatchLine]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                async for line in lines:
                    model = line.body.get("model")
                    if isinstance(model, str) and model in self._pools:
                        question = _question(line)
                        if isinstance(question, Question):
                            pooled.setdefault(model, {})[question] = line
                        elif not line.is_answered:
                            await keep(refused(line, self._chats.services.new_id(), question))
                    elif not line.is_answered:
                        await ahead.acquire()
                        answering = group.create_task(self._answer(batch.tenant, line, keep))
                        answering.add_done_callback(lambda _: ahead.release())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        for name, asked in pooled.items():
            await self._pools[name].run(batch.id, asked, keep)

    async def _answer(self, tenant: str, line: BatchLine, keep: Keep) -> None:
        """An engine that is away for a while fails no line; meanwhile other batches' lines run."""
        result, retryable = await self._attempt(tenant, line)
        for pause_s in self._pauses_s:
            if not retryable:
                break
            await self._sleep(pause_s)
            result, retryable = await self._attempt(tenant, line)
        await keep(result)

    async def _attempt(self, tenant: str, line: BatchLine) -> tuple[LineResult, bool]:
        """The result, and whether another attempt may succeed."""
        request_id = self._chats.services.new_id()
        async with self._slots:
            with self._metrics.running_batch_lines.track_inprogress():
                try:
                    run, frames = await self._chats.begin(Fields(line.body), tenant)
                    body = frames.whole(await run.answer())
                except Exception as error:
                    return refused(line, request_id, error), is_retryable(error)
        return LineResult(line.custom_id, request_id, 200, body), False


def refused(line: BatchLine, request_id: str, error: Exception) -> LineResult:
    """The result of a line whose request fails so: the answer that an online client would have
    had."""
    problem = problem_of(error)
    if problem is INTERNAL:
        log.error("request %s: line %d of a batch failed", request_id, line.number, exc_info=error)
    return LineResult(line.custom_id, request_id, problem.status, problem_body(error, request_id))


KNOWN = {"model", "messages", "user", "metadata"}


def loaded_pools(config: Config) -> dict[str, Pool]:
    """The pools of a deployment. Raises ConfigError, also where batches are off or a name is
    taken."""
    if config.batches.pools:
        topologies = load_topologies(config)
    else:
        topologies = {}
    for name in config.batches.pools:
        if name in config.models or name in topologies:
            if name in config.models:
                kind = "model"
            else:
                kind = "topology"
            raise ConfigError(
                f"batches.pools: {name!r} is a {kind}.", remedy="Give the pool another name."
            )
    return {name: load_pool(file) for name, file in config.batches.pools.items()}


@dataclass(frozen=True, slots=True)
class PoolLines:
    """Answers lines by one pool, whose workers take one run at a time.

    A batch's run stays in `folder`, under the batch's id.
    """

    name: str
    pool: Pool
    folder: Path
    services: Services
    _busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, batch_id: str, asked: Mapping[Question, BatchLine], keep: Keep) -> None:
        """Return once the results of all that are not answered have been kept.

        Cancelled, it goes on where it was with all that the batch has `asked`, whatever is answered
        by then.
        """
        left = await asyncio.to_thread(
            lambda: {one.custom_id: one for one in asked.values() if not one.is_answered}
        )
        if left:
            async with self._busy:  # an id stands for its input, which never changes
                await self._answer(Questions(tuple(asked), (), batch_id), left, keep)

    async def _answer(
        self, questions: Questions, left: Mapping[str, BatchLine], keep: Keep
    ) -> None:
        folder = self.folder / questions.fingerprint / self.name
        log.info("pool %s: %d lines of %s", self.name, len(left), questions.fingerprint)
        try:
            done = await run_pool(
                self.pool, questions, folder, plan_apart, _Measured(self.services.metrics)
            )
        except ShellRouterError as error:
            log.error("pool %s: %s", self.name, error)
            for line in left.values():
                await keep(
                    refused(
                        line,
                        self.services.new_id(),
                        EngineError(f"The pool could not run: {error}"),
                    )
                )
            return
        for result in await asyncio.to_thread(
            lambda: [one for one in done.results if one.id in left]
        ):
            line = left[str(result.id)]
            request_id = self.services.new_id()
            if result.by == "none":
                await keep(refused(line, request_id, EngineError(result.error)))
            else:
                await keep(
                    LineResult(
                        line.custom_id, request_id, 200, self._completion(request_id, result)
                    )
                )

    def _completion(self, request_id: str, result: Result) -> dict[str, Any]:
        """A chat completion; `pool` says whose answer it is and how far the proposers agreed."""
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


class _Measured(Follow):
    """Follows a run by metrics and the log."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def on_load(self, load: Load, seconds: float) -> None:
        self._metrics.pool_loads.labels(load).observe(seconds)

    def on_move(self, why: Move, prompts: int) -> None:
        self._metrics.pool_moved.labels(why).inc(prompts)


def _question(line: BatchLine) -> Question | InvalidField:
    """What is asked, or what is wrong with the line: a field that a pool ignores is."""
    for name in line.body:
        if name not in KNOWN:
            return InvalidField(
                f"A pool takes no {name}.", field=name, remedy="Set it in the pool's file."
            )
    messages = line.body.get("messages")
    if isinstance(messages, list) and len(messages) == 1:
        only = messages[0]
    else:
        only = None
    if isinstance(only, dict) and only.get("role") == "user":
        content = only.get("content")
    else:
        content = None
    if not isinstance(content, str) or not content.strip():
        return InvalidField(
            "A pool answers one message of the user, which is text.",
            field="messages",
            remedy="Send one message.",
        )
    return Question(line.custom_id, content, line=line.number)
