"""Runs with a key on real SGLang, which asks for a key of its own: routers are killed, and another
one goes on.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
import yaml

from launch.sglang_cpu.environment import built_environment
from launch.sglang_cpu.pair import cpu_pair
from tests.e2e.test_several_routers import LIMIT_S, Deployment, Seen
from tests.fakes.counting_proxy import counting_proxy
from tests.fakes.redis_server import RedisServer, own_redis

pytestmark = pytest.mark.sglang

redis = pytest.fixture(own_redis)

KEY = "the-engines-own"
TOKENS = 24
TREE = {
    "name": "tree",
    "tree": {"shape": [3, 1], "models": ["small"]},
    "defaults": {"sampling": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}},
    "prefill": {"incremental": True, "chunk_tokens": 8},
}


@pytest.fixture
async def served(
    environment: None, sglang_model: Path, redis: RedisServer, tmp_path: Path
) -> AsyncIterator[Deployment]:
    venv = built_environment()
    assert venv is not None
    with cpu_pair(sglang_model, venv, tmp_path / "pair", options=("--api-key", KEY)) as pair:
        async with (
            counting_proxy(pair.decode.url) as engine,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=LIMIT_S)) as client,
            AsyncExitStack() as stack,
        ):
            urls = {
                "prefill": pair.prefill.url,
                "decode": engine.url,
                "bootstrap_port": pair.bootstrap_port,
            }
            settings = {
                "models": {
                    "small": {"path": str(sglang_model), "engine_key": KEY, "pairs": [urls]}
                },
                "topologies": ["tree.yaml"],
                "embedder": {"model": "none"},
                "cache": {"backend": "redis", "url": redis.url, "lease_s": 1},
            }
            (tmp_path / "tree.yaml").write_text(yaml.safe_dump(TREE), encoding="utf-8")
            (tmp_path / "router.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
            yield Deployment(tmp_path / "router.yaml", engine, client, stack)


async def test_a_tree_on_engines_with_a_key_survives_its_router(served: Deployment) -> None:
    engine, (router, other) = served.engine, [await served.router() for _ in range(2)]
    async with served.client.post(
        f"{engine.url}/generate", json={"rid": "x.x", "text": "Hello"}
    ) as response:
        assert response.status == 401, "the engines ask for a key, and the router sends it"
    expected = await served.read(router, "", Seen())
    assert engine.passed == 4 * TOKENS
    for moment in (TOKENS, 3 * TOKENS + TOKENS // 2):
        engine.stop_after(moment)
        before = Seen()
        reading = asyncio.create_task(served.read(router, f"at-{moment}", before))
        async with asyncio.timeout(LIMIT_S):
            await engine.stopped.wait()
        router.command.kill()
        with pytest.raises(aiohttp.ClientError):
            await reading
        engine.release()
        router, other = other, await served.router()
        after = await served.read(router, f"at-{moment}", Seen())
        assert after.text == expected.text and len(after.finished) == 4
        assert {one: engine.asked[one] for one in before.finished} == dict.fromkeys(
            before.finished, 1
        )
        assert len(engine.asked) == 4 and 4 < engine.asked.total() <= 4 + 3
        assert min(engine.limits) < TOKENS, "what was running went on from its tokens"
