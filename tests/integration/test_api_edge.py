"""HTTP before any route: pages of other origins, packed bodies, half-closed connections."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
import zstandard

from shell_router.api import ApiSettings
from shell_router.errors import EngineUnavailable
from tests.fakes.api_server import Api, api, chat, until
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Hold, Script

CHAT = "/v1/chat/completions"
PAGE = "https://chat.example.org"
ORIGIN = {"Origin": PAGE}
PREFLIGHT = {
    **ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,x-stainless-os",
}
KEY = {"Authorization": "Bearer sk-1"}
Pack = Callable[[bytes], bytes]
PACKERS: dict[str, Pack] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.compress,
}


async def ask(
    at: Api, method: str, path: str, data: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Answer with the status, the headers by their lower-case names, and the body."""
    async with at.client.request(
        method, at.url + path, data=data, headers=headers, allow_redirects=False
    ) as answer:
        named = {name.lower(): value for name, value in answer.headers.items()}
        return answer.status, named, await answer.read()


@pytest.mark.parametrize("cors", [(PAGE,), ("*",)])
@pytest.mark.parametrize("keys", [{}, {"me": "sk-1"}])
async def test_pages_of_the_origins_in_cors_may_ask_from_browsers(
    cors: tuple[str, ...], keys: dict[str, str]
) -> None:
    async with api(settings=ApiSettings(cors=cors, keys=keys)) as served:
        for path in (CHAT, "/v1/models", "/v1/files"):
            status, headers, _ = await ask(served, "OPTIONS", path, **PREFLIGHT)
            assert status == 204
            assert headers["access-control-allow-origin"] == PAGE
            assert headers["access-control-allow-methods"] == "*"
            assert headers["access-control-allow-headers"] == "*, Authorization"
        for body in (chat(), chat(stream=True), {}):
            sent = json.dumps(body).encode()
            json_type = {"Content-Type": "application/json"}
            status, headers, _ = await ask(served, "POST", CHAT, sent, **ORIGIN, **KEY, **json_type)
            assert status == (200 if body else 400)
            assert headers["access-control-allow-origin"] == PAGE
            assert headers["access-control-expose-headers"] == "*"
            assert headers["vary"] == "Origin"
        if keys:
            status, headers, _ = await ask(served, "GET", "/v1/models", **ORIGIN)
            assert (status, headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize("cors", [(), ("https://other.example.org",)])
@pytest.mark.parametrize(("keys", "status"), [({}, 403), ({"me": "sk-1"}, 401)])
async def test_pages_of_other_origins_get_no_permission(
    cors: tuple[str, ...], keys: dict[str, str], status: int
) -> None:
    async with api(settings=ApiSettings(cors=cors, keys=keys)) as served:
        refused, headers, _ = await ask(served, "OPTIONS", CHAT, **PREFLIGHT)
        assert refused == status
        assert not [name for name in headers if name.startswith("access-control")]


async def test_an_answer_401_says_how_to_send_a_key() -> None:
    async with api(settings=ApiSettings(keys={"me": "sk-1"})) as served:
        for path in ("/v1/models", "/v1/messages", "/nothing"):
            status, headers, _ = await ask(served, "GET", path)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")


async def test_the_root_answers_probes_without_a_key() -> None:
    async with api(settings=ApiSettings(keys={"me": "sk-1"})) as served:
        assert (await ask(served, "HEAD", "/"))[0] == 200
        assert (await ask(served, "GET", "/"))[0] == 200


@pytest.mark.parametrize("coding", PACKERS)
async def test_packed_bodies_are_unpacked(coding: str) -> None:
    async with api() as served:
        for body in (chat(), chat(stream=True), chat(messages=[])):
            plain = json.dumps(body).encode()
            packed = {"Content-Encoding": coding, "Content-Type": "application/json"}
            answers = [
                await ask(served, "POST", CHAT, PACKERS[coding](plain), **packed),
                await ask(served, "POST", CHAT, plain, **{"Content-Type": "application/json"}),
            ]
            statuses = [status for status, _, _ in answers]
            assert statuses == [400 if body == chat(messages=[]) else 200] * 2


@pytest.mark.parametrize("coding", PACKERS)
async def test_packed_bodies_are_refused_beyond_the_limit_or_if_they_are_broken(
    coding: str,
) -> None:
    headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
    spaced = json.dumps(chat()).encode() + b" " * 5_000
    async with api(settings=ApiSettings(max_body_bytes=10_000)) as served:
        bomb = PACKERS[coding](b" " * 50_000_000)
        assert len(bomb) < 100_000
        for body, expected in (
            (PACKERS[coding](b" " * 10_001), 413),
            (bomb[:9_000], 413),
            (b"nonsense", 400),
            (PACKERS[coding](json.dumps(chat()).encode())[:-20], 400),
            (PACKERS[coding](spaced)[:-1], 400),
            (PACKERS[coding](spaced) + b"more", 400),
            (b"", 400),
        ):
            status, _, answer = await ask(served, "POST", CHAT, body, **headers)
            assert status == expected, body[:20]
            assert status == 413 or b"not framed or encoded as its headers say" in answer
        status, _, _ = await ask(served, "POST", CHAT, PACKERS[coding](spaced), **headers)
        assert status == 200


@pytest.mark.parametrize(
    ("path", "coding", "known"),
    [
        (CHAT, "br", "identity, gzip, deflate, zstd"),
        (CHAT, "gzip, zstd", "identity, gzip, deflate, zstd"),
        (CHAT, "odd", "identity, gzip, deflate, zstd"),
        ("/v1/files", "gzip", "identity"),
    ],
)
async def test_a_coding_that_is_not_unpacked_is_415(path: str, coding: str, known: str) -> None:
    async with api() as served:
        headers = {"Content-Encoding": coding, "Content-Type": "application/json"}
        status, _, body = await ask(served, "POST", path, b"{}", **headers)
        assert status == 415
        assert json.loads(body)["error"]["message"].endswith(f"Send one of: {known}.")


def request_of(path: str, body: object = None, *, padding: int = 0) -> bytes:
    """Write a request whose body is padded, so that it is too long for the fast lane."""
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    text = json.dumps(body).encode() + b" " * padding
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(text)}\r\n\r\n"
    )
    return head.encode() + text


