"""Agreeing clusters skip their aggregators, on real SGLang: two agents agree, a third never
ends."""

from time import monotonic

import aiohttp
import pytest

from agent_cache import MemoryAgentPromptCache
from shell_router.core.engine import ServedModel
from shell_router.core.events import AgentFinished, AggregationSkipped
from shell_router.engines.embedding import HashEmbedder
from shell_router.engines.sglang import SglangPair
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.moa.executor import Executor
from shell_router.moa.requests import MoaRequest
from shell_router.topology import parse_topology
from tests.fakes.moa import Recorder
from tests.fakes.pairs_under_test import ON_A_PAIR_AND_ON_A_SERVER, PairUnderTest, idle

pytestmark = [pytest.mark.sglang, ON_A_PAIR_AND_ON_A_SERVER]

SAID = "Answer: 42"
AGREEING = f"""name: agreeing
agents:
  a: {{model: small, sampling: {{regex: "{SAID}", max_new_tokens: 32}}}}
  b: {{model: small, sampling: {{regex: "{SAID}", max_new_tokens: 32}}}}
  c: {{model: small, sampling: {{max_new_tokens: 1400, ignore_eos: true}}}}
  root: {{model: small, precursors: [a, b, c]}}
early_exit: {{policy: in_flight, threshold: 0, skip_aggregation: on}}
"""


async def test_two_that_agree_end_the_run_with_their_answer(
    pair: SglangPair, real_sglang: PairUnderTest, session: aiohttp.ClientSession
) -> None:
    tokenizer = HfTokenizer.from_folder(real_sglang.needs_model())
    models = {"small": ServedModel("small", pair, tokenizer, real_sglang.context_length)}
    executor, events = (
        Executor(models, MemoryAgentPromptCache(clock=monotonic), HashEmbedder(), clock=monotonic),
        Recorder(),
    )
    request = MoaRequest("agreeing", "tenant", ({"role": "user", "content": "What is 6 times 7?"},))
    answer = await executor.run(
        parse_topology(AGREEING, source="agreeing.yaml"), request, events.emit
    )
    assert answer.text == SAID
    assert {name: usage.state for name, usage in answer.agents.items()} == {
        "a": "finished",
        "b": "finished",
        "c": "early_exit",
        "root": "skipped",
    }
    assert [passed.agent for passed in events.of(AggregationSkipped)] == ["root"]
    assert {finished.agent for finished in events.of(AgentFinished)} == {"a", "b"}
    await idle(session, *real_sglang.urls, limit_s=10)
