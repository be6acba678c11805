"""What models behind OpenAI-compatible servers do in a router, asked before each server alike:
one that is played, another shell-router, real SGLang, and Hugging Face's `transformers serve`.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio

from launch.sglang_cpu.engine import EngineServer
from launch.sglang_cpu.pair import free_ports
from shell_router.app import serve_deployment
from shell_router.app.openai import OpenAISection
from shell_router.config import (
    Config,
    EmbedderSettings,
    Limits,
    Listen,
    ModelSettings,
    PairSettings,
)
from shell_router.standins.embedded.settings import EmbeddedSettings
from tests.fakes.openai_server import PlayedServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = Path(__file__).parents[2] / "models" / "small"
QUESTION = "Tom has 3 apples and buys 4. How many apples does he have?"
START_S = 120.0
GRAPH = """name: graph
agents:
  a: {model: remote, sampling: {max_new_tokens: 12}}
  b: {model: remote, sampling: {max_new_tokens: 12}}
  root: {model: remote, precursors: [a, b]}
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "integer", "maximum": 9, "minimum": 0}},
            "required": ["at"],
        },
    },
}
ALL = frozenset({"counts", "seed", "calls", "forms", "context", "names", "stop"})


@dataclass(frozen=True)
class Server:
    """A server; `has` are the features that it has of `ALL`."""

    url: str
    model: str
    has: frozenset[str] = ALL


@asynccontextmanager
async def serve_router(pair: Any) -> AsyncIterator[Server]:
    address = PairSettings(
        pair.prefill_url, pair.decode_url, pair.bootstrap_port, pair.bootstrap_host
    )
    config = Config(
        {"small": ModelSettings(MODEL, pairs=(address,), tool_call_parser="hermes")},
        embedder=EmbedderSettings("none"),
        listen=Listen(port=0),
    )
    async with serve_deployment(config) as url:
        yield Server(f"{url}/v1", "small")


@asynccontextmanager
async def serve_transformers() -> AsyncIterator[Server]:
    if find_spec("accelerate") is None:
        pytest.skip("transformers serve needs accelerate: pip install accelerate")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(MODEL)]
    command += ["--port", str(port), "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    server = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        async with aiohttp.ClientSession() as client, asyncio.timeout(START_S):
            while True:
                try:
                    async with client.get(f"http://localhost:{port}/health"):
                        break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.5)
        yield Server(f"http://localhost:{port}/v1", str(MODEL), frozenset({"counts", "seed"}))
    finally:
        server.terminate()
        await server.wait()


@pytest.fixture(scope="module")
def own_url(request: pytest.FixtureRequest) -> Iterator[str]:
    server: EngineServer = request.getfixturevalue("own_server")
    yield f"{server.url}/v1"


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        "played",
        "router",
        pytest.param("sglang", marks=pytest.mark.sglang),
        pytest.param("transformers", marks=pytest.mark.slow),
    ],
)
async def remote(request: pytest.FixtureRequest) -> AsyncIterator["Remote"]:
    async with AsyncExitStack() as stack:
        match request.param:
            case "played":
                played = await stack.enter_async_context(PlayedServer([]).running())
                server = Server(played.url, "played")
            case "router":
                engines = request.getfixturevalue("engines")
                settings = EmbeddedSettings(str(MODEL), incremental_streaming_output=True)
                address = engines.pair(settings).address
                server = await stack.enter_async_context(serve_router(address))
            case "sglang":
                url = request.getfixturevalue("own_url")
                # it serves any name, seeds only with --enable-deterministic-inference, and calls
                # that must come only with a tokenizer that knows the marks of its parser
                server = Server(url, "sglang", ALL - {"names", "seed", "calls"})
            case _:
                server = await stack.enter_async_context(serve_transformers())
        folder = request.getfixturevalue("tmp_path_factory").mktemp("openai")
        (folder / "graph.yaml").write_text(GRAPH, encoding="utf-8")
        names = {"remote": server.model, "unknown": "unknown"}
        sections = {alias: OpenAISection(url=server.url, model=at) for alias, at in names.items()}
        config = Config(
            {alias: ModelSettings(engine={"openai": each}) for alias, each in sections.items()},
            topologies=(folder,),
            embedder=EmbedderSettings("none"),
            listen=Listen(port=0),
            limits=Limits(engine_attempts=1),
        )
        url = await stack.enter_async_context(serve_deployment(config))
        client = await stack.enter_async_context(aiohttp.ClientSession(url))
        yield Remote(server, client)


