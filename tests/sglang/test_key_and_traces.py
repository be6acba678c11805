"""Real SGLang that asks for a key of its own and tells its spans.

Routers are killed, and another one goes on with their runs. SGLang's spans of a request lie under
the span that the router sends.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson
import pytest
import pytest_asyncio
import yaml
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from redis.asyncio import Redis

from launch.sglang_cpu.environment import BUILD_COMMAND, built_environment
from launch.sglang_cpu.pair import CpuPair, cpu_pair
from shell_router.core.spans import CURRENT, SpanContext
from shell_router.engines.sglang import SglangPair
from tests.e2e.test_several_routers import LIMIT_S, Deployment, Seen
from tests.fakes.counting_proxy import counting_proxy
from tests.fakes.otlp_receiver import Receiver, receiver
from tests.fakes.pairs_under_test import address_of
from tests.fakes.redis_server import RedisServer, own_redis
from tests.fakes.scripted_pair import collect, generation, until

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]

redis = pytest.fixture(own_redis)

KEY = "the-engines-own"
TOKENS = 24
TREE = {
    "name": "tree",
    "tree": {"shape": [3, 1], "models": ["small"]},
    "defaults": {"sampling": {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}},
    "prefill": {"incremental": True, "chunk_tokens": 8},
}
TRACING = (
    "opentelemetry-sdk",
    "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry-exporter-otlp-proto-http",
)
"""What SGLang's extra `tracing` brings."""


@dataclass(frozen=True)
class Guarded:
    """A pair that asks for KEY, and the receiver of its spans."""

    servers: CpuPair
    receiver: Receiver


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(
    sglang_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Guarded]:
    venv = built_environment()
    if venv is None:
        pytest.skip(f"real SGLang is not built for these tests: {BUILD_COMMAND}")
    folder = tmp_path_factory.mktemp("guarded")
    pip = (sys.executable, "-m", "pip", "install", "-q")
    install = (*pip, "--target", str(folder / "site"), *TRACING)
    await asyncio.to_thread(subprocess.run, install, check=True)
    async with receiver() as spans:
        with ExitStack() as stack:
            variables = stack.enter_context(pytest.MonkeyPatch.context())
            variables.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
            options = ("--api-key", KEY, "--enable-trace", "--otlp-traces-endpoint", spans.url)
            pair = cpu_pair(sglang_model, venv, folder, options=options)
            servers = await asyncio.to_thread(stack.enter_context, pair)
            yield Guarded(servers, spans)


@pytest_asyncio.fixture(loop_scope="module")
async def served(
    guarded: Guarded, sglang_model: Path, redis: RedisServer, tmp_path: Path
) -> AsyncIterator[Deployment]:
    pair = guarded.servers
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
            "models": {"small": {"path": str(sglang_model), "engine_key": KEY, "pairs": [urls]}},
            "topologies": ["tree.yaml"],
            "embedder": {"model": "none"},
            "cache": {"backend": "redis", "url": redis.url, "lease_s": 1},
        }
        (tmp_path / "tree.yaml").write_text(yaml.safe_dump(TREE), encoding="utf-8")
        (tmp_path / "router.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        yield Deployment(tmp_path / "router.yaml", engine, client, stack)


async def count_journaled(url: str, key: str) -> int:
    """Return the tokens that the journal of the run with this key holds."""
    tokens = 0
    async with Redis.from_url(url) as client:
        async for name in client.scan_iter(f"*{key}*:journal"):
            for record in await client.lrange(name, 1, -1):
                kind, _, *fields = orjson.loads(record)
                if kind == "tokens":
                    tokens += len(fields[0])
    return tokens


async def test_a_tree_on_engines_with_a_key_survives_its_router(
    served: Deployment, redis: RedisServer
) -> None:
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
            while await count_journaled(redis.url, f"at-{moment}") < engine.passed:  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.01)
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


async def test_spans_of_both_servers_are_children_of_the_routers(guarded: Guarded) -> None:
    span = SpanContext("ab" * 16, "cd" * 8)
    client = SglangPair(address_of(guarded.servers), key=KEY)
    CURRENT.set(span)
    await collect(client, generation())
    CURRENT.set(None)
    await until(lambda: len(children(guarded.receiver.spans, span)) >= 2)
    await client.aclose()
    names = {name.partition(" ")[0] for name in children(guarded.receiver.spans, span)}
    assert names == {"prefill", "decode"}


def children(spans: dict[str, list[Span]], parent: SpanContext) -> set[str]:
    """Names of the spans whose parent it is."""
    ids = (bytes.fromhex(parent.trace_id), bytes.fromhex(parent.span_id))
    return {
        name
        for name, same_name in spans.items()
        for span in same_name
        if (span.trace_id, span.parent_span_id) == ids
    }
