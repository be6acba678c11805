"""The Agent Prompt Cache over Redis: logs live in memory; Redis shows them to other processes."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self
from uuid import uuid4

from agent_cache.memory import MemoryAgentPromptCache, Writer, join_reads, read_forgotten
from agent_cache.protocol import (
    CacheError,
    CacheStats,
    CacheUnavailable,
    End,
    LogExists,
    LogKey,
    LogRead,
    LogTimeout,
    LogWriter,
)
from agent_cache.redis.accounts import RedisAccounts
from agent_cache.redis.connection import AWAY, RedisConnection, concerns_key, connect
from agent_cache.redis.journals import RedisJournals
from agent_cache.redis.layout import Layout, read_entries
from agent_cache.redis.publisher import Publisher

LONGEST_BLOCK_S = 3.0
"""The limit of one blocking XREAD.

It is then repeated, to notice a dead connection and a log deleted in between.
"""

RETRY_S = 0.1
WRITER_GONE = "The process that wrote the log has ended, or has lost Redis."
ENTRIES_PER_READ = 256
"""The most entries of one XREAD, so that a long log does not come at once."""

log = logging.getLogger("agent_cache")


class RedisAgentPromptCache:
    """An `AgentPromptCache` that several processes share.

    A log lives in the memory of the process that writes it, whose readers never touch the network.
    One background task copies it to Redis, where other processes read it. While Redis is away,
    `stats.degraded` is set and logs live in memory only: other processes cannot read them, and
    no check finds that another process has begun them. Once Redis is back, the task sends what is
    missing.

    `redis` is a URL (redis://, rediss://, unix://), with further `options` of redis-py's clients
    such as `password` or `ssl_ca_certs`. `clock` returns monotonic seconds. Logs expire `ttl_s`
    after their last write. Redis counts as away if a reply takes longer than `reply_limit_s`. Every
    read that waits for another process's log holds one of `max_connections`. `len` counts the logs
    of this process. `journals` lie in the same Redis; see `Journals` for `journal_ttl_s` and
    `lease_s`. A process renews a lease of `lease_s` while it has open logs; others end its logs as
    failed once it has held none for as long.
    """

    def __init__(
        self,
        redis: str,
        *,
        clock: Callable[[], float],
        ttl_s: float = 3600.0,
        prefix: str = "agent-prompt-cache",
        reply_limit_s: float = 1.0,
        max_connections: int = 1000,
        journal_ttl_s: float = 3600.0,
        lease_s: float = 5.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if reply_limit_s <= 0:
            raise ValueError(f"reply_limit_s is {reply_limit_s}; it must be positive")
        self._client = connect(
            redis,
            max_connections=max_connections,
            connect_limit_s=reply_limit_s,
            options=options or {},
        )
        self._closed = False
        self._lease_s = lease_s
        self._renewal: asyncio.Task[None] | None = None
        self.stats = CacheStats()
        self._connection = RedisConnection(self._client, reply_limit_s=reply_limit_s)
        self._layout = layout = Layout(prefix, uuid4().hex, ttl_s)
        self._publisher = Publisher(self._connection, layout, self.stats, clock=clock)
        self._memory = MemoryAgentPromptCache(
            clock=clock, ttl_s=ttl_s, dropped=self._publisher.drop
        )
        self.accounts = RedisAccounts(self._connection, layout, clock)
        self.journals = RedisJournals(
            self._connection, layout, ttl_s=journal_ttl_s, lease_s=lease_s
        )

    def __len__(self) -> int:
        return len(self._memory)

    async def create(self, key: LogKey) -> LogWriter:
        """Begin the log of `key`. Raises LogExists."""
        self._check_open()
        if self._memory.find(key) is not None:
            raise LogExists(f"the log of {key} was begun before")
        publication = await self._publisher.begin(key)
        publication.log = log = self._memory.begin(key)
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew_lease(), name="agent-cache-lease")

        def note_write() -> None:
            self._memory.touch(log)
            self._publisher.mark(publication)

        return Writer(log, note_write)

    async def read(
        self, key: LogKey, position: int = 0, *, at_least: int = 1, wait_s: float
    ) -> LogRead:
        """Return the log's content after `position`, waiting at most `wait_s`."""
        self._check_open()
        if self._memory.find(key) is not None:
            return await self._memory.read(key, position, at_least=at_least, wait_s=wait_s)
        if position:
            return await self._read_elsewhere(key, position, at_least, wait_s)
        return await self._read_from_the_start(key, at_least, wait_s)

    async def forget(self, tenant: str, program: str) -> None:
        """Delete every log of the program, also those of other processes."""
        self._check_open()
        self._memory.drop(tenant, program)
        await self._publisher.delete(tenant, program)

    async def flush(self, *, limit_s: float) -> bool:
        """Wait at most `limit_s` until Redis has all writes from here; return whether it has."""
        return await self._publisher.flush(limit_s)

    async def healthy(self) -> bool:
        """Return whether Redis answers within `reply_limit_s`."""
        try:
            await self._connection.call("PING")
        except AWAY:
            return False
        return True

    async def close(self, *, limit_s: float = 2.0) -> None:
        """Send Redis what it lacks for at most `limit_s`, then end all reads and writes here.

        The logs in Redis stay there for other processes until they are forgotten or expire.
        """
        if self._closed:
            return
        self._closed = True
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        await self._publisher.close(limit_s)
        await self._memory.close()
        await self.accounts.aclose()
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CacheError("the cache is closed")

    async def _read_from_the_start(self, key: LogKey, at_least: int, wait_s: float) -> LogRead:
        """Read a log that has not begun here: its first chunks, then the rest from their source."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        begun = await self._read_wherever_it_begins(key, wait_s)
        if begun.end is not None or begun.position >= at_least:
            return begun
        wait_s = max(0.0, deadline_s - loop.time())
        missing = at_least - begun.position
        try:
            rest = await self.read(key, begun.position, at_least=missing, wait_s=wait_s)
        except LogTimeout:
            return begun
        return join_reads([begun, rest], rest.position, rest.end, rest.detail)

    async def _read_wherever_it_begins(self, key: LogKey, wait_s: float) -> LogRead:
        """Read the first chunks of a log that has not begun here.

        The log may be another process's, or may yet begin in this process.
        """
        here = asyncio.create_task(self._memory.wait(key, 0, 1))
        elsewhere = asyncio.create_task(self._read_elsewhere(key, 0, 1, wait_s))
        try:
            await asyncio.wait({here, elsewhere}, return_when=asyncio.FIRST_COMPLETED)
            return (here if here.done() else elsewhere).result()
        except LogTimeout as error:  # it may have begun here while Redis was away
            error.begun |= self._memory.find(key) is not None
            raise
        finally:
            here.cancel()
            elsewhere.cancel()
            await asyncio.gather(here, elsewhere, return_exceptions=True)

    async def _read_elsewhere(
        self, key: LogKey, position: int, at_least: int, wait_s: float
    ) -> LogRead:
        """Read another process's log, with one blocking XREAD at a time on a connection of its own.

        Raises CacheUnavailable if nothing came and Redis is away when the wait ends. A Redis that
        neither answers nor refuses makes it last longer, up to the connection's limit for a reply.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        reads: list[LogRead] = []
        unwritten_since_s: float | None = None
        reached = position
        after = f"{position}-1".encode()
        while True:
            left_s = max(0.0, deadline_s - loop.time())
            away: BaseException | None = None
            try:
                read, after = await self._read_stream(
                    key, reached, after, block_s=min(left_s, LONGEST_BLOCK_S, self._lease_s)
                )
                if read is not None:
                    reads.append(read)
                    reached = read.position
                    if read.end is not None or reached - position >= at_least:
                        return join_reads(reads, reached, read.end, read.detail)
                if read is not None or await self._has_writer(key):
                    unwritten_since_s = None
                elif unwritten_since_s is None:
                    unwritten_since_s = loop.time()
                elif loop.time() >= unwritten_since_s + self._lease_s:
                    log_name = self._layout.log(key)
                    await self._connection.call(
                        *self._layout.close(log_name, End.FAILED, WRITER_GONE)
                    )
                    continue  # to the mark, behind which a writer that wakes adds nothing
            except AWAY as error:
                if concerns_key(error):
                    raise CacheUnavailable(
                        f"what Redis has under the name of {key} is no log ({error})"
                    ) from error
                away = error
                self.stats.failed_reads += 1
                await asyncio.sleep(min(RETRY_S, left_s))
            if loop.time() >= deadline_s:
                if reached > position:
                    return join_reads(reads, reached)
                message = f"nothing came after position {position} of {key} within {wait_s:g} s"
                if away is not None:
                    raise CacheUnavailable(f"{message}; Redis is away ({away!r})") from away
                raise LogTimeout(message, begun=await self._has_begun(key))

    async def _read_stream(
        self, key: LogKey, position: int, after: bytes, *, block_s: float
    ) -> tuple[LogRead | None, bytes]:
        """Read the stream's entries behind `after` once, waiting at most `block_s`.

        Returns what follows `position` and the last entry's id. The read is None if nothing came
        and the log may still be written.
        """
        name = self._layout.log(key)
        block_ms = int(1000 * block_s)
        block = ("BLOCK", block_ms) if block_ms else ()  # BLOCK 0 would wait for ever
        command = ("XREAD", "COUNT", ENTRIES_PER_READ, *block, "STREAMS", name, after)
        if streams := await self._connection.call(*command, blocks_s=block_s):
            entries = streams[0][1]
            read, malformed = read_entries(entries, position)
            if malformed:
                self.stats.skipped += malformed
                log.warning("The log of %s in Redis ends as failed: %s", key, read.detail)
            return read if read.position > position or read.end else None, entries[-1][0]
        gone = position and not await self._connection.call("EXISTS", name)
        return read_forgotten(position) if gone else None, after

    async def _has_writer(self, key: LogKey) -> bool:
        """Return whether the log's writer holds its lease, or the log has no leased writer."""
        begin = await self._connection.call("XRANGE", self._layout.log(key), "0-1", "0-1")
        if not begin or b"leased" not in begin[0][1]:
            return True
        owner = begin[0][1][b"owner"].decode()
        return bool(await self._connection.call("EXISTS", self._layout.lease(owner)))

    async def _renew_lease(self) -> None:
        """Renew this process's lease until all of its logs have ended."""
        lives_ms = max(1, round(1000 * self._lease_s))
        lease = self._layout.lease(self._layout.owner)
        while self._publisher.has_open():
            with suppress(*AWAY):
                await self._connection.call("SET", lease, "1", "PX", lives_ms)
            await asyncio.sleep(self._lease_s / 3)

    async def _has_begun(self, key: LogKey) -> bool:
        try:
            return bool(await self._connection.call("EXISTS", self._layout.log(key)))
        except AWAY:
            return False
