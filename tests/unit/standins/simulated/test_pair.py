import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from shell_router.core.engine import Finish, Generation, Tokens
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.routing.placement import EngineReport
from shell_router.standins.simulated.costs import (
    DecodeCosts,
    PairCosts,
    PrefillCosts,
    TransferCosts,
)
from shell_router.standins.simulated.pair import SimulatedPair
from shell_router.standins.simulated.processor import Processor
from shell_router.standins.simulated.text import SimulatedTokenizer, Written

COSTS = PairCosts(
    PrefillCosts(1.0, 0.0, prompts=1), DecodeCosts(0.1, cache_tokens=100), TransferCosts(0.5, 0.01)
)
OUTPUT = Written.of("一丁丂七 word", math.log(0.5))


def pair(costs: PairCosts = COSTS) -> SimulatedPair:
    return SimulatedPair(costs, lambda _request: OUTPUT)


async def answer(
    engine: SimulatedPair, request: Generation
) -> tuple[list[tuple[float, Tokens]], Finish]:
    loop, on_progress = asyncio.get_running_loop(), list[tuple[float, Tokens]]()
    async with aclosing(engine.generate(request)) as stream:
        async for item in stream:
            if isinstance(item, Finish):
                return on_progress, item
            on_progress.append((loop.time(), item))
    raise AssertionError("it ended without its last event")


def test_a_request_is_prefilled_handed_over_and_decoded() -> None:
    async def run() -> tuple[list[tuple[float, Tokens]], Finish]:
        return await answer(pair(), Generation("r", range(10)))

    on_progress, finish = run_virtual(run())
    assert [at_s for at_s, _ in on_progress] == pytest.approx([1.6, 1.7, 1.8, 1.9, 2.0, 2.1])
    assert "".join(one.text for _, one in on_progress) == "一丁丂七 word"
    assert [number for _, one in on_progress for number in one.ids] == SimulatedTokenizer().encode(
        "一丁丂七 word"
    )
    assert all(one.logprobs == () for _, one in on_progress)
    assert finish == Finish("stop", 10, 6, 0)


def test_it_is_cut_at_the_longest_output_and_sent_in_the_pieces_that_are_asked_for() -> None:
    async def run() -> tuple[list[tuple[float, Tokens]], Finish]:
        sampling = {"max_new_tokens": 5, "stream_interval": 3}
        return await answer(pair(), Generation("r", range(10), sampling, logprobs=True))

    on_progress, finish = run_virtual(run())
    assert [len(one.ids) for _, one in on_progress] == [1, 3, 1]
    assert {logprob for _, one in on_progress for logprob in one.logprobs} == {math.log(0.5)}
    assert finish == Finish("length", 10, 5, 0)


def test_what_was_prefilled_before_is_reported_as_cached() -> None:
    async def run() -> tuple[int, int, int]:
        engine = pair()
        first = await engine.prefill(Generation("p0", range(8)))
        second = await engine.prefill(Generation("p1", range(9)))
        _, finish = await answer(engine, Generation("r", range(12)))
        return first.cached_tokens, second.cached_tokens, finish.cached_tokens

    assert run_virtual(run()) == (0, 8, 9)


def test_a_request_claims_its_room_before_it_is_prefilled() -> None:
    async def run() -> list[float]:
        engine, loop = pair(), asyncio.get_running_loop()

        async def one(first: int) -> float:
            on_progress, _ = await answer(engine, Generation(str(first), [first] * 60))
            del on_progress
            return loop.time()

        return await asyncio.gather(one(1), one(2))

    # each holds 66 of 100 tokens: the second's prefill waits until the first is done
    assert run_virtual(run()) == pytest.approx([1 + 1.1 + 0.5, 2 * (1 + 1.1 + 0.5)])