async def connect(at: Api) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(at.url)
    return await asyncio.open_connection(address.hostname, address.port)


LANES = pytest.mark.parametrize("padding", [0, 100_000], ids=["fast lane", "aiohttp"])


@LANES
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_ends_its_side_gets_its_answer(padding: int, stream: bool) -> None:
    async with api() as served:
        for sent in (
            request_of("/v1/models"),
            request_of(CHAT, chat(stream=stream), padding=padding),
        ):
            reader, writer = await connect(served)
            writer.write(sent)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 20)
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert answer.rstrip().endswith((b"}", b"0"))
            writer.close()


@LANES
async def test_a_client_that_ends_its_side_gets_an_answer_that_takes_long(padding: int) -> None:
    hold = Hold()
    async with api(ScriptedMoa(pace=hold.pace)) as served:
        reader, writer = await connect(served)
        writer.write(request_of(CHAT, chat(), padding=padding))
        writer.write_eof()
        await hold.until_waiting()
        interim = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
        hold.release()
        assert b"HTTP/1.1 200 OK" in await asyncio.wait_for(reader.read(), 20)
        writer.close()


@LANES
async def test_a_client_that_ends_its_side_and_then_leaves_aborts_its_run(padding: int) -> None:
    hold = Hold()
    moa = ScriptedMoa(pace=hold.pace)
    async with api(moa) as served:
        reader, writer = await connect(served)
        writer.write(request_of(CHAT, chat(), padding=padding))
        writer.write_eof()
        await hold.until_waiting()
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        writer.close()
        await until(lambda: not moa.running)


@pytest.mark.parametrize("agent", ["left", "root"])
async def test_an_answer_503_says_when_the_engines_are_tried_again(agent: str) -> None:
    away = EngineUnavailable("The circuit breaker is open.", retry_s=4.9)
    async with api(ScriptedMoa({agent: Script("", error=away)})) as served:
        body = json.dumps(chat()).encode()
        json_type = {"Content-Type": "application/json"}
        status, headers, _ = await ask(served, "POST", CHAT, body, **json_type)
        assert (status, headers["retry-after"]) == (503, "5")
