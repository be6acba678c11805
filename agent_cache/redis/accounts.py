"""Accounts in Redis: a hash of what was spent, changed by one atomic script at a time."""

import asyncio
import logging
from collections.abc import Callable

from agent_cache.accounts import AccountLimits, MemoryAccounts, Payment
from agent_cache.redis.connection import AWAY, RedisConnection
from agent_cache.redis.layout import Layout

log = logging.getLogger("agent_cache")

# ARGV: milliseconds that the account lives; calls, tokens, nanos, more, nanos of each of more; the
# limits of calls, tokens and nanos, -1 for none. As count_payable.
SPEND = """
local a = {}
for at, value in ipairs(ARGV) do a[at] = tonumber(value) end
local spent = redis.call('HMGET', KEYS[1], 'calls', 'tokens', 'nanos')
local calls, tokens = tonumber(spent[1] or 0), tonumber(spent[2] or 0)
local nanos, more = tonumber(spent[3] or 0), a[5]
if a[7] >= 0 and calls + a[2] > a[7] then return 0 end
if a[8] >= 0 then more = math.min(more, a[8] - tokens - a[3]) end
if a[9] >= 0 then
  local left = a[9] - nanos - a[4]
  if a[6] > 0 then more = math.min(more, math.floor(left / a[6]))
  elseif left < 0 then return 0 end
end
if more < 1 then return 0 end
redis.call('HINCRBY', KEYS[1], 'calls', a[2])
redis.call('HINCRBY', KEYS[1], 'tokens', a[3] + more)
redis.call('HINCRBY', KEYS[1], 'nanos', string.format('%.0f', a[4] + more * a[6]))
if not spent[1] then redis.call('PEXPIRE', KEYS[1], a[1]) end
return more
"""
REFUND = """
if redis.call('EXISTS', KEYS[1]) == 0 then return end
for at, field in ipairs({'calls', 'tokens', 'nanos'}) do
  if redis.call('HINCRBY', KEYS[1], field, ARGV[at]) < 0 then
    redis.call('HSET', KEYS[1], field, 0)
  end
end
"""


class RedisAccounts:
    """Accounts that all processes of a deployment share.

    While Redis is away each process counts for itself.
    """

    def __init__(
        self,
        connection: RedisConnection,
        layout: Layout,
        clock: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._layout = layout
        self._own = MemoryAccounts(clock)
        self._refunds: set[asyncio.Task[None]] = set()
        self._is_away = False

    async def spend(self, tenant: str, name: str, payment: Payment, limits: AccountLimits) -> int:
        """See `Accounts`."""
        values = (
            *(max(1, round(1000 * limits.ttl_s)), payment.calls, payment.tokens, payment.nanos),
            *(payment.more, payment.token_nanos, limits.calls, limits.tokens, limits.nanos),
        )
        account = self._layout.account(tenant, name)
        try:
            paid = int(await self._connection.call("EVAL", SPEND, 1, account, *values))
        except AWAY as error:
            if not self._is_away:
                log.warning("Redis is away (%r): budgets hold for each router alone", error)
            self._is_away = True
            return await self._own.spend(tenant, name, payment, limits)
        self._is_away = False
        return paid

    def refund(self, tenant: str, name: str, calls: int, tokens: int, nanos: int) -> None:
        """See `Accounts`; done in the background."""
        self._own.refund(tenant, name, calls, tokens, nanos)
        account = self._layout.account(tenant, name)
        task = asyncio.create_task(self._refund(account, calls, tokens, nanos))
        self._refunds.add(task)
        task.add_done_callback(self._refunds.discard)

    async def _refund(self, account: str, calls: int, tokens: int, nanos: int) -> None:
        try:
            await self._connection.call("EVAL", REFUND, 1, account, -calls, -tokens, -nanos)
        except AWAY as error:
            log.warning("%d tokens stay counted in a budget: Redis is away (%r)", tokens, error)

    async def aclose(self) -> None:
        """Wait for the refunds under way."""
        if self._refunds:
            await asyncio.wait(self._refunds)
