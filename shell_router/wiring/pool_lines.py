"""Lines of a batch that are answered by a pool: planned, run and gated as `shell-router batch run` does it."""

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from shell_router.api import Services
from shell_router.api.batch.lines import BatchLine, Keep, LineRunner
from shell_router.api.batch.results import LineResult
from shell_router.api.batch.runner import refused
from shell_router.batch.planner import plan
from shell_router.batch.questions import Question, Questions
from shell_router.batch.results import Result
from shell_router.batch.run import Follow
from shell_router.config import Config
from shell_router.config.pool import Pool, load_pool
from shell_router.errors import ConfigError, EngineError, InvalidField, ShellRouterError
from shell_router.wiring.batch import run_pool
from shell_router.wiring.services import load_topologies

log = logging.getLogger(__name__)

KNOWN = {"model", "messages", "user", "metadata"}


def loaded_pools(config: Config) -> dict[str, Pool]:
    """The pools of a deployment. Raises ConfigError, also where batches are off or a name is taken."""
    topologies = load_topologies(config) if config.batches.pools else {}
    for name in config.batches.pools:
        if name in config.models or name in topologies:
            kind = "model" if name in config.models else "topology"
            raise ConfigError(f"batches.pools: {name!r} is a {kind}.", remedy="Give the pool another name.")
    if config.batches.pools and config.batches.folder is None:
        raise ConfigError("batches.pools answer batches, which are off.", remedy="Set batches.folder.")
    return {name: load_pool(file) for name, file in config.batches.pools.items()}


def pool_runners(pools: Mapping[str, Pool], folder: Path, services: Services) -> dict[str, LineRunner]:
    """What answers the lines of each pool."""
    return {
        name: PoolLines(name, pool, folder / "pools", services.new_id, services.wall, asyncio.Lock())
        for name, pool in pools.items()
    }


@dataclass(frozen=True, slots=True)
class PoolLines:
    """The LineRunner of one pool, whose workers take one run at a time.

    A run stays in `folder` until its results are kept. `new_id` gives request ids, `wall` Unix time.
    """

    name: str
    pool: Pool
    folder: Path
    new_id: Callable[[], str]
    wall: Callable[[], float]
    busy: asyncio.Lock

    async def run(self, _tenant: str, lines: AsyncIterator[BatchLine], keep: Keep) -> None:
        """LineRunner.run. Cut off, it goes on with the same lines where it was."""
        asked: dict[str, BatchLine] = {}
        questions: list[Question] = []
        async for line in lines:
            try:
                questions.append(_question(line))
                asked[line.custom_id] = line
            except InvalidField as error:
                await keep(refused(line, self.new_id(), error))
        if questions:
            async with self.busy:
                await self._answer(Questions(tuple(questions), (), _fingerprint(questions)), asked, keep)

    async def _answer(self, questions: Questions, asked: dict[str, BatchLine], keep: Keep) -> None:
        folder = self.folder / f"{self.name}-{questions.fingerprint[:16]}"
        log.info("pool %s: %d lines of a batch", self.name, len(asked))
        try:
            done = await run_pool(self.pool, questions, folder, plan, _FOLLOW)
        except ShellRouterError as error:
            log.error("pool %s: %s", self.name, error)
            for line in asked.values():
                await keep(refused(line, self.new_id(), EngineError(f"The pool could not run: {error}")))
            return
        for result in done.results:
            assert result.id is not None
            await keep(self._line(asked[result.id], result))
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _line(self, line: BatchLine, result: Result) -> LineResult:
        request_id = self.new_id()
        if result.by == "nobody":
            return refused(line, request_id, EngineError(result.error))
        return LineResult(line.custom_id, request_id, 200, self._completion(request_id, result))

    def _completion(self, request_id: str, result: Result) -> dict[str, Any]:
        """A chat completion; `pool` says whose answer it is and how far the experts agreed."""
        message = {"role": "assistant", "content": result.text}
        return {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion",
            "created": int(self.wall()),
            "model": self.name,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": result.prompt_tokens,
                "completion_tokens": result.completion_tokens,
                "total_tokens": result.prompt_tokens + result.completion_tokens,
            },
            "pool": {"by": result.by, "confidence": result.confidence, "error": result.error or None},
        }


_FOLLOW = Follow(lambda _stage, _sessions: None, lambda _output: None, log.info)


def _question(line: BatchLine) -> Question:
    """What is asked. Raises InvalidField for what a pool has no use for: it would be left out unseen."""
    for name in line.body:
        if name not in KNOWN:
            raise InvalidField(f"{name} is nothing that a pool takes.", field=name, remedy="Set it in the pool's file.")
    messages = line.body.get("messages")
    if not isinstance(messages, list) or len(messages) != 1 or not _is_user_text(messages[0]):
        raise InvalidField(
            "A pool answers one message of the user, which is text.", field="messages", remedy="Send one message."
        )
    return Question(line.custom_id, messages[0]["content"], line=line.number)


def _is_user_text(message: Any) -> bool:
    if not isinstance(message, dict) or message.get("role") != "user":
        return False
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


def _fingerprint(questions: Sequence[Question]) -> str:
    asked = [(question.id, question.text) for question in questions]
    return sha256(orjson.dumps(asked)).hexdigest()
