"""A server that stops: running requests end within the drain, or are cut and reported so."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from shell_router.api import ApiSettings, Services, create_app, serve_app
from shell_router.app.fleet_changes import FleetChanges
from shell_router.http.server import bind_sockets
from tests.fakes.api_server import DUO, ScriptedRelay, chat, live, until
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Hold

NATIVE = {"text": "x", "stream": True}
AGENT = {"program": "p", "agent": "a", "model": "small", "prompt": "Hello", "stream": True}


@dataclass(frozen=True)
class StoppableServer:
    """A server whose end a test begins while its clients still read."""

    url: str
    client: aiohttp.ClientSession
    force_shutdown: asyncio.Event
    stack: AsyncExitStack

    def stop(self) -> "asyncio.Task[None]":
        """Begin to stop, as a first signal does."""
        return asyncio.create_task(self.stack.aclose())


@asynccontextmanager
async def server(
    moa: ScriptedMoa, drain_s: float, relay: ScriptedRelay | None = None, lame_duck_s: float = 0
) -> AsyncIterator[StoppableServer]:
    relays = {"small": relay or ScriptedRelay()}
    services = Services(
        moa.executor, moa.programs, live(moa.models, DUO), moa.models, relays, FleetChanges({}, {})
    )
    force_shutdown = asyncio.Event()
    with bind_sockets() as sockets:
        async with (
            aiohttp.ClientSession() as client,
            AsyncExitStack() as stack,
            asyncio.timeout(30),
        ):
            app = create_app(services, ApiSettings(lame_duck_s=lame_duck_s, drain_s=drain_s))
            url = await stack.enter_async_context(
                serve_app(app, sockets, force_shutdown=force_shutdown)
            )
            yield StoppableServer(url, client, force_shutdown, stack)


def last_event(stream: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stream.strip().rpartition("data: ")[2])
    return found


async def refused(url: str) -> bool:
    try:
        _, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    except ConnectionError:
        return True
    writer.close()
    return False


async def test_a_running_request_may_end_while_new_ones_are_refused() -> None:
    hold = Hold(first=1)
    async with server(ScriptedMoa(pace=hold.pace), drain_s=30) as served:
        async with served.client.post(
            f"{served.url}/v1/chat/completions", json=chat(stream=True)
        ) as response:
            await hold.until_waiting()
            stopping = served.stop()
            async with asyncio.timeout(10):
                while not await refused(served.url):
                    pass
            hold.release()
            assert (await response.text()).endswith("data: [DONE]\n\n")
        await stopping


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", chat(stream=True)), ("/v1/agent/requests", AGENT)]
)
async def test_a_stream_that_outlasts_the_drain_ends_with_an_error(
    path: str, body: dict[str, object]
) -> None:
    hold = Hold(first=1)
    moa = ScriptedMoa(pace=hold.pace)
    async with server(moa, drain_s=0.01) as served:
        async with served.client.post(served.url + path, json=body) as response:
            await hold.until_waiting()
            stopping = served.stop()
            assert last_event(await response.text())["error"]["code"] == "router_stopping"
        await stopping
        assert not moa.running


async def test_a_hurried_stop_cuts_at_once_whole_answers_too() -> None:
    hold = Hold(first=1)
    async with server(ScriptedMoa(pace=hold.pace), drain_s=3600) as served:
        asking = asyncio.create_task(
            served.client.post(f"{served.url}/v1/chat/completions", json=chat())
        )
        await hold.until_waiting()
        stopping = served.stop()
        served.force_shutdown.set()
        async with await asking as response:
            assert (response.status, (await response.json())["error"]["code"]) == (
                503,
                "router_stopping",
            )
        await stopping


async def test_a_native_stream_that_outlasts_the_drain_ends_with_an_error() -> None:
    relay = ScriptedRelay(
        (b"data: 1\n\n", b"data: 2\n\n"), "text/event-stream", gate=asyncio.Event()
    )
    async with server(ScriptedMoa(), drain_s=0.01, relay=relay) as served:
        async with served.client.post(f"{served.url}/generate", json=NATIVE) as response:
            assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
            stopping = served.stop()
            assert last_event(await response.text())["error"]["code"] == "router_stopping"
        await stopping
        await until(lambda: relay.left_early == 1)


async def test_a_lame_duck_is_not_ready_and_serves_until_its_time_has_passed() -> None:
    async with server(ScriptedMoa(), drain_s=30, lame_duck_s=3600) as served:
        async with served.client.get(f"{served.url}/ready") as response:
            assert response.status == 200 and "Connection" not in response.headers
        stopping = served.stop()
        async with asyncio.timeout(10):
            while True:
                async with served.client.get(f"{served.url}/ready") as response:
                    if response.status == 503:
                        assert (await response.json())["not_ready"] == ["stopping"]
                        break
        for body in (chat(), chat(stream=True)):
            async with served.client.post(
                f"{served.url}/v1/chat/completions", json=body
            ) as response:
                assert response.status == 200 and response.headers["Connection"] == "close"
                await response.read()
        served.force_shutdown.set()  # a second signal ends the wait
        await stopping
        assert await refused(served.url)
