"""An engine kind that the router does not know has all that a deployment does with engines."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from shell_router.app import serve_deployment
from shell_router.app.wings import ENGINE_KINDS
from shell_router.config import ApiKey, Config, EmbedderSettings, Listen, ModelSettings
from tests.fakes.api_server import chat
from tests.fakes.undivided import FakeServer, Section

MODEL = Path(__file__).parents[2] / "models" / "small"
OPERATOR = {"Authorization": "Bearer sk-o"}


@pytest.fixture(autouse=True)
def kind() -> Iterator[None]:
    kinds: Any = ENGINE_KINDS
    kinds["undivided"] = "tests.fakes.undivided:UndividedKind"
    yield
    del kinds["undivided"]


@asynccontextmanager
async def router(*servers: FakeServer) -> AsyncIterator[ClientSession]:
    section = Section(tuple(server.url for server in servers))
    config = Config(
        {"small": ModelSettings(MODEL, engine={"undivided": section})},
        embedder=EmbedderSettings("none"),
        listen=Listen(port=0),
        api_keys={"ops": ApiKey("sk-o", operator=True)},
    )
    async with (
        serve_deployment(config) as url,
        ClientSession(url, headers=OPERATOR) as client,
    ):
        yield client


async def answer_of(client: ClientSession, method: str, path: str, **options: Any) -> Any:
    async with client.request(method, path, **options) as answer:
        if answer.content_type == "application/json":
            return answer.status, await answer.json()
        return answer.status, await answer.text()


async def ask(client: ClientSession) -> str:
    _, body = await answer_of(client, "POST", "/v1/chat/completions", json=chat(model="small"))
    content: str = body["choices"][0]["message"]["content"]
    return content


async def test_it_answers_and_is_listed_as_ready_with_its_name() -> None:
    async with FakeServer().running() as server, router(server) as client:
        assert await ask(client) == "hi"
        _, listed = await answer_of(client, "GET", "/v1/models/small")
        assert (listed["ready"], listed["engine"]) == (True, "undivided engine")
        status, ready = await answer_of(client, "GET", "/ready")
        assert (status, ready["checks"]["engine small"]) == (200, True)


async def test_it_makes_the_router_unready_while_it_is_ill() -> None:
    async with FakeServer().running() as server, router(server) as client:
        server.healthy = False
        status, ready = await answer_of(client, "GET", "/ready")
        assert (status, ready["checks"]["engine small"]) == (503, False)


async def test_it_is_in_the_metrics() -> None:
    async with FakeServer().running() as server, router(server) as client:
        await ask(client)
        _, text = await answer_of(client, "GET", "/metrics")
        labels = f'model="small",role="engine",url="{server.url}"'
        assert f"shell_router_engine_requests{{{labels}}} 0.0" in text
        reason = 'model="small",policy="scored",role="engine",why="only_engine"'
        assert f"shell_router_engine_choices_total{{{reason}}} 1.0" in text


async def test_its_servers_are_added_and_drained() -> None:
    async with (
        FakeServer().running() as old,
        FakeServer().running() as new,
        router(old) as client,
    ):
        body = {"model": "small", "pair": {"engine": new.url}}
        assert (await answer_of(client, "POST", "/v1/engines", json=body))[0] == 201
        params = {"model": "small", "engine": old.url}
        status, drained = await answer_of(client, "DELETE", "/v1/engines", params=params)
        assert (status, drained["running"]) == (200, 0)
        _, listed = await answer_of(client, "GET", "/v1/engines")
        assert listed["data"] == [{"model": "small", "engine": new.url}]
        assert await ask(client) == "hi"
        assert (old.requests, new.requests) == (0, 1)
