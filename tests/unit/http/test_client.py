"""Answers cut anywhere, without a socket."""

import asyncio
from typing import Any, cast

import pytest
from yarl import URL

from shell_router.http.client import (
    AnswerLimits,
    Connection,
    Exchange,
    HttpClient,
    make_endpoint,
)

ORIGIN = make_endpoint("POST", URL("http://127.0.0.1:1/generate")).origin
LIMITS = AnswerLimits(head=120, body=12, error=10, unread=8)
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 5\r\n\r\nhello"
EVENTS = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"7;ext=1\r\ndata: 1\r\n2\r\n\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\nTrailer: x\r\n\r\n"
)
CONTINUED = b"HTTP/1.1 100 Continue\r\nX-Early: yes\r\n\r\n" + PLAIN
ERROR = b"HTTP/1.1 503 Busy\r\nContent-Length: 10\r\n\r\ntoo much!!"
NOT_HTTP = b"SSH-2.0-OpenSSH\r\nand more"
TWICE = PLAIN + PLAIN
TOO_LONG = (
    b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 93 + b"\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 13\r\n\r\nhello, hello!",
    b"HTTP/1.1 500 Oops\r\nContent-Length: 11\r\n\r\ntoo much!!!",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 6,
)

LONG_FRAME = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 120


class Transport:
    """A connection's other side, which only notes that it was broken."""

    def __init__(self) -> None:
        self.aborted = False
        self.paused = False

    def write(self, data: bytes) -> None:
        pass

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    close = abort

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


def begin(client: HttpClient) -> tuple[Exchange, Connection, Transport]:
    connection, transport = Connection(client, ORIGIN), Transport()
    connection.connection_made(cast(Any, transport))
    exchange = Exchange(client.loop, client.limits, 60, True, None, None)
    connection.send(exchange, b"")
    return exchange, connection, transport


def feed(connection: Connection, data: bytes) -> None:
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


def outcome(client: HttpClient, *pieces: bytes) -> tuple[object, ...]:
    """Everything that a reader can see of an answer that came in `pieces`, and of its connection."""
    exchange, connection, transport = begin(client)
    for piece in pieces:
        if piece and not transport.aborted:
            feed(connection, piece)
    failure = f"{type(exchange.failure).__name__}: {exchange.failure}"
    seen = (exchange.status, exchange.content_type, exchange.peek(), exchange.complete, failure)
    connection.connection_lost(None)
    return (*seen, transport.aborted)


@pytest.mark.parametrize("answer", [PLAIN, EVENTS, CONTINUED, ERROR, NOT_HTTP])
async def test_an_answer_is_the_same_wherever_it_is_cut(answer: bytes) -> None:
    client = HttpClient(connect_s=1, limits=LIMITS)
    whole = outcome(client, answer)
    assert outcome(client, *[answer[at : at + 1] for at in range(len(answer))]) == whole
    for cut in range(1, len(answer)):
        assert outcome(client, answer[:cut], answer[cut:]) == whole


@pytest.mark.parametrize("answer", TOO_LONG)
async def test_an_answer_over_a_limit_fails_wherever_it_is_cut(answer: bytes) -> None:
    client = HttpClient(connect_s=1, limits=LIMITS)
    for cut in range(len(answer)):
        assert "AnswerTooLong" in str(outcome(client, answer[:cut], answer[cut:])[4])


@pytest.mark.parametrize("answer", [*TOO_LONG, LONG_FRAME])
async def test_an_answer_over_a_limit_fails_that_comes_byte_by_byte(answer: bytes) -> None:
    client = HttpClient(connect_s=1, limits=LIMITS)
    pieces = [answer[at : at + 1] for at in range(len(answer))]
    assert "AnswerTooLong" in str(outcome(client, *pieces)[4])


async def test_bytes_behind_an_answer_spoil_the_connection_and_not_the_answer() -> None:
    client = HttpClient(connect_s=1, limits=LIMITS)
    for cut in range(len(PLAIN), len(TWICE)):
        *_, body, complete, failure, aborted = outcome(client, TWICE[:cut], TWICE[cut:])
        assert (body, complete, failure, aborted) == (b"hello", True, "NoneType: None", True)


async def test_a_full_buffer_ends_the_turn_and_the_next_turn_reads_on() -> None:
    client = HttpClient(connect_s=1)
    exchange, connection, transport = begin(client)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"
    feed(connection, head + b"x" * (len(connection.get_buffer(-1)) - len(head)))
    assert transport.paused and exchange.began
    await asyncio.sleep(0)
    assert not transport.paused
    connection.drop()


async def test_a_stream_far_behind_is_paused_until_it_is_read() -> None:
    client = HttpClient(connect_s=1, limits=LIMITS)
    exchange, connection, transport = begin(client)
    feed(connection, EVENTS[:-15])
    assert transport.paused
    assert await exchange.read() == b"data: 1\n\ndata: 2\n\n"
    assert not transport.paused
    connection.drop()