def test_a_pair_reports_what_is_taken_and_what_waits() -> None:
    async def run() -> list[EngineReport]:
        engine, reports = pair(), list[EngineReport]()
        answers = [
            asyncio.create_task(answer(engine, Generation(str(first), [first] * 60)))
            for first in range(3)
        ]
        await asyncio.sleep(0.5)
        reports.append(engine.report_load())
        answers[1].cancel()
        await asyncio.wait([answers[1]])
        reports.append(engine.report_load())
        await asyncio.wait(answers)
        return [*reports, engine.report_load()]

    # the first holds its prompt and the 6 tokens that it will write
    assert run_virtual(run()) == [
        EngineReport(0.66, 66 + 120, 1, 2),
        EngineReport(0.66, 66 + 60, 1, 1),
        EngineReport(0.0, 0, 0, 0),
    ]


@pytest.mark.parametrize("after_s", [0.0, 0.5, 1.2, 1.65])
def test_an_abandoned_request_gives_its_room_back(after_s: float) -> None:
    async def run() -> Sequence[float]:
        engine, loop = pair(), asyncio.get_running_loop()
        leaving = asyncio.create_task(answer(engine, Generation("leaves", range(90))))
        await asyncio.sleep(after_s)
        leaving.cancel()
        await asyncio.wait([leaving])
        begun_s = loop.time()
        await answer(engine, Generation("stays", range(500, 590)))
        return [loop.time() - begun_s]

    (took_s,) = run_virtual(run())
    assert took_s <= 1 + 0.5 + 0.9 + 0.5 + 1.0 + 1e-6, "at most a pass that had begun is waited for"


@pytest.mark.parametrize(
    ("one_engine", "expected"),
    [
        # the second prompt's pass, from 1.65 to 2.65, does not disturb a decode engine of its own
        ("apart", 2.1),
        ("prefill_first", 3.1),
        ("shared", 2.6),
    ],
)
def test_one_engine_that_does_both_decodes_slower_while_it_prefills(
    one_engine: str, expected: float
) -> None:
    async def run() -> float:
        gpu = Processor()
        engine = SimulatedPair(
            COSTS,
            lambda _request: OUTPUT,
            prefill_processor=gpu if one_engine == "shared" else None,
            decode_processor=gpu,
            prefill_first=one_engine == "prefill_first",
        )

        async def other() -> None:
            await asyncio.sleep(1.65)
            await engine.prefill(Generation("other", range(100, 110)))

        disturbing = asyncio.create_task(other())
        on_progress, _ = await answer(engine, Generation("r", range(10)))
        await disturbing
        return on_progress[-1][0]

    assert run_virtual(run()) == pytest.approx(expected, abs=0.06)


def test_on_shared_cores_what_hands_kv_over_slows_others_down() -> None:
    async def run() -> list[float]:
        loop, cores = asyncio.get_running_loop(), Processor(1)
        engine = SimulatedPair(COSTS, lambda _request: OUTPUT, prefill_processor=cores, host=cores)

        async def first_token_s(name: str) -> float:
            await answer(engine, Generation(name, [ord(name)] * 10, {"max_new_tokens": 1}))
            return loop.time()

        return await asyncio.gather(first_token_s("a"), first_token_s("b"))

    # a's 0.6 s of transfer take 1.2 s while b is prefilled, whose last 0.4 s and transfer then run
    # alone
    assert run_virtual(run()) == pytest.approx([2.2, 3.2])


def test_a_request_that_is_abandoned_while_its_kv_goes_over_leaves_the_cores() -> None:
    async def run() -> float:
        loop, cores = asyncio.get_running_loop(), Processor(1)
        engine = SimulatedPair(COSTS, lambda _request: OUTPUT, host=cores)
        abandoned = asyncio.create_task(
            answer(engine, Generation("a", range(10), {"max_new_tokens": 1}))
        )
        await asyncio.sleep(1.1)
        abandoned.cancel()
        done = loop.create_future()
        cores.start(1.0, lambda: done.set_result(None))
        await done
        return loop.time()

    assert run_virtual(run()) == pytest.approx(2.1)


TIGHT = PairCosts(
    PrefillCosts(0.0, 0.001),
    DecodeCosts(0.1, cache_tokens=26, reserved_tokens=0),
    TransferCosts(0.5, 0.01),
)
"""Room for two prompts of ten tokens and for six that are written, where each writes six."""