@dataclass
class Remote:
    """A router before the server."""

    server: Server
    client: aiohttp.ClientSession
    greedy: dict[str, Any] = field(default_factory=lambda: {"temperature": 0, "max_tokens": 12})

    def needs(self, feature: str) -> None:
        if feature not in self.server.has:
            pytest.skip(f"the server lacks {feature}")

    async def ask(self, question: str = QUESTION, model: str = "remote", **fields: Any) -> Any:
        messages = [{"role": "user", "content": question}]
        body = {"model": model, "messages": messages, **self.greedy, **fields}
        async with self.client.post("/v1/chat/completions", json=body) as answer:
            return {"status": answer.status, **await answer.json()}

    async def text(self, **fields: Any) -> str:
        body = await self.ask(**fields)
        assert body["status"] == 200, body
        text: str = body["choices"][0]["message"]["content"]
        return text

    async def is_idle(self) -> None:
        async with asyncio.timeout(30):
            while True:
                async with self.client.get("/metrics") as answer:
                    lines = (await answer.text()).splitlines()
                running = [line for line in lines if "engine_requests{" in line]
                if all(line.endswith(" 0.0") for line in running):
                    return


async def test_greedy_answers_are_equal_and_are_counted(remote: Remote) -> None:
    first = await remote.ask()
    assert first["status"] == 200, first
    assert first["choices"][0]["message"]["content"] == await remote.text()
    if "counts" in remote.server.has:
        assert 0 < first["usage"]["completion_tokens"] <= 12
        assert first["usage"]["prompt_tokens"] > 5
        assert "warnings" not in first


async def test_an_output_ends_at_its_limit(remote: Remote) -> None:
    body = await remote.ask(max_tokens=2)
    assert body["choices"][0]["finish_reason"] == "length"
    if "counts" in remote.server.has:
        assert body["usage"]["completion_tokens"] == 2


async def test_a_stream_has_the_text_of_the_whole_answer(remote: Remote) -> None:
    whole = await remote.text()
    body = {"model": "remote", "messages": [{"role": "user", "content": QUESTION}]}
    body |= {**remote.greedy, "stream": True}
    async with remote.client.post("/v1/chat/completions", json=body) as answer:
        lines = (await answer.text()).splitlines()
    events = [orjson.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole


async def test_an_output_ends_before_a_stop_string(remote: Remote) -> None:
    remote.needs("stop")
    whole = await remote.text()
    stop = whole[len(whole) // 2 :][:1]
    assert await remote.text(stop=[stop]) == whole[: whole.index(stop)]


async def test_a_seed_repeats_a_sampled_answer(remote: Remote) -> None:
    remote.needs("seed")
    sampled = {"temperature": 1.0, "seed": 5}
    assert await remote.text(**sampled) == await remote.text(**sampled)


async def test_agents_of_a_graph_read_each_other(remote: Remote) -> None:
    body = await remote.ask(model="graph", include_agents=True)
    assert body["status"] == 200, body
    assert {agent["state"] for agent in body["agents"].values()} == {"finished"}


async def test_texts_of_any_script_arrive(remote: Remote) -> None:
    assert (await remote.ask("größer 東京 🦊 \ufdd1 <think>"))["status"] == 200


async def test_a_client_that_leaves_leaves_nothing_running(remote: Remote) -> None:
    body = {"model": "remote", "messages": [{"role": "user", "content": QUESTION}]}
    body |= {"stream": True, "max_tokens": 200, "ignore_eos": True}
    async with remote.client.post("/v1/chat/completions", json=body) as answer:
        await answer.content.readany()
    await remote.is_idle()
    assert await remote.text()


async def test_a_tool_that_must_be_called_is_called(remote: Remote) -> None:
    remote.needs("calls")
    body = await remote.ask(tools=[TOOL], tool_choice="required", max_tokens=100)
    assert body["status"] == 200, body
    (call, *_) = body["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"])["at"] in range(10)


async def test_an_answer_has_the_form_of_its_schema(remote: Remote) -> None:
    remote.needs("forms")
    schema = TOOL["function"]["parameters"]
    named = {"type": "json_schema", "json_schema": {"name": "at", "schema": schema}}
    text = await remote.text(response_format=named, max_tokens=100)
    assert json.loads(text)["at"] in range(10)


async def test_a_prompt_that_is_too_long_is_the_clients_fault(remote: Remote) -> None:
    remote.needs("context")
    body = await remote.ask("apple " * 40_000)
    assert (body["status"], body["error"]["code"]) == (400, "context_length_exceeded")


async def test_an_unknown_model_is_the_deployments_fault(remote: Remote) -> None:
    remote.needs("names")
    body = await remote.ask(model="unknown")
    assert (body["status"], body["error"]["code"]) == (502, "engine_error")
