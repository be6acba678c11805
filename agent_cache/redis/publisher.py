"""The task that copies this process's logs to Redis.

Chunks that come in during a round trip are sent together by the next round, each log's as one
entry. So the work grows with the round trips and not with the tokens, and writers never wait.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from agent_cache.memory import Log
from agent_cache.protocol import CacheStats, LogExists, LogKey
from agent_cache.redis.connection import (
    AWAY,
    RedisConnection,
    concerns_key,
    is_repetition,
    require_about_keys,
)
from agent_cache.redis.layout import FIRST_TIME_MS, Command, Layout

PROGRAMS_PER_ROUND = 128
REMEMBERED = 10_000
"""The most deletions remembered in an outage. The keys of older deletions are left to expire."""


def _answer(future: "asyncio.Future[Any] | None", result: object = None) -> None:
    if future is not None and not future.done():
        future.set_result(result)


CHUNKS_PER_ENTRY = 256
"""The most chunks in one entry.

Together with LOGS_PER_ROUND it bounds how long a round blocks the event loop: about 20 ms.
"""

CHARACTERS_PER_ENTRY = 2**20
"""No chunk is added to an entry with more; readers refuse much longer ones."""

TAKEN = "another process had begun it"
OVERTAKEN = "another process wrote to it, or ended it because this one had lost its lease"
GONE = "Redis dropped it (deleted by another process, expired or evicted)"


@dataclass(slots=True, eq=False)
class Publication:
    """One log's progress in Redis: `chunks` sent, and whether its begin and end marks were sent.

    The time to live of its keys was renewed at `renewed_s`. `sent` describes the last commands: the
    number of their stream entries, and the values that `chunks`, `ended` and `renewed_s` get once
    Redis has taken them. After a failed attempt the commands are `repeated`, and Redis may have
    taken them already. `answer` gives the log's creator the result of `settle` for the begin mark,
    or None if Redis did not reply. A `withdrawn` log is served to this process only.
    """

    key: LogKey
    log: Log = field(default_factory=Log)
    begun: bool = False
    chunks: int = 0
    ended: bool = False
    renewed_s: float = -math.inf
    sent: tuple[int, int, bool, float] = (0, 0, False, -math.inf)
    repeated: bool = False
    withdrawn: bool = False
    answer: asyncio.Future[str | None] | None = None

    @property
    def awaited(self) -> bool:
        """Whether the log's creator still waits for the outcome."""
        return self.answer is not None and not self.answer.done()

    @property
    def pending(self) -> bool:
        """Whether there is anything to send."""
        behind = self.chunks < len(self.log.chunks) or (self.log.end is not None and not self.ended)
        return not self.withdrawn and (behind or not self.begun)

    def next_commands(self, layout: Layout, now_s: float) -> list[Command]:
        """Return the next commands: the begin mark alone, or the writes behind it.

        The begin mark goes alone because another process may have set it.
        """
        if not self.begun:
            self.sent = 1, 0, False, now_s
            return layout.begin(self.key)
        log = self.log
        upto = self.chunks
        characters = 0
        for chunk in log.chunks[self.chunks : self.chunks + CHUNKS_PER_ENTRY]:
            if characters > CHARACTERS_PER_ENTRY:
                break
            characters += len(chunk.text)
            upto += 1
        ended = log.end is not None and upto == len(log.chunks)
        commands: list[Command] = []
        if self.chunks < upto:
            commands.append(layout.chunks(self.key, log.chunks[self.chunks : upto], log.ends[upto]))
        if log.end is not None and ended and not self.ended:
            commands.append(layout.end(self.key, log.position, log.end, log.detail))
        entries = len(commands)
        renewed_s = self.renewed_s
        if ended or now_s >= renewed_s + layout.renew_s:
            commands = commands + layout.keep(self.key)
            renewed_s = now_s
        self.sent = entries, upto, ended, renewed_s
        return commands

    def settle(self, replies: Sequence[object], owner: str) -> str:
        """Record Redis's `replies` to the last commands.

        Returns why the log cannot be shared, empty if it can. Raises the first error that is not
        about the log.
        """
        require_about_keys(replies)
        entries, chunks, ended, renewed_s = self.sent
        for reply in replies:
            if isinstance(reply, Exception) and not is_repetition(reply):
                return "something else lies under its name in Redis"
            if is_repetition(reply) and not self.repeated:
                return OVERTAKEN
        if not self.begun and replies[0] != owner.encode():
            return TAKEN
        if None in replies[:entries]:
            return GONE
        self.begun = True
        self.chunks = chunks
        self.ended = ended
        self.renewed_s = renewed_s
        self.repeated = any(map(is_repetition, replies))
        return ""

    def restart(self) -> None:
        """Send all again, to a server that may have none of it."""
        self.begun = False
        self.chunks = 0
        self.ended = False
        self.renewed_s = -math.inf
        self.repeated = True


