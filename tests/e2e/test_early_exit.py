"""Early exit on real engines: the stragglers' work ends there too."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from agent_cache.memory import MemoryAgentPromptCache
from shell_router.core.engine import Generation, ServedModel
from shell_router.core.events import AgentStopped
from shell_router.early_exit.settings import EarlyExit
from shell_router.engines.embedding import HashEmbedder
from shell_router.engines.sglang import SglangPair
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.moa.executor import Executor
from shell_router.moa.programs import Programs
from shell_router.moa.requests import AgentRequest, Answer, MoaRequest, OutputOf
from shell_router.topology import Topology, load_topology
from tests.fakes.moa import Recorder
from tests.fakes.pairs_under_test import PairUnderTest, embedded, held, idle

TREE = load_topology(Path("topologies/tree-9-3-1.yaml"))
STRAGGLERS = 5
LONG = 1400
Measured = Callable[[str, float], None]


@dataclass(frozen=True)
class Served:
    """A running pair, its client, and a session to ask its servers directly."""

    under_test: PairUnderTest
    pair: SglangPair
    session: aiohttp.ClientSession

    @property
    def urls(self) -> tuple[str, str]:
        return self.under_test.address.prefill_url, self.under_test.address.decode_url


@asynccontextmanager
async def client_of(under_test: PairUnderTest) -> AsyncIterator[Served]:
    pair = SglangPair(under_test.address)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(connector=connector) as session:
        await pair.fleet.probe()
        yield Served(under_test, pair, session)
        await pair.aclose()


@pytest_asyncio.fixture(params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    if request.param == "sglang":
        under_test = request.getfixturevalue("real_sglang")
    else:
        under_test = embedded(request.getfixturevalue("engines"), incremental=True)
    async with client_of(under_test) as client:
        yield client


async def test_a_straggler_that_is_cut_off_leaves_the_decode_server(
    served: Served, measured: Measured
) -> None:
    for straggler in range(STRAGGLERS):
        request = Generation(f"straggler.{straggler}", list(range(20, 400)), long_output())
        async with aclosing(served.pair.generate(request)) as stream:
            await anext(stream)
            while not await held(
                served.session, *served.urls
            ):  # SGLang tells its load every 15 steps of its decoding
                await anext(stream)
            cut_s = monotonic()
        gone_s = await idle(served.session, *served.urls, limit_s=10)
        measured("a straggler is gone from its engines after", gone_s - cut_s)


async def test_a_run_that_exits_early_ends_before_its_stragglers_and_leaves_nothing(
    served: Served, measured: Measured
) -> None:
    events = Recorder()
    question = ({"role": "user", "content": "Which number comes next?"},)

    answer = await executor_of(served).run(
        with_stragglers(TREE), MoaRequest("early", "test", question), events.emit
    )
    ended_s = monotonic()
    gone_s = await idle(served.session, *served.urls, limit_s=10)

    assert [stopped.why for stopped in events.of(AgentStopped)] == ["early_exit"] * 3
    assert all(usage.completion_tokens < LONG for usage in answer.agents.values())
    measured(
        "after a 9-3-1 run with three cut stragglers, its engines are idle after", gone_s - ended_s
    )


async def test_an_agent_request_that_exits_early_ends_its_last_precursor_on_the_engines(
    served: Served, measured: Measured
) -> None:
    programs = Programs(executor_of(served))

    def send(
        agent: str, tokens: int, *prompt: str | OutputOf, early_exit: EarlyExit | None = None
    ) -> asyncio.Task[Answer]:
        request = AgentRequest("test", "p", agent, "small", prompt)
        request = replace(
            request, sampling=long_output(tokens), confidence=True, early_exit=early_exit
        )
        return asyncio.create_task(programs.run(request, lambda event: None))

    late = send("late", LONG, "Write on.")
    others = [send(agent, 24, f"Be {agent}.") for agent in ("a", "b")]
    read = [OutputOf(agent) for agent in ("a", "late", "b")]
    exits = EarlyExit(policy="threshold", threshold=0)
    await send("reader", 8, *read, early_exit=exits)
    cut = await late
    ended_s = monotonic()
    gone_s = await idle(served.session, *served.urls, limit_s=10)
    await asyncio.gather(*others)

    assert (cut.reason, cut.agents["late"].state) == ("abort", "early_exit")
    assert cut.agents["late"].completion_tokens < LONG
    measured("after an agent request's exit, its engines are idle after", gone_s - ended_s)


def executor_of(served: Served) -> Executor:
    """An executor that serves every alias by the one pair."""
    tokenizer = HfTokenizer.from_folder(served.under_test.needs_model())
    length = served.under_test.context_length
    models = {
        alias: ServedModel(alias, served.pair, tokenizer, length)
        for alias in ("small", "medium", "large")
    }
    return Executor(
        models, MemoryAgentPromptCache(clock=monotonic), HashEmbedder(), clock=monotonic
    )


def long_output(new_tokens: int = LONG) -> Mapping[str, Any]:
    return {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}


def with_stragglers(topology: Topology) -> Topology:
    """Each cluster of leaves exits at its second completion, and its last agent would write far
    longer.
    """
    exits = EarlyExit(policy="threshold", threshold=0, min_completed=2)
    leaves = set(topology.layers[0])
    judged = [
        replace(found, early_exit=exits)
        for found in topology.clusters
        if leaves.issuperset(found.agents)
    ]
    last = {cluster.agents[-1] for cluster in judged}
    agents = {
        name: replace(agent, sampling=long_output(LONG if name in last else 24))
        for name, agent in topology.agents.items()
    }
    return replace(topology, agents=agents, clusters=tuple(judged))
