"""What the cache asks of a Redis client, and how it makes its own."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from agent_cache.redis.layout import Command

AWAY = (RedisError, OSError, TimeoutError)
"""What a call raises when Redis is away, stalls, or refuses to serve."""


def concerns_key(reply: object) -> bool:
    """Whether `reply` is a refusal for what lies under a command's key: no other key is to suffer from it."""
    return isinstance(reply, ResponseError) and any(word in str(reply) for word in ("WRONGTYPE", "equal or smaller"))


RedisClient = Redis | RedisCluster
"""redis-py's asyncio clients; a `Sentinel` gives the first kind."""


def connect(url: str, *, max_connections: int, connect_limit_s: float, options: Mapping[str, Any]) -> RedisClient:
    """A client that never sends a command twice and lets a read block for as long as it says.

    redis-py's own defaults retry ten times and cut off reads after 5 s: a blocked XREAD then hangs for a minute.
    """
    return Redis.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=connect_limit_s,
        retry=Retry(NoBackoff(), 0),
        max_connections=max_connections,
        protocol=2,
        **options,
    )


class Connection:
    """A client and the time that Redis may take for each reply. Every call may raise what `AWAY` holds."""

    def __init__(self, client: RedisClient, *, reply_limit_s: float) -> None:
        self._client = client
        self._reply_limit_s = reply_limit_s

    async def call(self, *command: Any, blocks_s: float = 0.0, **options: Any) -> Any:
        """The reply to one command, which the server may hold back for `blocks_s`."""
        async with asyncio.timeout(blocks_s + self._reply_limit_s):
            return await self._client.execute_command(*command, **options)

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """One round trip, no transaction. A command that Redis refused has its error as its reply."""
        if not commands:
            return []
        async with asyncio.timeout(self._reply_limit_s), self._client.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """As `send`, for commands that may be refused only for what lies under their key."""
        replies = await self.send(commands)
        for reply in replies:
            if isinstance(reply, Exception) and not concerns_key(reply):
                raise reply
        return replies

    async def server_identity(self) -> str:
        """What changes when a server is restarted or another takes its place; always the same if INFO is forbidden."""
        try:
            info = await self.call("INFO", "server")
        except NoPermissionError:
            return ""
        nodes = [info] if "run_id" in info else [node for node in info.values() if isinstance(node, Mapping)]
        return repr(sorted(str(node.get("run_id")) for node in nodes))
