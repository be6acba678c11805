"""Journals in Redis: a list that begins with the head, and keys for the lease and the last owner.

Each call is one atomic script.
"""

import time
from asyncio import CancelledError
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from agent_cache.protocol import CacheUnavailable, JournalDiffers, JournalState, JournalTaken
from agent_cache.redis.connection import AWAY, RedisConnection
from agent_cache.redis.layout import Layout

# KEYS: lease, list, owner; ARGV: owner, and milliseconds that the lease and the list live. Who
# claimed last is known as long as the list is: a lease that ran out is still its owner's until
# another comes, and never again after that
CLAIM = """
local head, leased = redis.call('LINDEX', KEYS[2], 0), redis.call('GET', KEYS[1])
if head and head ~= ARGV[4] then return 'differs' end
if leased and leased ~= ARGV[1] then return 'held' end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[3], ARGV[1], 'PX', ARGV[3])
if not head then redis.call('RPUSH', KEYS[2], ARGV[4]) end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return redis.call('LRANGE', KEYS[2], 1, -1)
"""
APPEND = """
local known = redis.call('LLEN', KEYS[2]) - 1 - ARGV[4]
local owner = redis.call('GET', KEYS[3])
if owner and owner ~= ARGV[1] then return -1 end
if not owner or known < 0 then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
for at = 5 + known, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[at]) end
redis.call('PEXPIRE', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[3], ARGV[3])
return 1
"""
SEAL = """
local last = redis.call('LINDEX', KEYS[2], -1)
if not last or last:sub(1, #ARGV[3]) == ARGV[3] then return end
redis.call('RPUSH', KEYS[2], ARGV[1])
redis.call('DEL', KEYS[1], KEYS[3])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
"""
LOOK = """
local head, found = redis.call('LINDEX', KEYS[2], 0), redis.call('LRANGE', KEYS[2], 1, 1)
if not head then return false end
if found[1] then found[2] = redis.call('LINDEX', KEYS[2], -1) end
return {head, redis.call('EXISTS', KEYS[1]), unpack(found)}
"""
RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class RedisJournals:
    """The `Journals` in Redis. A journal's list lives for `ttl_s` after its last write."""

    def __init__(
        self, connection: RedisConnection, layout: Layout, *, ttl_s: float, lease_s: float
    ) -> None:
        self._connection = connection
        self._layout = layout
        self._lives_ms = max(1, round(1000 * lease_s)), max(1, round(1000 * ttl_s))
        self.lease_s = lease_s

    def read_clock(self) -> float:
        """Return the boot time's seconds on Linux, monotonic seconds elsewhere."""
        return time.clock_gettime(_CLOCK)

    async def claim(self, tenant: str, key: str, owner: str, head: str) -> Sequence[bytes] | None:
        """Take the lease and return the journal's records, or None while it is held."""
        try:
            records = await self._run(CLAIM, tenant, key, owner, *self._lives_ms, head)
        except CancelledError:
            with suppress(CacheUnavailable):
                await self.release(tenant, key, owner)  # Redis may have run the script
            raise
        if records == b"differs":
            raise JournalDiffers(f"the journal {key!r} was begun with another head")
        return None if records == b"held" else list(records)

    async def append(
        self, tenant: str, key: str, owner: str, position: int, records: Sequence[bytes]
    ) -> bool:
        """Add `records` after the first `position` records and renew the lease."""
        reply = await self._run(APPEND, tenant, key, owner, *self._lives_ms, position, *records)
        if reply < 0:
            raise JournalTaken(f"the journal {key!r} has another owner")
        return bool(reply)

    async def release(self, tenant: str, key: str, owner: str) -> None:
        """End the lease now if `owner` holds it."""
        await self._run(RELEASE, tenant, key, owner)

    async def look(self, tenant: str, key: str) -> JournalState | None:
        """Return the journal's present state, or None if there is no journal."""
        reply = await self._run(LOOK, tenant, key)
        if reply is None:
            return None
        head, is_leased, *ends = reply
        first, last = ends or (b"", b"")
        return JournalState(head, first, last, bool(is_leased))

    async def seal(self, tenant: str, key: str, record: bytes, unless: bytes) -> None:
        """Add a last record and take the journal from its owner."""
        await self._run(SEAL, tenant, key, record, self._lives_ms[1], unless)

    async def _run(self, script: str, tenant: str, key: str, *values: str | int | bytes) -> Any:
        try:
            return await self._connection.call(
                "EVAL", script, 3, *self._layout.journal(tenant, key), *values
            )
        except AWAY as error:
            raise CacheUnavailable(f"Redis is away ({error!r})") from error
