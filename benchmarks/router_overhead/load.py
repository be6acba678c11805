"""An HTTP/1.1 client with as little work per answer as Python allows, so that the load is not what
is measured.

It reads what the servers here write and no more: answers with a Content-Length or in chunks, kept
alive.
"""

import asyncio
import re
import socket
import time
from collections.abc import Callable
from typing import cast

import orjson

_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_CHUNKED_END = b"0\r\n\r\n"
ANSWER_S = 30.0


class AnswerError(Exception):
    """A server broke off, or answered with an error."""


class Connection(asyncio.Protocol):
    """One connection with one request at a time.

    With `quick_acks` every segment received is acknowledged at once. Without, Linux may wait up to
    40 ms, for which a server that leaves Nagle's algorithm on waits before it sends its next small
    segment.
    """

    def __init__(self, authority: str, *, quick_acks: bool) -> None:
        self._authority = authority.encode()
        self._quick_acks = quick_acks
        self._received = b""
        self._end = 0
        self._ended: asyncio.Future[bytes] | None = None
        self._arrived: Callable[[bytes], None] | None = None
        self._socket: socket.socket
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket = transport.get_extra_info("socket")
        self._acknowledge()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(AnswerError(f"the connection ended before the answer: {exc}"))

    async def post(
        self, path: str, body: bytes, arrived: Callable[[bytes], None] | None = None
    ) -> bytes:
        """The answer's bytes, head and body as they came; `arrived` gets each piece when it comes.
        AnswerError.
        """
        self._received, self._end, self._arrived = b"", 0, arrived
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request_bytes(self._authority, path, body))
        answer = await self._ended
        if not answer.startswith(b"HTTP/1.1 200"):
            raise AnswerError(f"{path}: {answer[:500]!r}")
        return answer

    def data_received(self, data: bytes) -> None:
        if self._quick_acks:
            self._acknowledge()
        if self._arrived is not None:
            self._arrived(data)
        self._received += data
        if self._complete() and self._ended is not None and not self._ended.done():
            self._ended.set_result(self._received)

    def _complete(self) -> bool:
        if self._end == 0:
            head_end = self._received.find(b"\r\n\r\n")
            if head_end < 0:
                return False
            length = _CONTENT_LENGTH.search(self._received, 0, head_end)
            self._end = head_end + 4 + int(length.group(1)) if length else -1
        if self._end < 0:
            return self._received.endswith(_CHUNKED_END)
        return len(self._received) >= self._end

    def _acknowledge(self) -> None:
        if self._quick_acks:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()


def request_bytes(authority: bytes, path: str, body: bytes) -> bytes:
    """One POST as it goes over the wire; only our router reads `x-model`."""
    head = b"POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\n" % (
        path.encode(),
        authority,
    )
    return head + b"x-model: small\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


async def connect(url: str, *, quick_acks: bool = False) -> Connection:
    """A connection to the server at `url`, http://host:port."""
    authority = url.removeprefix("http://")
    host, _, port = authority.partition(":")
    loop = asyncio.get_running_loop()
    connected = loop.create_connection(
        lambda: Connection(authority, quick_acks=quick_acks), host, int(port)
    )
    async with asyncio.timeout(ANSWER_S):
        return (await connected)[1]


def answer_body(answer: bytes) -> bytes:
    """The body of an answer; chunks are put together."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if _CONTENT_LENGTH.search(head):
        return body
    pieces, at = [], 0
    while size := int(body[at : (line_end := body.index(b"\r\n", at))], 16):
        pieces.append(body[line_end + 2 : line_end + 2 + size])
        at = line_end + 2 + size + 2
    return b"".join(pieces)


def json_body(answer: bytes) -> dict[str, object]:
    """The body of an answer that is one JSON object."""
    found: dict[str, object] = orjson.loads(answer_body(answer))
    return found


def now_s() -> float:
    """Monotonic seconds, the same clock in every process of this machine."""
    return time.monotonic()
