"""Steps on real SGLang: confidence from its log probabilities, a tree in a step, a step that reads
another.
"""

from pathlib import Path
from time import monotonic

import pytest

from agent_cache import MemoryAgentPromptCache
from shell_router.core.engine import ServedModel
from shell_router.core.events import StepChosen
from shell_router.engines.embedding import HashEmbedder
from shell_router.engines.sglang import SglangPair
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.moa.executor import Executor
from shell_router.moa.requests import MoaRequest
from shell_router.topology import load_topology
from tests.fakes.moa import Recorder
from tests.fakes.pairs_under_test import ON_A_PAIR_AND_ON_A_SERVER, PairUnderTest
from tests.fakes.topologies import parse_steps

pytestmark = [pytest.mark.sglang, ON_A_PAIR_AND_ON_A_SERVER]

STEPS = """name: steps
start: quick
steps:
  quick: {model: small, then: [{when: {confidence_below: 1}, go: whole}]}
  whole: {topology: tiny, then: [{when: {confidence_below: 0.000001}, go: end}, {go: last}]}
  last: {model: large, precursors: [quick, whole]}
defaults: {sampling: {max_new_tokens: 8, temperature: 0}}
"""


async def test_steps_take_the_way_that_confidence_chooses(
    pair: SglangPair, real_sglang: PairUnderTest
) -> None:
    tokenizer = HfTokenizer.from_folder(real_sglang.needs_model())
    models = {
        alias: ServedModel(alias, pair, tokenizer, real_sglang.context_length)
        for alias in ("small", "medium", "large")
    }
    agents = Executor(
        models, MemoryAgentPromptCache(clock=monotonic), HashEmbedder(), clock=monotonic
    )
    tiny = load_topology(Path("topologies/tiny.yaml"))
    graph, events = parse_steps(STEPS, source="steps.yaml", topologies={"tiny": tiny}), Recorder()
    request = MoaRequest("run", "tenant", ({"role": "user", "content": "How many stamps?"},))
    answer = await agents.run(graph, request, events.emit)
    assert [event.step for event in events.of(StepChosen)] == ["quick", "whole", "last", "end"]
    assert list(answer.agents) == ["quick", *(f"whole/{agent}" for agent in tiny.agents), "last"]
    assert all(spent.completion_tokens for spent in answer.agents.values())