async def ends_s(engine: SimulatedPair, *prompts: int) -> list[float]:
    """When requests end that come at once, with prompts of these token counts."""
    loop = asyncio.get_running_loop()

    async def one(number: int, tokens: int) -> float:
        ids = range(1000 * number, 1000 * number + tokens)
        on_progress, finish = await answer(
            engine, Generation(str(number), ids, {"stream_interval": 4})
        )
        assert "".join(one.text for _, one in on_progress) == "一丁丂七 word"
        assert finish == Finish("stop", tokens, 6, 0)
        return loop.time()

    return await asyncio.gather(*(one(number, tokens) for number, tokens in enumerate(prompts)))


def test_what_decode_takes_back_comes_back_as_fast_as_kv_goes_over() -> None:
    async def run() -> list[float]:
        return await ends_s(pair(TIGHT), 10, 10)

    first, second = run_virtual(run())
    # the second joins a step after the first; with 13 and 12 tokens the next step does not fit
    assert first == pytest.approx(0.01 + 0.6 + 0.5)
    assert second == pytest.approx(first + 12 * 0.01 + 4 * 0.1)


def test_what_an_engine_that_does_both_takes_back_is_prefilled_anew_with_what_was_written() -> None:
    async def run() -> tuple[list[float], int, int]:
        gpu = Processor()
        engine = SimulatedPair(
            TIGHT,
            lambda _request: OUTPUT,
            prefill_processor=gpu,
            decode_processor=gpu,
            one_engine=True,
        )
        return await ends_s(engine, 10, 10), engine.prefilling.computed, engine.decoding.preemptions

    (first, second), computed, preemptions = run_virtual(run())
    assert preemptions == 1
    assert computed == 20 + 2, "the prompt was still in the prefix cache"
    assert second == pytest.approx(first + 2 * 0.001 + 3 * 0.1), "its third token comes with the KV"


@pytest.mark.parametrize("others", [0, 1])
def test_a_preempted_sequence_continues_when_another_leaves_at_that_moment(others: int) -> None:
    """The pieces of `others`, who stay, decide nothing."""
    decode = DecodeCosts(0.1, cache_tokens=26 + 22 * others, reserved_tokens=0)
    costs = PairCosts(PrefillCosts(0.0, 0.0), decode, TransferCosts())

    def ended_s(interval: int) -> float:
        async def run() -> float:
            engine = SimulatedPair(costs, lambda _request: Written.of("一" * 16, 0.0))

            async def leaves() -> None:
                async with aclosing(engine.generate(Generation("leaves", range(10)))) as stream:
                    async for _ in stream:
                        if engine.decoding.preemptions:
                            return

            async def stays(first: int) -> None:
                await answer(
                    engine,
                    Generation(f"stays {first}", [first] * 10, {"stream_interval": interval}),
                )

            staying = [asyncio.create_task(stays(1000 + number)) for number in range(others)]
            leaving = asyncio.create_task(leaves())
            goes_on = asyncio.create_task(answer(engine, Generation("goes on", range(100, 110))))
            await leaving
            assert engine.decoding.preemptions == 1
            await goes_on
            end_s = asyncio.get_running_loop().time()
            await asyncio.gather(*staying)
            assert engine.report_load() == EngineReport(0.0, 0, 0, 0)
            return end_s

        return run_virtual(run())

    assert ended_s(interval=1000) == pytest.approx(ended_s(interval=1))


def test_a_request_that_is_abandoned_while_its_room_is_taken_leaves_nothing() -> None:
    async def run() -> tuple[int, tuple[int, int]]:
        engine = pair(TIGHT)
        stays = asyncio.create_task(answer(engine, Generation("stays", range(10))))
        leaves = asyncio.create_task(answer(engine, Generation("leaves", range(100, 110))))
        await asyncio.sleep(0.95)
        assert engine.decoding.requests == (1, 1)
        leaves.cancel()
        await asyncio.wait([leaves, stays])
        return engine.decoding.used_tokens, engine.decoding.requests

    assert run_virtual(run()) == (0, (0, 0))
