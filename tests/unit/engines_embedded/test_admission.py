"""The queue for KV."""

import asyncio
import random

from shell_router.engines.embedded.admission import Admission


async def hold_until(admission: Admission, tokens: int, release: asyncio.Event) -> None:
    async with admission.hold(tokens):
        await release.wait()


async def settle() -> None:
    """Let every task run until all wait."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_holders_share_the_budget_and_the_rest_wait_in_order() -> None:
    admission = Admission(max_tokens=10, max_requests=5)
    releases = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(hold_until(admission, *each)) for each in zip((6, 4, 8, 1), releases, strict=True)]
    await settle()
    assert (admission.used_tokens, admission.holders, admission.waiting) == (10, 2, 2)
    releases[1].set()
    await settle()
    assert (admission.used_tokens, admission.waiting) == (6, 2), "a small request must not overtake"
    for release in releases:
        release.set()
    await asyncio.gather(*tasks)
    assert (admission.used_tokens, admission.holders, admission.waiting) == (0, 0, 0)


async def test_the_limit_on_requests_holds_where_tokens_would_do() -> None:
    admission = Admission(max_tokens=10, max_requests=1)
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold_until(admission, 1, release)) for _ in range(2)]
    await settle()
    assert (admission.holders, admission.waiting) == (1, 1)
    release.set()
    await asyncio.gather(*tasks)


async def test_a_cancelled_head_lets_the_next_in() -> None:
    admission = Admission(max_tokens=10, max_requests=5)
    release = asyncio.Event()
    tasks = [asyncio.create_task(hold_until(admission, tokens, release)) for tokens in (6, 8, 4)]
    await settle()
    tasks[1].cancel()
    await settle()
    assert (admission.used_tokens, admission.waiting) == (10, 0)
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert admission.used_tokens == 0


async def test_a_turn_that_comes_together_with_a_cancel_is_given_back() -> None:
    admission = Admission(max_tokens=10, max_requests=5)
    async with admission.hold(10):
        waiter = asyncio.create_task(hold_until(admission, 10, asyncio.Event()))
        await settle()
    assert admission.used_tokens == 10, "the waiter's turn has come, and it has not run yet"
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    assert (admission.used_tokens, admission.holders, admission.waiting) == (0, 0, 0)


async def test_random_comings_and_goings_leave_nothing_held() -> None:
    rng = random.Random(3)
    admission = Admission(max_tokens=20, max_requests=4)
    tasks: list[asyncio.Task[None]] = []
    for _ in range(300):
        release = asyncio.Event()
        tasks.append(asyncio.create_task(hold_until(admission, rng.randint(1, 20), release)))
        if rng.random() < 0.5:
            release.set()
        if rng.random() < 0.5:
            rng.choice(tasks).cancel()
        await asyncio.sleep(0)
        assert admission.used_tokens <= 20
        assert admission.holders <= 4
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (admission.used_tokens, admission.holders, admission.waiting) == (0, 0, 0)
