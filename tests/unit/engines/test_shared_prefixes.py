import asyncio
from collections.abc import Sequence

import pytest

from shell_router.core.engine import Generation
from shell_router.engines.shared_prefixes import PrefixTurn, SharedPrefixes

FEWEST = 128
QUESTION = list(range(500))


def prompt(*more: int, adapter: str | None = None, cache_key: str | None = None) -> Generation:
    return Generation("r", [*QUESTION, *more], adapter=adapter, cache_key=cache_key)


async def started(
    prefixes: SharedPrefixes, *requests: Generation
) -> Sequence[asyncio.Task[PrefixTurn]]:
    """The requests in their order, each as far as it comes."""
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(prefixes.begin(request, FEWEST)))
        await asyncio.sleep(0)
    return tasks


async def test_prompts_with_one_beginning_wait_until_the_first_is_prefilled_and_then_all_begin() -> (
    None
):
    prefixes = SharedPrefixes()
    first, *others = await started(prefixes, *(prompt(number) for number in range(9)))
    assert first.done() and not any(other.done() for other in others)
    first.result().end(prefilled=True)
    turns = await asyncio.gather(*others)
    assert [turn.waited for turn in (first.result(), *turns)] == [False, *[True] * 8]


@pytest.mark.parametrize(
    "other",
    [
        Generation("r", [7, *QUESTION]),
        Generation("r", QUESTION[:FEWEST]),
        Generation("r", [*QUESTION[:FEWEST], *[7] * 500]),
        prompt(adapter="lora"),
        prompt(cache_key="tenant"),
    ],
    ids=("other", "short", "parts early", "adapter", "tenant"),
)
async def test_a_prompt_that_shares_too_little_or_no_cache_waits_for_none(
    other: Generation,
) -> None:
    _, task = await started(SharedPrefixes(), prompt(), other)
    assert task.done()


async def test_what_is_prefilled_is_not_waited_for_again() -> None:
    prefixes = SharedPrefixes()
    (first,) = await started(prefixes, prompt())
    first.result().end(prefilled=True)
    _, task = await started(prefixes, prompt(1), prompt(2))
    assert task.done()


async def test_if_the_first_fails_the_next_takes_its_place() -> None:
    prefixes = SharedPrefixes()
    first, second, third = await started(prefixes, prompt(1), prompt(2), prompt(3))
    first.result().end(prefilled=False)
    await second
    await asyncio.sleep(0)
    assert not third.done()
    second.result().end(prefilled=True)
    await third


async def test_a_longer_common_beginning_is_waited_for_after_the_shorter() -> None:
    prefixes = SharedPrefixes()
    longer = [7] * 500
    first, second, third = await started(prefixes, prompt(), prompt(*longer), prompt(*longer, 8))
    first.result().end(prefilled=True)
    await second
    await asyncio.sleep(0)
    assert not third.done()
    second.result().end(prefilled=True)
    await third


async def test_a_cancelled_wait_and_a_second_end_leave_nothing() -> None:
    prefixes = SharedPrefixes()
    first, second = await started(prefixes, prompt(1), prompt(2))
    second.cancel()
    await asyncio.wait([second])
    first.result().end(prefilled=False)
    first.result().end(prefilled=True)
    fresh, follower = await started(prefixes, prompt(3), prompt(4))
    assert fresh.done() and not follower.done()
    follower.cancel()
