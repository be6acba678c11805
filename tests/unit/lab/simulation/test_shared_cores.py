"""Host costs per token, which delay engines only where they share the machine's cores."""

import asyncio
from dataclasses import replace

import pytest

from shell_router.core.engine import Generation
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.standins.simulated.costs import DecodeCosts, PairCosts, PrefillCosts
from shell_router.standins.simulated.pair import SimulatedPair
from shell_router.standins.simulated.processor import Processor
from shell_router.standins.simulated.text import SimulatedEmbedder, Written

COSTS = PairCosts(PrefillCosts(0.0, 0.0), DecodeCosts(0.01))
WITH_HOST_COST = replace(COSTS, decode=DecodeCosts(0.01, host_s_per_token=0.005))
EVERY_TOKEN = {"stream_interval": 1}


def ten(_request: Generation) -> Written:
    return Written(("x",) * 11, (1,) * 11, -0.1)


def seconds(costs: PairCosts, cores: float | None) -> float:
    async def run() -> float:
        loop = asyncio.get_running_loop()
        shared = None if cores is None else Processor(cores)
        pair = SimulatedPair(
            costs, ten, prefill_processor=shared, decode_processor=shared, host=shared
        )
        async for _ in pair.generate(Generation("a", [1, 2, 3], EVERY_TOKEN)):
            pass
        return loop.time()

    return run_virtual(run())


def test_the_host_cost_of_a_token_delays_no_sequence_on_an_engine_of_its_own() -> None:
    assert (
        seconds(WITH_HOST_COST, None) == pytest.approx(seconds(COSTS, None)) == pytest.approx(0.1)
    )


def test_it_delays_none_where_a_core_is_free() -> None:
    assert seconds(WITH_HOST_COST, 2) == pytest.approx(0.1)


def test_it_slows_the_engine_that_has_to_share_its_only_core() -> None:
    assert seconds(WITH_HOST_COST, 1) == pytest.approx(0.1 + 9 * 0.005)


def test_an_embedding_slows_the_engines_that_share_its_core() -> None:
    async def run(processor: Processor | None) -> float:
        loop = asyncio.get_running_loop()
        shared = processor or Processor()
        embedder = SimulatedEmbedder(0.8, 0.5, request_s=0.04, processor=processor)
        embedding = asyncio.create_task(embedder.embed("What?"))
        worked = asyncio.Event()
        shared.start(0.1, worked.set)
        await worked.wait()
        await embedding
        return loop.time()

    async def both() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        alone_s = await run(None)
        begun_s = loop.time()
        await run(Processor(1))
        return alone_s, loop.time() - begun_s

    alone_s, shared_s = run_virtual(both())
    assert alone_s == pytest.approx(0.1)
    assert shared_s == pytest.approx(0.14)
