"""The Redis client of the cache, with the limits and errors that the cache relies on."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from agent_cache.redis.layout import Command

AWAY = (RedisError, OSError, TimeoutError)
"""The exceptions of a call when Redis is away, stalls, or refuses to serve."""


def is_repetition(reply: object) -> bool:
    """Return whether `reply` refuses a stream's entry because its id is none of the next."""
    return isinstance(reply, ResponseError) and "equal or smaller" in str(reply)


def concerns_key(reply: object) -> bool:
    """Return whether `reply` is an error about the value of one key, which affects no other key."""
    return is_repetition(reply) or (isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply))


def require_about_keys(replies: Sequence[object]) -> None:
    """Raise the first error of `replies` that is not about the value of one key."""
    for reply in replies:
        if isinstance(reply, Exception) and not concerns_key(reply):
            raise reply


def connect(
    url: str, *, max_connections: int, connect_limit_s: float, options: Mapping[str, Any]
) -> Redis:
    """Make a client that never sends a command twice and lets a read block for as long as it says.

    redis-py's own defaults retry ten times and cut off reads after 5 s: a blocked XREAD then hangs
    for a minute.

    Raises:
        ValueError: `url` sets the form of replies.
    """
    client = Redis.from_url(
        url,
        socket_timeout=None,
        socket_connect_timeout=connect_limit_s,
        retry=Retry(NoBackoff(), 0),
        max_connections=max_connections,
        protocol=2,
        decode_responses=False,
        **options,
    )
    settings = client.connection_pool.connection_kwargs  # a URL's options are above these
    if settings["decode_responses"] or settings["protocol"] != 2:
        raise ValueError("the Redis URL sets decode_responses or protocol; leave them out")
    return client


class RedisConnection:
    """A Redis client with a time limit for each reply.

    Every method may raise an exception of `AWAY`.
    """

    def __init__(self, client: Redis, *, reply_limit_s: float) -> None:
        self._client = client
        self._reply_limit_s = reply_limit_s

    async def call(self, *command: Any, blocks_s: float = 0.0) -> Any:
        """Return the reply to one command, which the server may hold back for `blocks_s`."""
        async with asyncio.timeout(blocks_s + self._reply_limit_s):
            return await self._client.execute_command(*command)  # type: ignore[no-untyped-call] # redis-py has none

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """Send `commands` in one round trip without a transaction; return the replies.

        The reply of a command that Redis refused is the error.
        """
        if not commands:
            return []
        async with (
            asyncio.timeout(self._reply_limit_s),
            self._client.pipeline(transaction=False) as pipeline,
        ):
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send `commands`, and raise every error except those about the value of one key."""
        replies = await self.send(commands)
        require_about_keys(replies)
        return replies

    async def server_identity(self) -> str:
        """Return an id that changes when a server is restarted or another takes its place.

        The id is always the same if INFO is forbidden.
        """
        try:
            return str((await self.call("INFO", "server")).get("run_id"))
        except NoPermissionError:
            return ""
