"""The engine of benchmarks/gimbal.py that works as vLLM's scheduler does."""

import asyncio
from collections.abc import Callable, Sequence

import pytest

from benchmarks.gimbal.serving import Together
from shell_router.core.engine import Finish, Generation
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.standins.simulated.costs import DecodeCosts, PairCosts, PrefillCosts
from shell_router.standins.simulated.text import Written

Progress = list[tuple[float, int]]
OUTPUT = 5


def costs(cache_tokens: int) -> PairCosts:
    return PairCosts(
        PrefillCosts(1.0, 0.1, chunk_tokens=8), DecodeCosts(1.0, cache_tokens=cache_tokens)
    )


def progress_of(
    *asked: tuple[float, int, int],
    cache_tokens: int = 1000,
    in_step: bool = False,
    experts: Callable[[int], float] | None = None,
) -> tuple[list[Progress], int]:
    """Per request (at, engine, prompt tokens) when it had how many tokens, and the number of
    preemptions.
    """

    def write(_request: Generation) -> Written:
        return Written(("",) * OUTPUT, tuple(range(OUTPUT)), 0.0)

    async def run() -> tuple[list[Progress], int]:
        loop = asyncio.get_running_loop()
        engines = Together(costs(cache_tokens), write, 2, in_step=in_step, experts=experts)
        steps = asyncio.create_task(engines.run())

        async def one(at_s: float, engine: int, prompt: int) -> Progress:
            await asyncio.sleep(at_s)
            found: Progress = []
            written = 0
            async for item in engines.engines[engine].generate(
                Generation("r", range(prompt), {"stream_interval": 1})
            ):
                if not isinstance(item, Finish):
                    written += len(item.ids)
                    found.append((round(loop.time(), 6), written))
            return found

        done: Sequence[Progress] = await asyncio.gather(*(one(*each) for each in asked))
        steps.cancel()
        return list(done), sum(engine.preemptions for engine in engines.engines)

    return run_virtual(run())


def test_a_request_has_its_first_token_after_its_prompt_and_one_more_with_every_step() -> None:
    (one,), _ = progress_of((0.0, 0, 4))
    assert one == [(1.4, 1), (2.4, 2), (3.4, 3), (4.4, 4), (5.4, 5)]


def test_a_prompt_is_prefilled_in_chunks_next_to_what_decodes() -> None:
    (first, second), _ = progress_of((0.0, 0, 4), (0.5, 0, 10))
    # the budget of eight tokens holds one that is decoded and seven of the prompt, then one and
    # three
    assert [at_s for at_s, _ in first] == [1.4, 1.4 + 1.8, 1.4 + 1.8 + 1.4, 5.6, 6.6]
    assert second[0] == (1.4 + 1.8 + 1.4, 1)


def test_the_latest_request_loses_its_kv_and_is_prefilled_anew_with_what_it_wrote() -> None:
    (first, second), preemptions = progress_of((0.0, 0, 3), (0.0, 0, 3), cache_tokens=10)
    assert preemptions == 1
    assert (
        [written for _, written in first] == [written for _, written in second] == [1, 2, 3, 4, 5]
    )
    assert first[-1][0] == pytest.approx(1.6 + 4)
    assert second[3][0] == pytest.approx(first[-1][0] + 1.6), "its prompt and three tokens"


def test_engines_in_step_all_wait_for_the_slowest() -> None:
    asked = ((0.0, 0, 4), (1.2, 1, 8))
    (alone, _), _ = progress_of(*asked)
    (waits, _), _ = progress_of(*asked, in_step=True)
    assert [at_s for at_s, _ in alone] == [1.4, 2.4, 3.4, 4.4, 5.4]
    assert [at_s for at_s, _ in waits] == [1.4, 1.4 + 1.8, 4.2, 5.2, 6.2]


def test_experts_lengthen_a_step_by_the_tokens_of_all_engines_in_it() -> None:
    (first, second), _ = progress_of(
        (0.0, 0, 4), (0.0, 1, 8), in_step=True, experts=lambda tokens: tokens / 4
    )
    assert [at_s for at_s, _ in first] == [at_s for at_s, _ in second] == [4.8, 6.3, 7.8, 9.3, 10.8]
