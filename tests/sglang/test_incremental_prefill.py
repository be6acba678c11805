"""The end-to-end promises of incremental prefill and early exit, on real SGLang."""

from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import pytest

from agent_cache.memory import MemoryAgentPromptCache
from shell_router.core.events import AgentStopped
from shell_router.core.generation import Generation
from shell_router.core.model import ServedModel
from shell_router.early_exit.settings import EarlyExit
from shell_router.engines.embedder import HashEmbedder
from shell_router.engines.pair import SglangPair
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.execution import Executor, MoaRequest
from shell_router.topology import Prefill, Topology, load_folder
from tests.e2e.test_incremental_prefill import QUESTIONS, assert_cache_is_hit, greedy, run_all
from tests.fakes.engine_loads import held, idle
from tests.fakes.pairs_under_test import PairUnderTest
from tests.fakes.recorder import Recorder

pytestmark = pytest.mark.sglang

TOPOLOGIES = load_folder(Path("topologies"))
Measured = Callable[[str, float], None]
PROMPTS = 4
STRAGGLERS = 5


def executor_of(pair: SglangPair, under_test: PairUnderTest) -> Executor:
    """An executor that serves every alias by the one pair."""
    tokenizer = HfTokenizer.from_folder(under_test.needs_model())
    models = {
        alias: ServedModel(alias, pair, tokenizer, under_test.context_length) for alias in ("small", "medium", "large")
    }
    return Executor(models, MemoryAgentPromptCache(clock=monotonic), HashEmbedder(), clock=monotonic)


@pytest.mark.parametrize("name", TOPOLOGIES)
async def test_outputs_are_the_same_with_incremental_prefill_and_its_cache_is_hit(
    pair: SglangPair, real_sglang: PairUnderTest, name: str
) -> None:
    executor = executor_of(pair, real_sglang)
    topology = greedy(TOPOLOGIES[name], incremental=True, new_tokens=32)

    with_it = await run_all(executor, topology, f"{name}-on", PROMPTS)
    without = await run_all(executor, replace(topology, prefill=Prefill(incremental=False)), f"{name}-off", PROMPTS)

    assert [outcome.outputs for outcome in with_it] == [outcome.outputs for outcome in without]
    assert all(len(ids) for outcome in with_it for ids in outcome.outputs.values())
    assert_cache_is_hit(topology, with_it)


async def test_prefill_only_goes_by_the_plugins_route(pair: SglangPair) -> None:
    assert pair.prefill_way == "route"


async def test_an_early_exited_straggler_leaves_the_decode_server(
    pair: SglangPair, real_sglang: PairUnderTest, session: aiohttp.ClientSession, measured: Measured
) -> None:
    decode_url = real_sglang.address.decode_url
    for straggler in range(STRAGGLERS):
        request = Generation(f"straggler-{straggler}", list(range(20, 400)), long_output(4000))
        async with aclosing(pair.generate(request)) as stream:
            for _ in range(3):  # SGLang's loads show a request one step after its first token
                await anext(stream)
            assert await held(session, decode_url) == 1
            cut_s = monotonic()
        gone_s = await idle(session, decode_url, limit_s=10)
        measured("a straggler is gone from the decode server after", gone_s - cut_s)


async def test_a_run_that_exits_early_ends_before_its_stragglers_and_leaves_nothing(
    pair: SglangPair, real_sglang: PairUnderTest, session: aiohttp.ClientSession, measured: Measured
) -> None:
    decode_url = real_sglang.address.decode_url
    executor = executor_of(pair, real_sglang)
    topology = with_stragglers(TOPOLOGIES["tree-9-3-1"])
    events = Recorder()
    chat = ({"role": "user", "content": QUESTIONS[0]},)

    await executor.run(topology, MoaRequest("early", "test", chat), events.emit)
    ended_s = monotonic()
    gone_s = await idle(session, decode_url, limit_s=10)

    assert [stopped.why for stopped in events.of(AgentStopped)].count("early_exit") == 3
    measured("after a 9-3-1 run with three cut stragglers, decode is idle after", gone_s - ended_s)


def long_output(new_tokens: int) -> Mapping[str, Any]:
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}


def with_stragglers(topology: Topology) -> Topology:
    """Each cluster of leaves exits at its second completion, and its last agent would run for minutes."""
    exits = EarlyExit(policy="threshold", threshold=0, min_completed=2)
    leaves = set(topology.layers[0])
    judged = [replace(found, early_exit=exits) for found in topology.clusters if leaves.issuperset(found.agents)]
    last = {cluster.agents[-1] for cluster in judged}
    agents = {
        name: replace(agent, sampling=long_output(6000 if name in last else 24))
        for name, agent in topology.agents.items()
    }
    return replace(topology, agents=agents, clusters=tuple(judged))
