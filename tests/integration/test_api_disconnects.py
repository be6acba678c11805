"""A client that leaves: everything it asked for is aborted, whenever it leaves."""

import asyncio
import json
import socket
from urllib.parse import urlsplit

import aiohttp
import pytest

from shell_router.api import ApiSettings
from tests.fakes.api_server import Api, ScriptedRelay, api, chat, until
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Gates, Hold

BODY = b'{"text":"hi"}'
PLAIN = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 13\r\n\r\n"
CHUNKED = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
AGENT = {"program": "p", "agent": "a", "model": "small", "prompt": "Hello"}


async def nothing_runs(served: Api) -> None:
    """Every engine request, trace and cache log of the one run has ended."""
    await until(lambda: not served.moa.running)
    (trace,) = served.services.traces._traces.values()
    await until(lambda: trace.as_json()["state"] == "cancelled")
    status, _ = await served.post("/v1/chat/completions", chat(model="other"))
    assert status == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", chat()), ("/v1/agent/requests", AGENT)]
)
async def test_a_client_that_leaves_before_the_first_token_aborts_its_run(
    path: str, body: dict[str, object], stream: bool
) -> None:
    hold = Hold(first=0)
    moa = ScriptedMoa(pace=hold.pace)
    async with api(moa) as served, aiohttp.ClientSession() as leaving:
        asking = asyncio.ensure_future(
            leaving.post(served.url + path, json={**body, "stream": stream})
        )
        await hold.until_waiting()
        asked = set(moa.running)
        asking.cancel()
        await asyncio.wait([asking])
        if not asking.cancelled():
            asking.result().close()
        await until(lambda: not moa.running)
        assert asked and asked <= {rid for engine in moa.engines.values() for rid in engine.aborted}
        hold.release()
        await nothing_runs(served)


async def test_a_client_that_leaves_in_the_middle_of_its_stream_aborts_its_run() -> None:
    hold = Hold(first=1)
    gates = Gates("root")

    async def pace(rid: str, piece: int) -> None:
        await (hold.pace(rid, piece) if rid.endswith("root") else gates.pace(rid, piece))

    moa = ScriptedMoa(pace=pace)
    async with api(moa) as served:
        async with served.stream(chat(stream=True)) as response:
            assert b"root thinks" in await response.content.readuntil(b"\n\n")
            await hold.until_waiting()
            response.close()
        await nothing_runs(served)
        assert moa.aborted == {"root"}


async def deaf_client(served: Api) -> socket.socket:
    """Asks for a stream and never reads; 20 MB do not fit into any socket's buffers."""
    host, port = served.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (host, int(port)))
    body = json.dumps(chat(stream=True)).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    )
    await loop.sock_sendall(client, head + body)
    await until(lambda: len(served.services.traces) == 1)
    return client


def flood() -> ScriptedMoa:
    return ScriptedMoa({"root": ("x" * 1000 + " ") * 20_000}, context_length=10**9)


def running(served: Api) -> float | None:
    return served.services.metrics.registry.get_sample_value("shell_router_running_requests")


async def test_a_client_that_does_not_read_slows_no_agent() -> None:
    async with api(flood()) as served:
        with await deaf_client(served):
            (trace,) = served.services.traces._traces.values()
            await until(lambda: trace.as_json()["state"] != "running", 60)
            assert trace.as_json()["state"] == "finished"
            assert running(served) == 1
        await until(lambda: running(served) == 0)


async def test_a_client_that_does_not_read_is_given_up_at_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with api(flood(), ApiSettings(write_timeout_s=0.05)) as served:
        with await deaf_client(served):
            await until(lambda: running(served) == 0, 60)
        assert not served.moa.running
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_leaving_a_native_stream_leaves_the_relays_context_early() -> None:
    relay = ScriptedRelay(
        (b"data: 1\n\n", b"data: 2\n\n"), "text/event-stream", gate=asyncio.Event()
    )
    async with api(relays={"small": relay}) as served:
        async with served.stream({"text": "x"}, "/generate") as response:
            assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
            response.close()
        await until(lambda: relay.left_early == 1)


async def test_leaving_a_native_request_leaves_the_relays_context_early() -> None:
    relay = ScriptedRelay((b"{", b"}"), gate=asyncio.Event())
    async with api(relays={"small": relay}) as served, aiohttp.ClientSession() as leaving:
        asking = asyncio.ensure_future(leaving.post(served.url + "/generate", json={"text": "x"}))
        await until(lambda: len(relay.forwarded) == 1)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: relay.left_early == 1)


@pytest.mark.parametrize("excess", [b"x" * 2**20, CHUNKED + b"100000\r\n" + b"x" * 2**20])
@pytest.mark.parametrize("request_head", [PLAIN, CHUNKED], ids=["fast lane", "aiohttp"])
async def test_bytes_behind_a_request_do_not_hide_that_the_client_leaves(
    request_head: bytes, excess: bytes
) -> None:
    relay = ScriptedRelay((b"{", b"}"), gate=asyncio.Event())
    async with api(relays={"small": relay}) as served:
        at = urlsplit(served.url)
        _, writer = await asyncio.open_connection(at.hostname, at.port)
        body = b"d\r\n" + BODY + b"\r\n0\r\n\r\n" if request_head is CHUNKED else BODY
        writer.write(request_head + body)
        await until(lambda: len(relay.forwarded) == 1)
        writer.write(excess)
        await writer.drain()
        writer.transport.abort()
        await until(lambda: relay.left_early == 1)
