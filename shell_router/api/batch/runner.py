"""Answering a batch's lines."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from shell_router.api.batch.lines import BatchLine, Keep
from shell_router.api.batch.results import LineResult
from shell_router.api.chat_run import Chats
from shell_router.api.fields import Fields
from shell_router.api.problems import INTERNAL, is_passing, problem_body, problem_of

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""An engine that died is started again, and loads its model, within about two minutes."""

log = logging.getLogger(__name__)


class ChatLines:
    """Runs each line as the chat completion that an online client would have asked for.

    Of all batches together `concurrency` lines run at once, shared out among them in turn. They do not count as running
    requests, so that no online request is refused for them.
    """

    def __init__(
        self,
        chats: Chats,
        concurrency: int,
        *,
        pauses_s: Sequence[float] = PAUSES_S,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._chats = chats
        self._metrics = chats.services.metrics
        self._concurrency = concurrency
        self._room = asyncio.Semaphore(concurrency)
        self._pauses_s = pauses_s
        self._sleep = sleep

    async def run(self, tenant: str, lines: AsyncIterator[BatchLine], keep: Keep) -> None:
        """LineRunner.run."""
        ahead = asyncio.Semaphore(self._concurrency)  # a batch holds no more lines than could run
        try:
            async with asyncio.TaskGroup() as group:
                async for line in lines:
                    await ahead.acquire()
                    answering = group.create_task(self._answer(tenant, line, keep))
                    answering.add_done_callback(lambda _: ahead.release())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _answer(self, tenant: str, line: BatchLine, keep: Keep) -> None:
        """An engine that is away for a while fails no line; meanwhile other batches' lines take its room."""
        result, passing = await self._attempt(tenant, line)
        for pause_s in self._pauses_s:
            if not passing:
                break
            await self._sleep(pause_s)
            result, passing = await self._attempt(tenant, line)
        await keep(result)

    async def _attempt(self, tenant: str, line: BatchLine) -> tuple[LineResult, bool]:
        """The result, and whether a little later it may well be another."""
        request_id = self._chats.services.new_id()
        async with self._room:
            with self._metrics.running_batch_lines.track_inprogress():
                try:
                    body = await self._chats.begin(Fields(line.body), tenant).reply()
                except Exception as error:
                    return refused(line, request_id, error), is_passing(error)
        return LineResult(line.custom_id, request_id, 200, body), False


def refused(line: BatchLine, request_id: str, error: Exception) -> LineResult:
    """The result of a line whose request fails so: the answer that an online client would have had."""
    problem = problem_of(error)
    if problem is INTERNAL:
        log.error("request %s: line %d of a batch failed", request_id, line.number, exc_info=error)
    return LineResult(line.custom_id, request_id, problem.status, problem_body(error, request_id))
