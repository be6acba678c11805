"""HTTP/1.1 server protocol with as little work per request as Python allows. For tests and
benchmarks only.
"""

import asyncio
import re
from collections.abc import Callable
from typing import cast

import orjson

_CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)", re.IGNORECASE)
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; "
    b"charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_REASONS = {200: b"OK", 400: b"Bad Request", 404: b"Not Found", 500: b"Internal Server Error"}


class Exchange:
    """One request and the answer to it. `gone` is called if the client leaves before the answer's
    end.
    """

    __slots__ = ("_protocol", "_streaming", "body", "gone", "method", "path")

    def __init__(self, protocol: "HttpProtocol", method: bytes, path: bytes, body: bytes) -> None:
        self._protocol = protocol
        self._streaming = False
        self.method = method
        self.path = path
        self.body = body
        self.gone: Callable[[], None] | None = None

    def answer(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        """The whole answer."""
        self._protocol.write(
            b"HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s"
            % (status, _REASONS.get(status, b"Error"), content_type, len(body), body)
        )
        self._protocol.ended()

    def answer_json(self, found: object, status: int = 200) -> None:
        """The whole answer, as JSON."""
        self.answer(status, orjson.dumps(found))

    def write(self, chunks: list[bytes], *, last: bool) -> None:
        """Some of a streamed answer, each a chunk of its own; the head goes first, the end after
        the `last`.
        """
        pieces = [] if self._streaming else [_STREAM_HEAD]
        self._streaming = True
        pieces += [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
        if last:
            pieces.append(b"0\r\n\r\n")
        self._protocol.write(b"".join(pieces))
        if last:
            self._protocol.ended()

    def drop(self) -> None:
        """Break the connection."""
        self._protocol.drop()


class HttpProtocol(asyncio.Protocol):
    """Serves one connection, one exchange at a time, in order. Bodies must come with a
    Content-Length.

    With `cut_bytes` above 0 everything is written in pieces of that size, each in a turn of the
    loop of its own.
    """

    def __init__(
        self,
        serve: Callable[[Exchange], None],
        cut_bytes: Callable[[], int],
        connections: set["HttpProtocol"],
    ) -> None:
        self._serve = serve
        self._cut_bytes = cut_bytes
        self._connections = connections
        self._received = b""
        self._exchange: Exchange | None = None
        self._pending: list[bytes] = []
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._pending.clear()
        exchange, self._exchange = self._exchange, None
        if exchange is not None and exchange.gone is not None:
            exchange.gone()

    def data_received(self, data: bytes) -> None:
        self._received = self._received + data if self._received else data
        if self._exchange is None:
            self._next()

    def _next(self) -> None:
        received = self._received
        head_end = received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        if received.startswith(
            b"PRI "
        ):  # HTTP/2, which sglang-router tries first when it looks for gRPC workers
            self.drop()
            return
        length = _CONTENT_LENGTH.search(received, 0, head_end)
        end = head_end + 4 + (int(length.group(1)) if length else 0)
        if len(received) < end:
            return
        self._received = received[end:]
        method, path, _ = received.split(b" ", 2)
        self._exchange = Exchange(self, method, path, received[head_end + 4 : end])
        self._serve(self._exchange)

    def write(self, written: bytes) -> None:
        """Send bytes, cut as asked."""
        cut_bytes = self._cut_bytes()
        if not cut_bytes:
            self._transport.write(written)
            return
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._write_piece)
        self._pending += [
            written[start : start + cut_bytes] for start in range(0, len(written), cut_bytes)
        ]

    def _write_piece(self) -> None:
        if self._pending:
            self._transport.write(self._pending.pop(0))
            asyncio.get_running_loop().call_soon(self._write_piece)

    def ended(self) -> None:
        """The current answer has been written; serve what has come in meanwhile."""
        self._exchange = None
        if self._received:
            self._next()

    def drop(self) -> None:
        """Break the connection: what was written already is sent, then it is closed."""
        self._transport.close()
