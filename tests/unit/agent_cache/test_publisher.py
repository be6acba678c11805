"""What is counted when Redis refuses some of the entries that were sent together."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from agent_cache import CacheStats, LogKey
from agent_cache.redis.connection import RedisConnection
from agent_cache.redis.layout import Command, Layout
from agent_cache.redis.publisher import Publisher


class FullAfterTheFirstLog(RedisConnection):
    """Takes what goes to the first log's keys, and has no memory for the second's."""

    def __init__(self) -> None:
        super().__init__(Redis(), reply_limit_s=1.0)

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        half = len(commands) // 2
        return [b"owner"] * half + [ResponseError("OOM command not allowed")] * half

    async def server_identity(self) -> str:
        return "this server"


async def test_entries_that_redis_took_before_it_refused_others_are_not_lost() -> None:
    stats = CacheStats()
    publisher = Publisher(
        FullAfterTheFirstLog(), Layout("test", "owner", 3600.0), stats, clock=time.monotonic
    )
    await asyncio.gather(
        *(publisher.begin(LogKey("tenant", "program", agent)) for agent in ("first", "second"))
    )
    assert (stats.published, stats.lost_writes) == (1, 1)
    await publisher.close(0.0)
