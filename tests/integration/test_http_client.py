"""The legs' HTTP client against servers that answer in every way there is, byte by byte, and in
ways there is not.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest
from yarl import URL

from shell_router.config.models import TlsClient
from shell_router.core.engine import Relayed
from shell_router.engines.address import PairAddress
from shell_router.engines.sglang import SglangPair
from shell_router.engines.wire import MAX_EVENT_BYTES
from shell_router.errors import ConfigError, EngineError, EngineRejected
from shell_router.http.client import (
    TURN_BYTES,
    AnswerLimits,
    AnswerTooLong,
    Exchange,
    HttpClient,
    make_endpoint,
)
from tests.fakes.certificates import authority
from tests.fakes.scripted_pair import ONCE, generation, until

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: "
    b"chunked\r\n\r\n2\r\nhe\r\n3;ext=1\r\nllo\r\n0\r\nTrailer: x\r\n\r\n"
)
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nhello"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE
SWITCHED = b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"

ALL = AnswerLimits()
SMALL = AnswerLimits(head=1000, body=2000, error=500, unread=2**17)


@dataclass
class RawServer:
    """Answers every request on a connection with the same bytes; `requests` holds what was
    asked."""

    url: str = ""
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    open: int = 0


@asynccontextmanager
async def raw_server(
    *pieces: bytes,
    close: bool = False,
    tls: ssl.SSLContext | None = None,
    before_last: asyncio.Event | None = None,
) -> AsyncIterator[RawServer]:
    """A server that writes `pieces` one by one to each request, and with `close` hangs up behind
    them.
    """
    found = RawServer()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found.connections += 1
        found.open += 1
        try:
            while await _request(reader, found.requests):
                for number, piece in enumerate(pieces, 1):
                    if before_last is not None and number == len(pieces):
                        await before_last.wait()
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if close:
                    break
        except ConnectionError:
            pass
        finally:
            found.open -= 1
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    found.url = f"http{'s' if tls else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield found


async def _request(reader: asyncio.StreamReader, requests: list[bytes]) -> bool:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    length = next(
        (line for line in head.split(b"\r\n") if line.startswith(b"Content-Length")), b": 0"
    )
    requests.append(head + await reader.readexactly(int(length.partition(b":")[2])))
    return True


@asynccontextmanager
async def http_client(idle_s: float = 2.0, limits: AnswerLimits = ALL) -> AsyncIterator[HttpClient]:
    """A client, closed at the end."""
    client = HttpClient(connect_s=2, idle_s=idle_s, limits=limits)
    yield client
    await client.aclose(1)


def post(
    client: HttpClient,
    url: str,
    *,
    read_timeout_s: float = 5,
    streamed: bool = False,
) -> Exchange:
    return client.begin(
        make_endpoint("POST", URL(url) / "generate"),
        b'{"a":1}',
        read_timeout_s=read_timeout_s,
        streamed=streamed,
    )


async def answer(exchange: Exchange) -> tuple[int, bytes]:
    async with asyncio.timeout(5):
        await exchange.wait_for_head()
        return exchange.status, await exchange.read_all()


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    "written", [WHOLE, CHUNKED, CONTINUED], ids=["whole", "chunked", "after a 100"]
)
async def test_an_answer_is_the_same_however_it_is_cut_and_its_connection_is_used_again(
    written: bytes, step: int
) -> None:
    pieces = [written[start : start + step] for start in range(0, len(written), step)]
    async with raw_server(*pieces) as server, http_client() as client:
        for _ in range(3):
            assert await answer(post(client, server.url)) == (200, b"hello")
        assert server.connections == 1
    assert server.requests[0] == (
        b"POST /generate HTTP/1.1\r\nHost: %s\r\nContent-Type: "
        b"application/json\r\nContent-Length: 7\r\n\r\n"
        b'{"a":1}' % server.url.removeprefix("http://").encode()
    )


async def test_https_with_certificates_on_both_sides_and_a_key(tmp_path: Path) -> None:
    signing = authority(tmp_path)
    own, server = signing.signed("router"), signing.signed("engine")
    known = TlsClient(signing.certificate, own.certificate, own.key).context("here")
    async with raw_server(WHOLE, tls=signing.asking(server)) as engine:
        asked = make_endpoint("GET", URL(engine.url) / "health", "sk-engine")
        for tls, says in ((known, b"hello"), (signing.trusting, None), (None, None)):
            client = HttpClient(connect_s=5, tls=tls)
            exchange = client.begin(asked, None, read_timeout_s=5)
            if says is None:
                with pytest.raises(OSError):
                    await answer(exchange)
            else:
                assert await answer(exchange) == (200, says)
            await client.aclose(1)
    (request,) = engine.requests
    assert b"\r\nAuthorization: Bearer sk-engine\r\n" in request


async def test_a_pairs_servers_get_their_key_with_every_request() -> None:
    async with raw_server(WHOLE) as server:
        pair = SglangPair(
            PairAddress(server.url, server.url, "127.0.0.1", 1), key="sk-engine", retries=ONCE
        )
        await pair.fleet.ready()
        with pytest.raises(EngineError):
            async for _ in pair.generate(generation("r", 2)):
                pass
        await pair.aclose()
    assert len(server.requests) >= 4, "health and generate, of both"
    assert all(b"\r\nAuthorization: Bearer sk-engine\r\n" in request for request in server.requests)


async def test_aborting_a_large_batch_takes_few_connections() -> None:
    async with raw_server(WHOLE) as server:
        pair = SglangPair(PairAddress(server.url, server.url, "127.0.0.1", 1))
        rids = [f"r{number}" for number in range(1024)]
        pair.fleet.servers[0].abort(rids)
        await until(lambda: len(server.requests) == len(rids))
        await pair.aclose()
    assert sorted(
        orjson.loads(one.partition(b"\r\n\r\n")[2])["rid"] for one in server.requests
    ) == sorted(rids)
    assert server.connections <= 16


def test_certificates_that_cannot_be_used_are_refused_by_the_settings_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.small\.engine_tls cannot be used"):
        TlsClient(ca=tmp_path / "none.pem").context("models.small.engine_tls")


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async with raw_server(UNTIL_CLOSE, close=True) as server, http_client() as client:
        for _ in range(2):
            assert await answer(post(client, server.url)) == (200, b"hello")
        assert server.connections == 2


@pytest.mark.parametrize("cut", [0, 5, len(WHOLE) - 5, len(WHOLE) - 1])
async def test_a_connection_that_breaks_before_the_answers_end_fails_it(cut: int) -> None:
    async with raw_server(WHOLE[:cut], close=True) as server, http_client() as client:
        with pytest.raises(ConnectionError, match="before the answer's end"):
            await answer(post(client, server.url))


@pytest.mark.parametrize("written", [b"SSH-2.0-x\r\n", SWITCHED])
async def test_what_is_no_answer_fails_at_once(written: bytes) -> None:
    async with raw_server(written) as server, http_client() as client:
        with pytest.raises(ConnectionError, match=r"not HTTP/1\.1"):
            await answer(post(client, server.url))
        await until(lambda: server.open == 0)


async def test_bytes_behind_the_answer_cost_the_connection_not_the_answer() -> None:
    async with raw_server(WHOLE + WHOLE) as server, http_client() as client:
        for _ in range(2):
            assert await answer(post(client, server.url)) == (200, b"hello")
        assert server.connections == 2


async def test_silence_fails_a_request_and_closes_its_connection() -> None:
    async with raw_server(CHUNKED[:60]) as server, http_client() as client:
        exchange = post(client, server.url, read_timeout_s=0.02)
        with pytest.raises(TimeoutError):
            await answer(exchange)
        await until(lambda: server.open == 0)


async def test_a_reader_that_is_slow_stops_the_server_and_is_not_taken_for_silence() -> None:
    body, read_timeout_s, now_s = b"x" * 2**16, 0.2, asyncio.get_running_loop().time
    head = EVENTS + b"Content-Length: %d\r\n\r\n" % (64 * len(body))
    async with raw_server(head, *[body] * 64) as server, http_client(limits=SMALL) as client:
        exchange = post(client, server.url, read_timeout_s=read_timeout_s, streamed=True)
        await exchange.wait_for_head()
        begun_s = now_s()
        await until(lambda: now_s() - begun_s > 3 * read_timeout_s)
        assert 2**17 < len(exchange.peek()) < 2**20
        assert len(await exchange.read_all()) == 64 * len(body)


def chunked(*chunks: bytes, head: bytes = b"HTTP/1.1 200 OK\r\n") -> bytes:
    framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + framed


def head_of(size: int) -> bytes:
    start, end = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Long: ", b"\r\n\r\n"
    return start + b"x" * (size - len(start) - len(end)) + end


def error_of(size: int) -> bytes:
    return b"HTTP/1.1 500 Oops\r\nContent-Length: %d\r\n\r\n%s" % (size, b"x" * size)


def body_of(size: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (size, b"x" * size)


@pytest.mark.parametrize("step", [7, 10_000])
@pytest.mark.parametrize(
    ("fits", "too_long", "part"),
    [
        (head_of(1000) + b"ok", head_of(1001) + b"ok", "a head of more than 1000 bytes"),
        (body_of(2000), body_of(2001), "a body of more than 2000 bytes"),
        (error_of(500), error_of(501), "an error of more than 500 bytes"),
    ],
    ids=["head", "body", "error"],
)
async def test_an_answer_has_at_most_its_limit_and_one_byte_more_fails_it(
    fits: bytes, too_long: bytes, part: str, step: int
) -> None:
    for written in (fits, too_long):
        pieces = [written[start : start + step] for start in range(0, len(written), step)]
        async with raw_server(*pieces) as server, http_client(limits=SMALL) as client:
            asked = answer(post(client, server.url))
            if written is fits:
                assert len((await asked)[1]) in (2, 2000, 500)
            else:
                with pytest.raises(AnswerTooLong, match=part):
                    await asked
                await until(lambda: server.open == 0)


ENDLESS = {
    "head": (b"HTTP/1.1 200 OK\r\nX-Long: ", b"x" * 2**16),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-More: and more\r\n" * 2**12),
    "1xx": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2**12),
    "chunk extension": (chunked() + b"2;x=", b"x" * 2**16),
    "trailers": (chunked(b"ok") + b"0\r\n", b"X-More: and more\r\n" * 2**12),
    "body": (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b"x" * 2**16),
    "tiny chunks": (chunked(), b"1\r\nx\r\n" * 2**12),
    "error": (chunked(head=b"HTTP/1.1 503 Busy\r\n"), b"ff\r\n%s\r\n" % (b"x" * 255) * 2**8),
    "events that are none": (
        chunked(head=EVENTS.replace(b"event-stream", b"plain")),
        b"ff\r\n%s\r\n" % (b"x" * 255) * 2**8,
    ),
}


@pytest.mark.parametrize("kind", ENDLESS)
async def test_what_never_ends_fails_and_does_not_wait_for_a_reader(kind: str) -> None:
    head, more = ENDLESS[kind]
    async with (
        raw_server(head, *[more] * 64) as server,
        http_client(limits=SMALL) as client,
    ):
        with pytest.raises(AnswerTooLong):
            await answer(post(client, server.url, read_timeout_s=60, streamed=True))
        await until(lambda: server.open == 0)


async def drained(relayed: Relayed) -> None:
    async for _ in relayed.chunks:
        pass


@pytest.mark.parametrize("forwarded", [False, True])
async def test_an_event_without_end_is_the_engines_error_by_name_and_limit(forwarded: bool) -> None:
    line = b"100000\r\n%s\r\n" % (b"x" * 2**20)
    async with raw_server(chunked(b"data: ", head=EVENTS), *[line] * 40) as server:
        pair = SglangPair(PairAddress(server.url, server.url, "127.0.0.1", 1), retries=ONCE)
        with pytest.raises(EngineError, match=f"decode engine.* {MAX_EVENT_BYTES} bytes") as raised:
            if forwarded:
                body = b'{"input_ids": [1], "stream": true}'
                async with pair.forward("generate", body) as relayed:
                    await drained(relayed)
            else:
                async for _ in pair.generate(generation("r", 2)):
                    pass
        assert isinstance(raised.value, EngineRejected) and raised.value.status == 502
        await pair.aclose()


@pytest.mark.parametrize("status", [pytest.param(200, marks=pytest.mark.slow), 500])
async def test_a_body_without_end_is_the_engines_error_by_name_and_limit(status: int) -> None:
    head, more = b"HTTP/1.1 %d X\r\nConnection: close\r\n\r\n" % status, b"x" * 2**20
    limit = ALL.body if status == 200 else ALL.error
    async with raw_server(head, *[more] * 130) as server:
        pair = SglangPair(PairAddress(server.url, server.url, "127.0.0.1", 1), retries=ONCE)
        with pytest.raises(EngineRejected, match=f"engine sent .* of more than {limit} bytes"):
            async with pair.forward("generate", b'{"input_ids": [1]}') as relayed:
                await drained(relayed)
        await pair.aclose()


async def test_others_have_their_turn_while_an_answer_pours_in() -> None:
    """The loop turns once for at most 32 KiB, however much is there."""
    poured = chunked(*[b"x" * 1000] * 2000) + b"0\r\n\r\n"
    async with raw_server(poured) as server, http_client() as client:
        exchange = post(client, server.url)
        turns, loop = 0, asyncio.get_running_loop()

        def count_turns() -> None:
            nonlocal turns
            turns += 1
            if not exchange.over:
                loop.call_soon(count_turns)

        await exchange.wait_for_head()
        count_turns()
        assert await exchange.read_all() == b"x" * 2_000_000
        assert turns >= len(poured) / TURN_BYTES - 2


async def test_a_reader_that_leaves_breaks_the_connection_and_the_next_request_gets_another() -> (
    None
):
    async with raw_server(CHUNKED[:60]) as server, http_client() as client:
        exchange = post(client, server.url)
        await exchange.wait_for_head()
        exchange.close()
        await until(lambda: server.open == 0)
        await post(client, server.url).wait_for_head()
        assert server.connections == 2


async def test_leaving_before_the_connection_is_there_keeps_it_for_the_next() -> None:
    async with raw_server(WHOLE) as server, http_client() as client:
        post(client, server.url).close()
        await until(lambda: server.connections == 1)
        assert await answer(post(client, server.url)) == (200, b"hello")
        assert (server.connections, len(server.requests)) == (1, 1)


async def test_a_connection_idle_for_too_long_is_not_used_again() -> None:
    async with raw_server(WHOLE) as server, http_client(idle_s=1e-9) as client:
        for _ in range(3):
            assert await answer(post(client, server.url)) == (200, b"hello")
        assert server.connections == 3
        await until(lambda: server.open == 1)


async def test_connections_idle_for_too_long_are_closed_when_requests_go_to_other_servers_only() -> (
    None
):
    async with (
        raw_server(WHOLE) as drained,
        raw_server(WHOLE) as other,
        http_client(idle_s=1e-9) as client,
    ):
        for server in (drained, other):
            assert await answer(post(client, server.url)) == (200, b"hello")
        await until(lambda: drained.open == 0)


async def test_a_request_that_ends_after_the_client_is_closed_closes_its_connection() -> None:
    go_on = asyncio.Event()
    async with (
        raw_server(WHOLE[:-1], WHOLE[-1:], before_last=go_on) as server,
        http_client() as client,
    ):
        exchange = post(client, server.url)
        await exchange.wait_for_head()
        await client.aclose(1)
        go_on.set()
        assert await answer(exchange) == (200, b"hello")
        await until(lambda: server.open == 0)


async def test_a_connection_that_the_server_closed_while_idle_is_not_used_again() -> None:
    async with raw_server(WHOLE, close=True) as server, http_client() as client:
        for _ in range(2):
            assert await answer(post(client, server.url)) == (200, b"hello")
            await until(lambda: client.idle == 0)
        assert server.connections == 2


async def test_a_port_without_a_listener_fails_the_request() -> None:
    async with raw_server() as server:
        pass
    async with http_client() as client:
        with pytest.raises(OSError, match=r"Connect call failed|refused"):
            await answer(post(client, server.url))


async def test_ended_is_called_once_for_every_exchange_however_it_ended() -> None:
    seen: list[Exchange] = []
    async with raw_server(WHOLE) as server, http_client() as client:
        at = make_endpoint("POST", URL(server.url))
        kept = client.begin(at, b"{}", read_timeout_s=5, ended=seen.append)
        left = client.begin(at, b"{}", read_timeout_s=5, ended=seen.append)
        left.close()
        left.close()
        await until(lambda: kept in seen)
        assert seen == [left, kept]
        assert (kept.complete, kept.peek()) == (True, b"hello")


def test_an_endpoint_keeps_path_port_and_credentials() -> None:
    at = make_endpoint("GET", URL("https://me:pass word@[::1]:8443/base/") / "v1/loads")
    assert at.origin == ("::1", 8443, True)
    assert at.request(None) == (
        b"GET /base/v1/loads HTTP/1.1\r\nHost: [::1]:8443\r\nAuthorization: Basic "
        b"bWU6cGFzcyB3b3Jk\r\n\r\n"
    )
