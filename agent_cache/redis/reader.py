"""Reading logs that other processes write."""

import asyncio

from agent_cache.log import forgotten, joined
from agent_cache.protocol import CacheUnavailable, LogKey, LogRead, LogTimeout
from agent_cache.redis.connection import AWAY, Connection
from agent_cache.redis.layout import Entry, Layout, read_entries, stream_entries
from agent_cache.stats import CacheStats

LONGEST_BLOCK_S = 3.0
"""A blocked XREAD is asked anew this often, to notice a dead connection and a log deleted in between."""

RETRY_S = 0.1


class RemoteReader:
    """Reads streams with one blocking XREAD, on a connection of its own, per waiting read."""

    def __init__(self, connection: Connection, layout: Layout, stats: CacheStats) -> None:
        self._connection = connection
        self._layout = layout
        self._stats = stats

    async def read(self, key: LogKey, position: int, *, at_least: int, wait_s: float) -> LogRead:
        """As `AgentPromptCache.read`. Raises CacheUnavailable if nothing came and Redis is away when the wait ends.

        A Redis that neither answers nor refuses makes it last longer, up to the connection's limit for a reply.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        reads: list[LogRead] = []
        reached = position
        while True:
            left_s = max(0.0, deadline_s - loop.time())
            away: BaseException | None = None
            try:
                found = await self._look(key, reached, block_s=min(left_s, LONGEST_BLOCK_S))
                if found is not None:
                    reads.append(found)
                    reached = found.position
                    if found.end is not None or reached - position >= at_least:
                        return joined(reads, reached, found.end, found.detail)
            except AWAY as error:
                away = error
                self._stats.failed_reads += 1
                await asyncio.sleep(min(RETRY_S, left_s))
            if loop.time() >= deadline_s:
                if reached > position:
                    return joined(reads, reached)
                message = f"nothing came after position {position} of {key} within {wait_s:g} s"
                if away is not None:
                    raise CacheUnavailable(f"{message}; Redis is away ({away!r})") from away
                raise LogTimeout(message, begun=await self._begun(key))

    async def _look(self, key: LogKey, position: int, *, block_s: float) -> LogRead | None:
        """What follows `position`, waiting `block_s` for it. None if nothing came and the log may still be written."""
        name = self._layout.log(key)
        entries = await self._next_entries(name, position, block_s)
        if entries:
            return read_entries(entries, position)
        if position and not await self._connection.call("EXISTS", name):
            return forgotten(position)
        return None

    async def _begun(self, key: LogKey) -> bool:
        try:
            return bool(await self._connection.call("EXISTS", self._layout.log(key)))
        except AWAY:
            return False

    async def _next_entries(self, name: str, position: int, block_s: float) -> list[Entry]:
        block_ms = int(1000 * block_s)
        block = ("BLOCK", block_ms) if block_ms else ()  # BLOCK 0 would wait for ever
        command = ("XREAD", *block, "STREAMS", name, f"{position}-1")
        return stream_entries(await self._connection.call(*command, blocks_s=block_s, keys=[name]))
