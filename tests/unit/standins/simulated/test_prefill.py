import asyncio
from collections.abc import Sequence

import pytest

from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.standins.simulated.costs import PrefillCosts, attended_pairs
from shell_router.standins.simulated.pair import PrefillEngine
from shell_router.standins.simulated.processor import Processor

COSTS = PrefillCosts(forward_s=1.0, token_s=0.01, attention_s=0.001, chunk_tokens=100)


def prompts(
    *asked: tuple[float, Sequence[int]], costs: PrefillCosts = COSTS
) -> list[tuple[float, int]]:
    """When prompts that come at a time are prefilled, and how many of their tokens were cached."""

    async def run() -> list[tuple[float, int]]:
        engine = PrefillEngine(costs, Processor())

        async def one(at_s: float, ids: Sequence[int]) -> tuple[float, int]:
            await asyncio.sleep(at_s)
            cached = await engine.prefill(ids)
            return asyncio.get_running_loop().time(), cached

        return await asyncio.gather(*(one(*each) for each in asked))

    return run_virtual(run())


def fresh(tokens: int, first: int = 0) -> list[int]:
    return [first, *range(1000, 999 + tokens)]


def test_a_pass_takes_its_start_its_tokens_and_what_they_attend() -> None:
    assert prompts((0, fresh(10))) == [(pytest.approx(1 + 0.1 + 0.055), 0)]


def test_tokens_that_were_prefilled_before_are_attended_but_not_computed() -> None:
    _, (end_s, cached) = prompts((0, fresh(10)), (10, fresh(12)))
    assert cached == 10
    assert end_s == pytest.approx(10 + 1 + 0.02 + 0.001 * (11 + 12))


def test_the_last_token_of_a_known_prompt_is_computed_again() -> None:
    _, (end_s, cached) = prompts((0, fresh(10)), (10, fresh(10)))
    assert cached == 9
    assert end_s == pytest.approx(10 + 1 + 0.01 + 0.01)


def test_prompts_that_wait_share_the_next_pass() -> None:
    ends = [
        end_s for end_s, _ in prompts((0, fresh(10, 1)), (0.5, fresh(10, 2)), (0.6, fresh(10, 3)))
    ]
    first_s = 1.155
    assert ends == pytest.approx([first_s, first_s + 1 + 0.2 + 0.11, first_s + 1 + 0.2 + 0.11])


def test_an_engine_may_take_one_prompt_at_a_time() -> None:
    costs = PrefillCosts(1.0, 0.0, prompts=1)
    ends = [
        end_s
        for end_s, _ in prompts(
            (0, fresh(10, 1)), (0, fresh(10, 2)), (0, fresh(10, 3)), costs=costs
        )
    ]
    assert ends == pytest.approx([1, 2, 3])


def test_a_long_prompt_takes_several_passes_and_the_rest_of_its_last_is_for_others() -> None:
    costs = PrefillCosts(1.0, 0.0, chunk_tokens=100)
    ends = [
        end_s
        for end_s, _ in prompts(
            (0, fresh(250, 1)), (0, fresh(40, 2)), (0, fresh(20, 3)), costs=costs
        )
    ]
    assert ends == pytest.approx([3, 3, 4])


def test_a_prompt_that_is_abandoned_is_not_computed() -> None:
    async def run() -> tuple[int, float]:
        engine = PrefillEngine(COSTS, Processor())
        first = asyncio.create_task(engine.prefill(fresh(10, 1)))
        second = asyncio.create_task(engine.prefill(fresh(50, 2)))
        await asyncio.sleep(0.1)
        second.cancel()
        await asyncio.wait([first, second])
        third = await engine.prefill(fresh(10, 3))
        assert third == 0
        return engine.computed, engine.busy_s

    computed, busy_s = run_virtual(run())
    assert computed == 20
    assert busy_s == pytest.approx(2 * 1.155)


@pytest.mark.parametrize(("new", "before"), [(1, 0), (1, 7), (5, 0), (5, 3)])
def test_each_new_token_attends_all_before_it_and_itself(new: int, before: int) -> None:
    assert attended_pairs(new, before) == sum(before + place + 1 for place in range(new))
