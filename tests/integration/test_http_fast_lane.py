"""Plain requests, and those that aiohttp takes over: the same answers, whatever way they go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import orjson
import pytest

from shell_router.api import ApiSettings
from shell_router.http.fast_lane import FastConnection
from tests.fakes.api_server import Api, ScriptedRelay, api

BODY = b'{"text":"hi"}'
HEAD = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 13\r\n"
CHUNKED = (
    b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nd\r\n"
    + BODY
    + b"\r\n0\r\n\r\n"
)


class Client:
    """Bytes to the API, and its answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, *pieces: bytes) -> None:
        """Send each piece once the one before is out."""
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers by their lower-case names, and the body."""
        async with asyncio.timeout(30):
            start, *lines = (
                (await self._reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            )
            headers = {
                name.lower(): value for name, value in (line.split(": ", 1) for line in lines)
            }
            if "content-length" in headers:
                body = await self._reader.readexactly(int(headers["content-length"]))
            else:
                body = b""
                while size := int(await self._reader.readline(), 16):
                    body += await self._reader.readexactly(size)
                    await self._reader.readexactly(2)
                await self._reader.readexactly(2)
            return int(start.split()[1]), headers, body

    async def ended(self) -> bytes:
        """What comes until the server closes."""
        async with asyncio.timeout(30):
            return await self._reader.read()


@asynccontextmanager
async def client_of(served: Api) -> AsyncIterator[Client]:
    at = urlsplit(served.url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


def relays(**fields: object) -> dict[str, ScriptedRelay]:
    return {"small": ScriptedRelay(**fields)}  # type: ignore[arg-type]


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_both_ways_give_the_same_answer_with_the_same_headers(content_type: str) -> None:
    served_by = relays(chunks=(b"data: 1\n\n", b"data: 2\n\n"), content_type=content_type)
    async with (
        api(relays=served_by) as served,
        client_of(served) as plain,
        client_of(served) as other,
    ):
        await plain.send(HEAD + b"x-request-id: same\r\n\r\n" + BODY)
        await other.send(CHUNKED.replace(b"\r\n\r\n", b"\r\nx-request-id: same\r\n\r\n", 1))
        one, two = await plain.answer(), await other.answer()
    assert one[0] == two[0] == 200 and one[2] == two[2] == b"data: 1\n\ndata: 2\n\n"
    assert {**one[1], "date": ""} == {**two[1], "date": ""}
    assert served_by["small"].forwarded == [("generate", BODY)] * 2


async def test_a_body_may_come_in_pieces_and_requests_one_behind_the_other() -> None:
    async with api(relays=relays()) as served, client_of(served) as client:
        await client.send(
            HEAD + b"\r\n", BODY[:5], BODY[5:] + HEAD + b"\r\n" + BODY + HEAD, b"\r\n" + BODY
        )
        assert [(await client.answer())[0] for _ in range(3)] == [200, 200, 200]


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (CHUNKED, 200),
        (HEAD + b"Expect: 100-continue\r\n\r\n" + BODY, 100),
        (HEAD.replace(b": 13", b": " + b"0" * 5000 + b"13") + b"\r\n" + BODY, 200),
        (HEAD + b"x-model: small\r\nx-model: large\r\n\r\n" + BODY, 200),
        (HEAD.replace(b"/generate", b"/generate?a=b") + b"\r\n" + BODY, 200),
        (HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n" + BODY, 200),
        (HEAD.replace(b"13", b"thirteen") + b"\r\n" + BODY, 400),
        (HEAD + b"no colon\r\n\r\n" + BODY, 400),
        (HEAD + b"x-broken: a\x00b\r\n\r\n" + BODY, 400),
        (HEAD.replace(b"POST /generate", b"GET /generate") + b"\r\n" + BODY, 405),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
    ],
)
async def test_what_is_not_plain_is_answered_too_also_behind_a_plain_request(
    request_bytes: bytes, status: int
) -> None:
    async with api(relays=relays()) as served, client_of(served) as client:
        await client.send(HEAD + b"\r\n" + BODY + request_bytes)
        assert (await client.answer())[0] == 200
        if status == 100:
            assert b"100" in await client._reader.readuntil(b"\r\n\r\n")
            status = 200
        assert (await client.answer())[0] == status


async def test_a_client_that_asks_to_close_gets_its_answer_and_then_the_end() -> None:
    async with api(relays=relays()) as served, client_of(served) as client:
        last = HEAD + b"Connection: close\r\n\r\n" + BODY
        await client.send(HEAD + b"\r\n" + BODY + last)
        assert "connection" not in (await client.answer())[1]
        status, headers, _ = await client.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await client.ended() == b""


async def test_a_body_that_does_not_come_is_refused_at_its_limit() -> None:
    async with (
        api(settings=ApiSettings(body_timeout_s=0.05), relays=relays()) as served,
        client_of(served) as client,
    ):
        await client.send(HEAD + b"\r\n" + BODY[:5])
        status, _, body = await client.answer()
        assert status == 400 and "did not arrive" in orjson.loads(body)["error"]["message"]


@pytest.mark.parametrize("asked", [HEAD + b"\r\n" + BODY, CHUNKED], ids=["plain", "aiohttp"])
async def test_a_connection_that_is_idle_after_its_answer_is_closed_at_its_limit(
    asked: bytes,
) -> None:
    settings = ApiSettings(idle_timeout_s=0.05, body_timeout_s=3600)
    async with api(settings=settings, relays=relays()) as served, client_of(served) as client:
        await client.send(asked)
        assert (await client.answer())[0] == 200
        assert await client.ended() == b""


@pytest.mark.parametrize("asked", [HEAD + b"\r\n" + BODY, CHUNKED], ids=["plain", "aiohttp"])
async def test_a_connection_whose_request_runs_is_not_idle(asked: bytes) -> None:
    gate, settings = asyncio.Event(), ApiSettings(idle_timeout_s=0.05, body_timeout_s=0.05)
    served_by = relays(
        chunks=(b"data: 1\n\n", b"data: 2\n\n"), content_type="text/event-stream", gate=gate
    )
    async with api(settings=settings, relays=served_by) as served, client_of(served) as client:
        async with client_of(served) as idle:
            await client.send(asked)
            await idle.ended()  # all that are idle for too long are closed together
        gate.set()
        assert (await client.answer())[2] == b"data: 1\n\ndata: 2\n\n"


async def test_a_stop_closes_idle_connections() -> None:
    async with (
        api(relays=relays()) as served,
        client_of(served) as client,
        client_of(served) as silent,
    ):
        await client.send(HEAD + b"\r\n" + BODY)
        await client.answer()
        ended = [asyncio.ensure_future(one.ended()) for one in (client, silent)]
        await asyncio.wait(ended, timeout=0)
    assert [await one for one in ended] == [b"", b""]


async def test_a_header_cannot_be_split_by_what_an_answer_says() -> None:
    async with (
        api(relays=relays(content_type="text/plain\r\nx-evil: 1")) as served,
        client_of(served) as client,
    ):
        await client.send(HEAD + b"\r\n" + BODY)
        assert await client.ended() == b""


BIG = b"x" * (8 << 20)


async def test_a_stop_waits_for_an_answer_that_is_written_to_be_taken() -> None:
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(api(relays=relays(chunks=(BIG,))))
        at = urlsplit(served.url)
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        writer.write(HEAD + b"\r\n" + BODY)
        await reader.readuntil(b"\r\n\r\n")
        stopping = asyncio.create_task(stack.aclose())
        assert await reader.readexactly(len(BIG)) == BIG
        await stopping
        writer.close()


class Transport:
    """As much of a transport as waiting for a slow client takes."""

    def get_write_buffer_size(self) -> int:
        return 1


async def test_a_limit_that_passes_while_a_client_takes_nothing_leaves_the_connection_usable() -> (
    None
):
    connection = FastConnection(cast(Any, None))
    connection.transport = cast(Any, Transport())
    connection.pause_writing()
    first = asyncio.create_task(connection.drain(60))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    second = asyncio.create_task(connection.drain(60))
    await asyncio.sleep(0)
    connection.resume_writing()
    await second
