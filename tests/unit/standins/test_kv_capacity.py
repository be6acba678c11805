"""KV capacity that requests hold in order of arrival."""

import asyncio
import random

from shell_router.standins.kv_capacity import KvCapacity


async def hold_until(capacity: KvCapacity, tokens: int, release: asyncio.Event) -> None:
    async with capacity.allocate(tokens):
        await release.wait()


async def settle() -> None:
    """Let every task run until all wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_holders_share_the_budget_and_the_rest_wait_in_order() -> None:
    capacity = KvCapacity(10, 5)
    releases = [asyncio.Event() for _ in range(4)]
    tasks = [
        asyncio.create_task(hold_until(capacity, *each))
        for each in zip((6, 4, 8, 1), releases, strict=True)
    ]
    await settle()
    assert (capacity.used_tokens, capacity.running, capacity.waiting) == (10, 2, 2)
    releases[1].set()
    await settle()
    assert (capacity.used_tokens, capacity.waiting) == (6, 2), "a small request must not overtake"
    for release in releases:
        release.set()
    await asyncio.gather(*tasks)
    assert (capacity.used_tokens, capacity.running, capacity.waiting) == (0, 0, 0)


async def test_the_limit_on_requests_holds_where_tokens_would_do() -> None:
    capacity = KvCapacity(10, 1)
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold_until(capacity, 1, release)) for _ in range(2)]
    await settle()
    assert (capacity.running, capacity.waiting) == (1, 1)
    release.set()
    await asyncio.gather(*tasks)


async def test_a_cancelled_head_admits_the_next() -> None:
    capacity = KvCapacity(10, 5)
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold_until(capacity, tokens, release)) for tokens in (6, 8, 4)]
    await settle()
    tasks[1].cancel()
    await settle()
    assert (capacity.used_tokens, capacity.waiting) == (10, 0)
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert capacity.used_tokens == 0


async def test_a_turn_that_comes_together_with_a_cancel_is_given_back() -> None:
    capacity = KvCapacity(10, 5)
    async with capacity.allocate(10):
        waiter = asyncio.create_task(hold_until(capacity, 10, asyncio.Event()))
        await settle()
    assert capacity.used_tokens == 10, "the waiter's turn has come, and it has not run yet"
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert (capacity.used_tokens, capacity.running, capacity.waiting) == (0, 0, 0)


async def test_random_comings_and_goings_leave_nothing_held() -> None:
    rng = random.Random(3)
    capacity = KvCapacity(20, 4)
    tasks: list[asyncio.Task[None]] = []
    for _ in range(300):
        release = asyncio.Event()
        tasks.append(asyncio.create_task(hold_until(capacity, rng.randint(1, 20), release)))
        if rng.random() < 0.5:
            release.set()
        if rng.random() < 0.5:
            rng.choice(tasks).cancel()
        await asyncio.sleep(0)
        assert capacity.used_tokens <= 20
        assert capacity.running <= 4
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (capacity.used_tokens, capacity.running, capacity.waiting) == (0, 0, 0)
