"""The one task that writes this process's logs to Redis, behind their writers' backs.

While a round trip is under way more chunks come in; the next round sends them all, each log's as one entry. So the
work is per round trip and not per token, and nobody who writes ever waits.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from redis.exceptions import ConnectionError as RedisConnectionError

from agent_cache.protocol import LogExists, LogKey
from agent_cache.redis.connection import AWAY, Connection
from agent_cache.redis.deletions import Deletions
from agent_cache.redis.layout import Layout
from agent_cache.redis.publication import Outcome, Publication, Writes
from agent_cache.stats import CacheStats

LOGS_PER_ROUND = 128
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 5.0

log = logging.getLogger("agent_cache")


class Publisher:
    """Keeps Redis up to date with the logs begun here, and catches up after an outage.

    While Redis is away (`stats.degraded`) nothing waits for it: logs begin in
    this process only, and all that is still remembered is sent when it is back.
    """

    def __init__(
        self, connection: Connection, layout: Layout, stats: CacheStats, *, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._connection = connection
        self._layout = layout
        self._stats = stats
        self._publications: dict[LogKey, Publication] = {}
        self._dirty: dict[LogKey, Publication] = {}
        self._deletions = Deletions(connection, layout)
        self._work = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._task: asyncio.Task[None] | None = None
        self._server: str | None = None
        self._backoff_s = FIRST_BACKOFF_S

    async def begin(self, key: LogKey) -> Publication:
        """Begin the log in Redis, or, with Redis away, take note to do so. Raises LogExists."""
        if key in self._publications:
            raise LogExists(f"the log of {key} was begun before")
        publication = self._publications[key] = Publication(key)
        self.mark(publication)
        if self._stats.degraded:
            return publication
        publication.answer = asyncio.get_running_loop().create_future()
        try:
            outcome = await publication.answer
        except asyncio.CancelledError:
            self.drop(key)
            raise
        if outcome is Outcome.TAKEN:
            raise LogExists(f"the log of {key} was begun before, by another process")
        return publication

    def mark(self, publication: Publication) -> None:
        """The log has something new to send."""
        if publication.withdrawn:
            return
        self._dirty[publication.key] = publication
        self._wake()

    def drop(self, key: LogKey) -> None:
        """Send nothing more of the log."""
        publication = self._publications.pop(key, None)
        if publication is not None:
            self._dirty.pop(key, None)
            publication.withdrawn = True
            _answer(publication.answer)

    async def delete(self, tenant: str, program: str) -> None:
        """Delete the program's logs, whoever began them; at once, or, with Redis away, when it is back."""
        done = self._deletions.add((tenant, program))
        self._wake()
        if not self._stats.degraded:
            await asyncio.shield(done)

    async def flush(self, limit_s: float) -> bool:
        """Wait until Redis holds everything, at most `limit_s`; whether it does."""
        try:
            async with asyncio.timeout(limit_s):
                await self._settled.wait()
        except TimeoutError:
            return False
        return True

    async def close(self, limit_s: float) -> None:
        """Send what waits if Redis takes it within `limit_s`, then stop."""
        if not self._stats.degraded and not await self.flush(limit_s):
            log.warning("The Agent Prompt Cache closed before Redis had taken everything.")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._release()

    def _wake(self) -> None:
        self._work.set()
        self._settled.clear()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="agent-cache-publisher")
            self._task.add_done_callback(self._stopped)

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                await self._catch_up()
                self._settled.set()
            except AWAY as error:
                self._lost(error)
                await asyncio.sleep(self._backoff_s)
                self._backoff_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)
                self._work.set()

    async def _catch_up(self) -> None:
        """Bring Redis up to date. Returns with nothing left to send; raises one of `AWAY`."""
        if self._stats.degraded or self._server is None:
            await self._deletions.run()
            await self._examine()
        while self._dirty or self._deletions:
            await self._deletions.run()
            await self._publish([self._dirty.pop(key) for key in list(islice(self._dirty, LOGS_PER_ROUND))])
        if self._stats.degraded:
            self._regained()

    async def _publish(self, batch: Sequence[Publication]) -> None:
        now_s = self._clock()
        writes = [publication.writes(self._layout, now_s) for publication in batch if publication.pending]
        try:
            replies = await self._connection.send([command for write in writes for command in write.commands])
            gone = self._settle(writes, iter(replies))
        except AWAY:
            self._stats.lost_writes += sum(write.entries for write in writes)
            raise
        if gone:
            await self._explain(gone)

    def _settle(self, writes: Iterable[Writes], replies: Iterable[object]) -> list[Publication]:
        """Give each log its replies; returns those that Redis no longer has."""
        gone = []
        for write in writes:
            publication = write.publication
            outcome = publication.settle(write, list(islice(replies, len(write.commands))))
            if outcome is Outcome.PUBLISHED:
                self._stats.published += write.entries
            elif outcome is Outcome.GONE:
                gone.append(publication)
            else:
                self._refused(publication)
            _answer(publication.answer, outcome)
            if publication.pending:
                self._dirty[publication.key] = publication
        return gone

    def _refused(self, publication: Publication) -> None:
        """Another process has begun that log: the one who asks is told, who was let begin in an outage keeps it."""
        if publication.awaited:
            _answer(publication.answer, Outcome.TAKEN)
            self.drop(publication.key)
        else:
            self._withdraw(publication, "another process had begun it")

    async def _explain(self, gone: Iterable[Publication]) -> None:
        """Find out whether logs were deleted by somebody or lost with the server's memory."""
        if await self._connection.server_identity() != self._server:
            raise RedisConnectionError("the server was restarted or replaced")
        for publication in gone:
            self._withdraw(publication, "Redis dropped it (deleted by another process, expired or evicted)")

    def _withdraw(self, publication: Publication, why: str) -> None:
        self.drop(publication.key)
        self._stats.withdrawn += 1
        log.warning("The log of %s is now served to this process only: %s.", publication.key, why)

    async def _examine(self) -> None:
        """Learn which server this is, and how much of each log it has."""
        self._server = await self._connection.server_identity()
        self._dirty.update(self._publications)
        publications = [known for known in self._publications.values() if not known.awaited]
        for start in range(0, len(publications), LOGS_PER_ROUND):
            batch = publications[start : start + LOGS_PER_ROUND]
            names = [self._layout.log(publication.key) for publication in batch]
            firsts = await self._connection.ask([("XRANGE", name, "-", "+", "COUNT", 1) for name in names])
            lasts = await self._connection.ask([("XREVRANGE", name, "+", "-", "COUNT", 1) for name in names])
            for publication, first, last in zip(batch, firsts, lasts, strict=True):
                if not publication.resume(first, last, self._layout.owner):
                    self._withdraw(publication, "another process had begun or deleted it")

    def _lost(self, error: BaseException) -> None:
        """Redis is away: say so once, and let nobody wait for it."""
        if not self._stats.degraded:
            log.warning(
                "Redis is away (%s). Agent logs are kept in this process only, where requests go on; other "
                "processes cannot read them until Redis is back.",
                repr(error),
            )
        self._stats.degraded = True
        self._release()

    def _regained(self) -> None:
        self._stats.degraded = False
        self._stats.reconnects += 1
        self._backoff_s = FIRST_BACKOFF_S
        log.warning("Redis is back and has every log again that this process still holds.")

    def _release(self) -> None:
        """Let go whoever waits for an answer."""
        for publication in self._publications.values():
            _answer(publication.answer)
        self._deletions.release()

    def _stopped(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.critical("The Agent Prompt Cache stopped publishing.", exc_info=task.exception())
            self._stats.degraded = True
            self._release()


def _answer(future: asyncio.Future[Outcome | None] | None, result: Outcome | None = None) -> None:
    if future is not None and not future.done():
        future.set_result(result)