LOGS_PER_ROUND = 128
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 5.0

log = logging.getLogger("agent_cache")


class Publisher:
    """The copier of this process's logs to Redis.

    While Redis is away (`stats.degraded`) nothing waits for it: logs begin in this process only.
    When Redis is back, everything that was not sent is sent. A new server gets all of every log.
    """

    def __init__(
        self,
        connection: RedisConnection,
        layout: Layout,
        stats: CacheStats,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._connection = connection
        self._layout = layout
        self._stats = stats
        self._publications: dict[LogKey, Publication] = {}
        self._dirty: dict[LogKey, Publication] = {}
        # a deletion stays here until Redis has done it
        self._deletions: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._work = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._task: asyncio.Task[None] | None = None
        self._server: str | None = None
        self._backoff_s = FIRST_BACKOFF_S

    async def begin(self, key: LogKey) -> Publication:
        """Begin the log in Redis, or note it for later if Redis is away. Raises LogExists."""
        if key in self._publications:
            raise LogExists(f"the log of {key} was begun before")
        publication = self._publications[key] = Publication(key)
        self.mark(publication)
        if self._stats.degraded:
            return publication
        publication.answer = asyncio.get_running_loop().create_future()
        try:
            refusal = await publication.answer
        except asyncio.CancelledError:
            self.drop(key)
            raise
        if refusal == TAKEN:
            raise LogExists(f"the log of {key} was begun before, by another process")
        return publication

    def mark(self, publication: Publication) -> None:
        """Note that the log has something new to send."""
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

    def has_open(self) -> bool:
        """Return whether any log has not ended."""
        return any(each.log.end is None for each in self._publications.values())

    async def delete(self, tenant: str, program: str) -> None:
        """Delete the program's logs, including the logs of other processes.

        If Redis is away, they are deleted when it is back.
        """
        done = self._deletions.get((tenant, program))
        if done is None or done.done():
            done = self._deletions[tenant, program] = asyncio.get_running_loop().create_future()
        if len(self._deletions) > REMEMBERED:
            _answer(self._deletions.pop(next(iter(self._deletions))))
        self._wake()
        if not self._stats.degraded:
            await asyncio.shield(done)

    async def flush(self, limit_s: float) -> bool:
        """Wait at most `limit_s` until Redis holds everything; return whether it does."""
        try:
            async with asyncio.timeout(limit_s):
                await self._settled.wait()
        except TimeoutError:
            return False
        return True

    async def close(self, limit_s: float) -> None:
        """Send the remaining writes if Redis takes them within `limit_s`, then stop."""
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
            self._task.add_done_callback(self._report_stop)

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            try:
                await self._catch_up()
                self._settled.set()
            except AWAY as error:
                self._note_outage(error)
                await asyncio.sleep(self._backoff_s)
                self._backoff_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)
                self._work.set()

    async def _catch_up(self) -> None:
        """Send until nothing is left to send. Raises one of `AWAY`."""
        if self._stats.degraded or self._server is None:
            await self._meet_server()
        while self._dirty or self._deletions:
            await self._delete_all()
            await self._publish(
                [self._dirty.pop(key) for key in list(islice(self._dirty, LOGS_PER_ROUND))]
            )
        if self._stats.degraded:
            self._stats.degraded = False
            self._backoff_s = FIRST_BACKOFF_S
            log.warning("Redis is back and has every log again that this process still holds.")

    async def _meet_server(self) -> None:
        """Ask for the server's identity; send all logs again if it was restarted or replaced."""
        server = await self._connection.server_identity()
        if self._server not in (None, server):
            for publication in self._publications.values():
                publication.restart()
            self._dirty.update(self._publications)
        self._server = server

    async def _delete_all(self) -> None:
        """Delete all waiting programs, with two round trips for every PROGRAMS_PER_ROUND."""
        while self._deletions:
            programs = list(islice(self._deletions, PROGRAMS_PER_ROUND))
            sets = await self._connection.ask(
                [("SMEMBERS", self._layout.agents(*program)) for program in programs]
            )
            commands: list[Command] = []
            for program, agents in zip(programs, sets, strict=True):
                for agent in () if concerns_key(agents) else agents:
                    commands += self._layout.delete(
                        self._layout.log_of_quoted(*program, agent.decode("ascii", "replace"))
                    )
                commands.append(("UNLINK", self._layout.agents(*program)))
            await self._connection.ask(commands)
            for program in programs:
                _answer(self._deletions.pop(program, None))

    async def _publish(self, batch: Sequence[Publication]) -> None:
        now_s = self._clock()
        before = self._stats.published
        batch = [publication for publication in batch if publication.pending]
        writes = [publication.next_commands(self._layout, now_s) for publication in batch]
        try:
            replies = iter(await self._connection.send(list(chain.from_iterable(writes))))
            for publication, commands in zip(batch, writes, strict=True):
                await self._settle(publication, list(islice(replies, len(commands))))
        except AWAY:
            taken = self._stats.published - before
            self._stats.lost_writes += sum(publication.sent[0] for publication in batch) - taken
            for publication in batch:
                publication.repeated = True
                self._dirty.setdefault(publication.key, publication)
            raise

    async def _settle(self, publication: Publication, replies: Sequence[object]) -> None:
        """Apply the replies to a log's commands: publish it, withdraw it, or fail its creator."""
        refusal = publication.settle(replies, self._layout.owner)
        if refusal == GONE and await self._connection.server_identity() != self._server:
            raise RedisConnectionError("the server was restarted or replaced")
        if publication.repeated and not refusal and await self._is_closed(publication.key):
            refusal = OVERTAKEN
        awaited = publication.awaited
        _answer(publication.answer, refusal)
        if not refusal:
            self._stats.published += publication.sent[0]
        elif refusal == TAKEN and awaited:
            self.drop(publication.key)  # its creator gets an error
        else:
            self._withdraw(publication, refusal)
        if publication.pending:
            self._dirty[publication.key] = publication

    async def _is_closed(self, key: LogKey) -> bool:
        """Return whether another process has ended the log."""
        log_name = self._layout.log(key)
        last = await self._connection.call("XREVRANGE", log_name, "+", "-", "COUNT", 1)
        return bool(last) and int(last[0][0].partition(b"-")[0]) >= FIRST_TIME_MS

    def _withdraw(self, publication: Publication, why: str) -> None:
        self.drop(publication.key)
        self._stats.withdrawn += 1
        log.warning("The log of %s is now served to this process only: %s.", publication.key, why)

    def _note_outage(self, error: BaseException) -> None:
        """Log once that Redis is away, and let no caller wait for it."""
        if not self._stats.degraded:
            log.warning(
                "Redis is away (%s). Agent logs are kept in this process only, where requests "
                "are still served; other processes cannot read them until Redis is back.",
                repr(error),
            )
        self._stats.degraded = True
        self._release()

    def _release(self) -> None:
        """Let the callers that wait for an outcome go on."""
        for publication in self._publications.values():
            _answer(publication.answer)
        for done in self._deletions.values():
            _answer(done)

    def _report_stop(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.critical("The Agent Prompt Cache stopped publishing.", exc_info=task.exception())
            self._stats.degraded = True
            self._release()
