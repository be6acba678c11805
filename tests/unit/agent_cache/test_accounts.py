"""Accounts in memory and in Redis count alike, and no race spends beyond a limit."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agent_cache.accounts import AccountLimits, Accounts, MemoryAccounts, Payment
from agent_cache.redis import RedisAgentPromptCache
from tests.fakes.redis_server import RedisServer

NO_LIMITS = AccountLimits(-1, -1, -1, 60.0)


@pytest_asyncio.fixture(params=["memory", "redis"])
async def accounts(request: pytest.FixtureRequest) -> AsyncIterator[Accounts]:
    if request.param == "memory":
        yield MemoryAccounts(time.monotonic)
        return
    server: RedisServer = request.getfixturevalue("server")
    async with RedisAgentPromptCache(server.url, clock=time.monotonic) as cache:
        yield cache.accounts


@pytest.mark.parametrize(
    ("limits", "payment", "paid"),
    [
        (NO_LIMITS, Payment(1, 10, 100, 5, 7), [5, 5, 5]),
        (AccountLimits(2, -1, -1, 60.0), Payment(1, 10, 100, 5, 7), [5, 5, 0]),
        (AccountLimits(-1, 32, -1, 60.0), Payment(1, 10, 100, 5, 7), [5, 5, 0]),
        (AccountLimits(-1, 28, -1, 60.0), Payment(1, 10, 100, 5, 7), [5, 3, 0]),
        (AccountLimits(-1, -1, 256, 60.0), Payment(1, 10, 100, 5, 7), [5, 3, 0]),
        (AccountLimits(-1, -1, 256, 60.0), Payment(1, 10, 100, 5, 0), [5, 5, 0]),
        (AccountLimits(0, -1, -1, 60.0), Payment(1, 0, 0, 1, 0), [0]),
        (
            AccountLimits(-1, -1, 4_000_000_000_000_000, 60.0),
            Payment(0, 0, 3 * 10**15, 1, 1),
            [1, 0],
        ),
    ],
)
async def test_an_account_pays_what_its_limits_leave(
    accounts: Accounts, limits: AccountLimits, payment: Payment, paid: list[int]
) -> None:
    assert [await accounts.spend("t", "a", payment, limits) for _ in paid] == paid
    assert await accounts.spend("t", "other", Payment(0, 0, 0, 1, 0), NO_LIMITS) == 1


async def test_what_is_given_back_can_be_spent_again(accounts: Accounts) -> None:
    limits = AccountLimits(-1, 20, 200, 60.0)
    assert await accounts.spend("t", "a", Payment(1, 10, 100, 10, 10), limits) == 10
    assert await accounts.spend("t", "a", Payment(1, 1, 1, 1, 1), limits) == 0
    accounts.refund("t", "a", 0, 6, 60)
    for _ in range(200):  # Redis is told in the background
        if paid := await accounts.spend("t", "a", Payment(0, 0, 0, 100, 10), limits):
            break
    assert paid == 6


async def test_no_more_is_given_back_than_was_spent(accounts: Accounts) -> None:
    limits = AccountLimits(2, 20, -1, 60.0)
    assert await accounts.spend("t", "a", Payment(2, 10, 0, 10, 0), limits) == 10
    accounts.refund("t", "a", 9, 50, 50)
    for _ in range(200):  # Redis is told in the background
        if paid := await accounts.spend("t", "a", Payment(2, 0, 0, 100, 0), limits):
            break
    assert paid == 20


async def test_tokens_without_a_price_are_given_back_without_a_complaint(
    accounts: Accounts, caplog: pytest.LogCaptureFixture
) -> None:
    limits = AccountLimits(-1, 20, -1, 60.0)
    assert await accounts.spend("t", "a", Payment(1, 10, 0, 10, 0), limits) == 10
    accounts.refund("t", "a", 0, 6, 0)
    for _ in range(200):  # Redis is told in the background
        if paid := await accounts.spend("t", "a", Payment(0, 0, 0, 100, 0), limits):
            break
    await asyncio.gather(
        *(task for task in asyncio.all_tasks() if task is not asyncio.current_task())
    )
    assert (paid, caplog.records) == (6, [])


async def test_fifty_at_once_spend_no_more_than_there_is(accounts: Accounts) -> None:
    limits = AccountLimits(7, -1, -1, 60.0)
    spends = (accounts.spend("t", "a", Payment(1, 5, 5, 3, 1), limits) for _ in range(50))
    assert sorted(await asyncio.gather(*spends)) == [0] * 43 + [3] * 7


async def test_an_account_is_full_again_after_its_time() -> None:
    now_s = 0.0
    accounts = MemoryAccounts(lambda: now_s)
    limits = AccountLimits(1, -1, -1, 10.0)
    spend = Payment(1, 0, 0, 1, 0)
    assert [await accounts.spend("t", "a", spend, limits) for _ in range(2)] == [1, 0]
    now_s = 10.0
    assert await accounts.spend("t", "a", spend, limits) == 1


async def test_without_redis_each_router_counts_for_itself(server: RedisServer) -> None:
    limits = AccountLimits(2, -1, -1, 60.0)
    spend = Payment(1, 0, 0, 1, 0)
    async with RedisAgentPromptCache(server.url, clock=time.monotonic, reply_limit_s=0.2) as cache:
        server.kill()
        assert [await cache.accounts.spend("t", "a", spend, limits) for _ in range(3)] == [1, 1, 0]
