"""The end-to-end promises of incremental prefill, on real SGLang."""

from dataclasses import replace
from time import monotonic

import pytest

from agent_cache.memory import MemoryAgentPromptCache
from shell_router.core.engine import ServedModel
from shell_router.engines.embedding import HashEmbedder
from shell_router.engines.sglang import SglangPair
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.moa.executor import Executor
from shell_router.topology import Prefill
from tests.e2e.test_incremental_prefill import (
    TOPOLOGIES,
    Pace,
    PacedEngine,
    assert_cache_is_hit,
    greedy,
    run_all,
)
from tests.fakes.pairs_under_test import ON_A_PAIR_AND_ON_A_SERVER, PairUnderTest

pytestmark = [pytest.mark.sglang, ON_A_PAIR_AND_ON_A_SERVER]

PROMPTS = 4


def executor_of(pair: SglangPair, under_test: PairUnderTest) -> Executor:
    """An executor that serves every alias by the one pair."""
    tokenizer = HfTokenizer.from_folder(under_test.needs_model())
    engine = PacedEngine(pair, Pace())
    models = {
        alias: ServedModel(alias, engine, tokenizer, under_test.context_length)
        for alias in ("small", "medium", "large")
    }
    return Executor(
        models, MemoryAgentPromptCache(clock=monotonic), HashEmbedder(), clock=monotonic
    )


@pytest.mark.parametrize("name", TOPOLOGIES)
async def test_outputs_are_the_same_with_incremental_prefill_and_its_cache_is_hit(
    pair: SglangPair, real_sglang: PairUnderTest, name: str
) -> None:
    executor = executor_of(pair, real_sglang)
    topology = greedy(TOPOLOGIES[name], incremental=True, new_tokens=96)

    with_it = await run_all(executor, topology, f"{name}-on", PROMPTS)
    without = await run_all(
        executor, replace(topology, prefill=Prefill(incremental=False)), f"{name}-off", PROMPTS
    )

    assert [outcome.outputs for outcome in with_it] == [outcome.outputs for outcome in without]
    assert all(len(ids) for outcome in with_it for ids in outcome.outputs.values())
    assert_cache_is_hit(with_it)


async def test_prefill_only_goes_by_the_plugins_route(pair: SglangPair) -> None:
    assert pair.fleet.prefill_ways == ("route",)
