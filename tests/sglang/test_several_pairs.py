"""Two real pairs of one model: any of their servers work together, one may come and go, and one may
die.
"""

import asyncio
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from launch.sglang_cpu.pair import CpuPair
from shell_router.app import serve_deployment
from shell_router.config import (
    Config,
    EmbedderSettings,
    Limits,
    Listen,
    ModelSettings,
    PairSettings,
)
from shell_router.core.engine import TIERS, Finish, Generation, Hints, ServiceTier, Tokens
from shell_router.engines.sglang import SglangPair, random_rid
from tests.fakes.pairs_under_test import address_of
from tests.sglang.conftest import AdaptedPair

pytestmark = pytest.mark.sglang

PROMPT = [40 + at for at in range(60)]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
STREAMS, TOKENS = 8, 60


@pytest.fixture
def second(adapted_sglang: AdaptedPair) -> CpuPair:
    """A pair of the same model; what a test killed of it is started again."""
    adapted_sglang.servers.start()
    return adapted_sglang.servers


async def answer(pool: SglangPair, affinity: str) -> tuple[int, ...]:
    """The output's ids."""
    request = Generation(random_rid(), PROMPT, GREEDY, affinity=affinity)
    events = [event async for event in pool.generate(request)]
    assert isinstance(events[-1], Finish)
    return tuple(token for event in events if isinstance(event, Tokens) for token in event.ids)


async def test_a_router_is_given_a_pair_and_drains_another_under_streams_and_none_is_harmed(
    own_sglang: CpuPair, second: CpuPair, sglang_model: Path, session: aiohttp.ClientSession
) -> None:
    def named(pair: CpuPair) -> dict[str, Any]:
        return {"prefill": pair.prefill.url, "decode": pair.decode.url}

    first, added = (
        {**named(pair), "bootstrap_port": pair.bootstrap_port} for pair in (own_sglang, second)
    )
    config = Config(
        {"small": ModelSettings(sglang_model, pairs=(PairSettings(**first),))},
        embedder=EmbedderSettings("none"),
        listen=Listen(port=0),
        limits=Limits(engine_attempts=1),  # nothing is sent again: what is harmed shows
    )
    async with (
        serve_deployment(config) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai,
    ):
        over, ended = asyncio.Event(), asyncio.Semaphore(0)

        async def drain(wait_s: float) -> tuple[int, Any]:
            params = {"model": "small", **named(own_sglang), "wait_s": str(wait_s)}
            async with session.delete(f"{url}/v1/engines", params=params) as reply:
                return reply.status, await reply.json()

        async def stream() -> None:
            while not over.is_set():
                asked: Any = {
                    "model": "small",
                    "messages": [{"role": "user", "content": "Rain?"}],
                    "stream": True,
                }
                asked |= {"max_tokens": TOKENS, "stream_options": {"include_usage": True}}
                replies = await ai.chat.completions.create(**asked, extra_body={"ignore_eos": True})
                chunks = [chunk async for chunk in replies]
                assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == TOKENS
                ended.release()

        async def until_ended(count: int) -> None:
            for _ in range(count):
                await ended.acquire()

        async with asyncio.TaskGroup() as group:
            for _ in range(STREAMS):
                group.create_task(stream())
            await until_ended(STREAMS)
            async with session.post(
                f"{url}/v1/engines", json={"model": "small", "pair": added}
            ) as reply:
                assert reply.status == 201, await reply.json()
            await until_ended(2 * STREAMS)
            status, body = await drain(0)
            assert (status, body["running"] > 0) == (202, True)
            gone = (200, {"model": "small", **named(own_sglang), "running": 0})
            assert await drain(60) == gone and await drain(0) == gone
            async with session.get(f"{url}/v1/engines") as reply:
                assert (await reply.json())["data"] == [{"model": "small", **named(second)}]
            await until_ended(2 * STREAMS)
            over.set()


async def test_servers_of_two_pairs_work_together_and_outlive_a_dead_prefill(
    own_sglang: CpuPair, second: CpuPair
) -> None:
    pool = SglangPair(address_of(own_sglang), address_of(second))
    assert await pool.fleet.probe() == ("route", "route")
    answers = {
        (affinity, turn): await answer(
            pool, affinity
        )  # the prefill server stays, the decode servers take turns
        for affinity, turn in product("ab", range(4))
    }
    assert len(set(answers.values())) == 1 and len(answers["a", 0]) == 8
    second.prefill.kill()
    for affinity in "abcdef":
        assert await answer(pool, affinity) == answers["a", 0]
    assert pool.fleet.retried >= 1
    await pool.aclose()


async def test_a_pair_that_schedules_by_priority_takes_each_class(second: CpuPair) -> None:
    pool = SglangPair(address_of(second))
    await pool.fleet.probe()
    assert pool.fleet.tier_fields("priority") == {"priority": 1}

    async def write(tier: ServiceTier) -> Finish:
        request = Generation(random_rid(), PROMPT, GREEDY, hints=Hints(tier=tier))
        *_, finish = [event async for event in pool.generate(request)]
        assert isinstance(finish, Finish)
        return finish

    finishes = await asyncio.gather(*map(write, TIERS))
    assert [finish.completion_tokens for finish in finishes] == [8] * 3
    await pool.aclose()
