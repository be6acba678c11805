"""An HTTP/1.1 client for engines: llhttp parses the answers, and no task runs per chunk.

A general client costs more per request than all else the router does for it
(docs/benchmarks/index.md). This one knows POST and GET with bytes for a body, kept-alive
connections, TLS, and limits on time and on everything that it buffers. `httptools` wraps llhttp.
"""

import asyncio
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import httptools
from yarl import URL

from shell_router.http.tasks import TaskOwner

TURN_BYTES = 2**15
"""The most bytes read from a connection in one turn of the loop: at most about a millisecond of
work, even if chunks are tiny.
"""

IDLE_S = 2.0
"""Seconds after which an idle connection is not used again. Uvicorn and SGLang close theirs after
5 s, and a request sent on a connection that is being closed fails.
"""

HTTP_OK = 200
_FIRST_ERROR = 400
_FRAMINGS = (b"content-length", b"transfer-encoding")
_NO_BODY = (204, 304)
NO_HEADERS: Mapping[str, str] = {}

Origin = tuple[str, int, bool]
"""Host, port, and whether TLS is spoken. A connection serves one origin."""


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """The most bytes that are taken of one answer.

    Attributes:
        head: Bytes of the head, all 1xx heads before it included. The same limit holds for a body's
            framing between two pieces.
        body: Bytes of a body that is not read as a stream of events.
        error: Bytes of the body of an error status.
        unread: Unread bytes of a stream, above which its connection is not read.
    """

    head: int = 2**16
    body: int = 128 * 2**20
    error: int = 2**20
    unread: int = 2**20


class AnswerTooLong(ConnectionError):
    """An answer is over one of the client's limits."""

    def __init__(self, part: str, max_bytes: int) -> None:
        super().__init__(f"{part} of more than {max_bytes} bytes")


class AnswerBroken(ConnectionError):
    """The connection broke after the request was sent, before the answer's end."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method at one URL, with the part of the request's head that never changes."""

    origin: Origin
    head: bytes

    def request(self, body: bytes | None, headers: bytes = b"") -> bytes:
        """Return the request as it goes over the wire; `headers` are further lines of its head."""
        if body is None:
            return b"%s%s\r\n" % (self.head, headers)
        length = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        return b"".join((self.head, headers, length, body))


def make_endpoint(
    method: str, url: URL, key: str | None = None, headers: Mapping[str, str] = NO_HEADERS
) -> Endpoint:
    """Return the endpoint of `url`. Raises ValueError if it names no host.

    A `key` is sent as a bearer token; without one, a user and a password in the URL are sent as
    basic authentication. `headers` are sent, too.
    """
    if url.host is None or url.port is None:
        raise ValueError(f"{url} names no host")
    head = f"{method} {url.raw_path_qs} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n"
    if key is not None:
        head += f"Authorization: Bearer {key}\r\n"
    elif url.user is not None:
        secret = b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
        head += f"Authorization: Basic {secret}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return Endpoint((url.host, url.port, url.scheme == "https"), head.encode())


class Exchange:
    """One request and its answer as it comes, for one reader at a time.

    `status` is 0 until the answer's head has come, `began` False until the first byte of its body.
    `retry_after` is the header of that name.
    An exchange fails with TimeoutError if no byte comes for `read_timeout_s`, and with
    AnswerTooLong if the body is over its limit. A `streamed` answer of events has no limit.

    Args:
        loop: The running loop.
        limits: The answer's limits in bytes.
        read_timeout_s: The longest silence of the server.
        streamed: Whether the reader takes the body piece by piece.
        ended: Called once, when the answer is complete or has failed.
        explain: Turns an OSError (a TimeoutError is one) into the `failure` that readers raise.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: AnswerLimits,
        read_timeout_s: float,
        streamed: bool,
        ended: Callable[["Exchange"], None] | None,
        explain: Callable[[Exception], Exception] | None,
    ) -> None:
        self.status = 0
        self.content_type = "application/octet-stream"
        self.retry_after = ""
        self.began = False
        self.complete = False
        self.over = False
        self.failure: Exception | None = None
        self._limits = limits
        self._streamed = streamed
        self._ended = ended
        self._explain = explain
        self._read_timeout_s = read_timeout_s
        self._pieces: list[bytes] = []
        self._body_bytes = 0  # in a stream, only the unread ones count
        self._max_bytes = 0
        self._paused = False
        self._last_byte_s = 0.0
        self._loop = loop
        self._carrier: Connection | None = None
        self._reader: asyncio.Future[None] | None = None

    # --- for the reader

    async def wait_for_head(self) -> None:
        """Wait until `status` is known; raise the failure if there is one before."""
        while not self.status:
            await self._next_arrival()

    async def read(self) -> bytes:
        """Return the unread bytes, or the next to come; empty at the end. Raises `failure`."""
        while not self._pieces:
            if self.complete:
                return b""
            await self._next_arrival()
        pieces = self._pieces
        self._pieces = []
        if self._streamed:
            self._body_bytes = 0
        if self._paused:
            self._paused = False
            self._last_byte_s = self._loop.time()
            if self._carrier is not None:
                self._carrier.resume()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def read_all(self) -> bytes:
        """Return all of the body that has not been read."""
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    def peek(self) -> bytes:
        """Return all that has come and has not been read."""
        return b"".join(self._pieces)

    def close(self) -> None:
        """Leave: unless the answer was complete, its connection is closed. May be repeated."""
        if not self.over:
            self.fail(ConnectionAbortedError("its reader has left"))

    def _next_arrival(self) -> "asyncio.Future[None]":
        """Return a future that ends with the next bytes or the answer. Raises `failure`."""
        if self.failure is not None:
            raise self.failure
        self._reader = self._loop.create_future()
        return self._reader

    # --- for the connection

    def start(self, carrier: "Connection") -> float:
        """Note that the request was sent on `carrier`; return `due_s`."""
        self._carrier = carrier
        self._last_byte_s = self._loop.time()
        return self._last_byte_s + self._read_timeout_s

    def due_s(self) -> float:
        """Return the loop's time at which the exchange times out unless bytes come."""
        return (self._loop.time() if self._paused else self._last_byte_s) + self._read_timeout_s

    def take_head(self, status: int, content_type: str, retry_after: str) -> None:
        """Note the answer's head, from which the body's limit follows."""
        self.status = status
        self.retry_after = retry_after
        self.content_type = content_type or self.content_type
        is_events = status == HTTP_OK and content_type.startswith("text/event-stream")
        self._streamed = self._streamed and is_events
        self._max_bytes = self._limits.error if status >= _FIRST_ERROR else self._limits.body

    def take(self, piece: bytes) -> None:
        """Keep the next `piece` of the body, which may be empty, and wake the reader."""
        self._last_byte_s = self._loop.time()
        if piece:
            self.began = True
            self._pieces.append(piece)
            self._body_bytes += len(piece)
            if self._streamed:
                if self._body_bytes > self._limits.unread and not self._paused:
                    self._pause()
            elif self._body_bytes > self._max_bytes:
                part = "an error" if self.status >= _FIRST_ERROR else "a body"
                self.fail(AnswerTooLong(part, self._max_bytes))
        reader = self._reader
        if reader is not None and self.status and not reader.done():
            reader.set_result(None)

    def _pause(self) -> None:
        if self._carrier is not None:
            self._paused = True
            self._carrier.pause()

    def finish(self) -> None:
        """Note that the answer is complete, and its connection free."""
        if not self.over:
            self.complete = True
            self._end()

    def fail(self, error: Exception) -> None:
        """End it with `error`, unless it has ended; the bytes before it can still be read."""
        if self.over:
            return
        if self._explain is None or not isinstance(error, OSError):
            self.failure = error
        else:
            self.failure = self._explain(error)
        carrier = self._carrier
        self._end()
        if carrier is not None:
            carrier.drop()

    def _end(self) -> None:
        self.over = True
        self._carrier = None
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)
        ended = self._ended
        self._ended = None
        if ended is not None:
            ended(self)


class Connection(asyncio.BufferedProtocol):
    """Carries one exchange at a time.

    In one turn of the loop at most TURN_BYTES are read and parsed; then others have their turn. One
    timer watches over all its exchanges: setting one for each would cost as much as parsing the
    answer.
    """

    def __init__(self, client: "HttpClient", origin: Origin) -> None:
        self.origin = origin
        self.idle_since_s = 0.0
        self.transport: asyncio.Transport
        self._client = client
        self._loop = client.loop
        self._buffer = client.buffer
        self._max_head_bytes = client.limits.head
        self._watch: asyncio.TimerHandle | None = None
        self._watch_s = 0.0
        self._exchange: Exchange | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._content_type = ""
        self._retry_after = ""
        self._frame_bytes = 0
        self._sized = False
        self._ended = False
        self._reusable = True
        self._reader_behind = False
        self._turn_over = False
        self._paused = False

    def send(self, exchange: Exchange, request: bytes) -> None:
        """Begin `exchange` by writing its request."""
        self._exchange = exchange
        self._frame_bytes = 0
        self._ended = False
        self._reusable = True
        self.transport.write(request)
        due_s = exchange.start(self)
        if self._watch is None or due_s < self._watch_s:
            self._watch_until(due_s)

    # --- for the exchange

    def drop(self) -> None:
        """Close the connection at once; no exchange needs it any more."""
        self._exchange = None
        self.transport.abort()

    def pause(self) -> None:
        """Read no more: the reader is far behind."""
        self._reader_behind = True
        self._pause_or_resume()

    def resume(self) -> None:
        """Read on."""
        self._reader_behind = False
        self._pause_or_resume()

    def _begin_turn(self) -> None:
        self._turn_over = False
        self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        paused = self._reader_behind or self._turn_over
        if paused == self._paused or self.transport.is_closing():
            return
        self._paused = paused
        if paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    # --- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange: its body ends with the connection, or the answer broke off."""
        self._client.forget(self)
        if self._watch is not None:
            self._watch.cancel()
        exchange = self._exchange
        self._exchange = None
        if exchange is None:
            return
        if exc is None and exchange.status and not self._sized:
            exchange.finish()
        else:
            exchange.fail(
                AnswerBroken(f"the connection broke before the answer's end ({exc or 'closed'})")
            )

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Parse the bytes that came, and hand the body on."""
        exchange = self._exchange
        if exchange is None:  # bytes without a request
            self.transport.abort()
            return
        try:
            self._frame_bytes += nbytes
            if self._frame_bytes < self._max_head_bytes:
                self._parser.feed_data(self._buffer[:nbytes])
            else:
                self._parse_up_to_limit(self._buffer[:nbytes])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._spoil(ConnectionError(f"the answer is not HTTP/1.1 ({error})"))
        except AnswerTooLong as error:
            self._spoil(error)
        body = self._body
        if body:
            self._body = []
        exchange.take(body[0] if len(body) == 1 else b"".join(body))
        if self._exchange is None:
            return
        if self._ended:
            self._end()
        elif nbytes == len(self._buffer):
            self._turn_over = True
            self._pause_or_resume()
            self._loop.call_soon(self._begin_turn)

    def _spoil(self, error: ConnectionError) -> None:
        """Fail the exchange, unless its answer is complete, and do not use the connection again."""
        self._reusable = False
        if self._exchange is not None and not self._ended:
            self._exchange.fail(error)

    def _parse_up_to_limit(self, data: memoryview) -> None:
        """Parse `data`, in which the limit of a head or of framing falls.

        Raises AnswerTooLong unless a head or a piece of the body ends before the limit: there the
        parser's callbacks reset `_frame_bytes`.
        """
        room = self._max_head_bytes - (self._frame_bytes - len(data))
        self._parser.feed_data(data[:room])
        if self._frame_bytes:
            part = "the frame of a body" if self._exchange and self._exchange.status else "a head"
            raise AnswerTooLong(part, self._max_head_bytes)
        self._parser.feed_data(data[room:])

    def _watch_until(self, due_s: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._loop.call_at(due_s, self._check_timeout)
        self._watch_s = due_s

    def _check_timeout(self) -> None:
        self._watch = None
        exchange = self._exchange
        if exchange is None:
            return
        due_s = exchange.due_s()
        if due_s <= self._loop.time():
            exchange.fail(TimeoutError("no byte came in time"))
        else:
            self._watch_until(due_s)

    def _end(self) -> None:
        exchange = self._exchange
        self._exchange = None
        self._ended = False
        if self._reusable:
            if self._paused:
                self.resume()
            self._client.keep(self)
        else:
            self.transport.close()
        if exchange is not None:
            exchange.finish()

    # --- httptools

    def on_message_begin(self) -> None:
        """Begin an answer, or a 1xx before it."""
        self._reusable = not self._ended  # a second answer was not asked for
        self._content_type = ""
        self._retry_after = ""
        self._sized = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header."""
        lower = name.lower()
        if lower == b"content-type":
            self._content_type = value.decode("latin-1")
        elif lower == b"retry-after":
            self._retry_after = value.decode("latin-1")
        elif lower in _FRAMINGS:
            self._sized = True

    def on_headers_complete(self) -> None:
        """Take the head, unless it is a 1xx."""
        status = self._parser.get_status_code()
        self._sized = self._sized or status in _NO_BODY
        exchange = self._exchange
        if status >= HTTP_OK and exchange is not None and not self._ended:
            self._frame_bytes = 0
            exchange.take_head(status, self._content_type, self._retry_after)

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        if not self._ended:
            self._frame_bytes = 0
            self._body.append(body)

    def on_message_complete(self) -> None:
        """End the answer, unless it is a 1xx."""
        if self._parser.get_status_code() >= HTTP_OK:
            self._frame_bytes = 0
            self._ended = True
            self._reusable = self._reusable and self._parser.should_keep_alive()


class HttpClient:
    """Begins exchanges over pooled connections; one that was idle for `idle_s` is not used again.

    `tls` is for https; without it the system's certificates are trusted. Create the client inside
    the running loop, which it keeps: on Python 3.11 asking asyncio for it costs a system call.
    """

    def __init__(
        self,
        *,
        connect_s: float,
        idle_s: float = IDLE_S,
        tls: ssl.SSLContext | None = None,
        limits: AnswerLimits = AnswerLimits(),
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._connect_s = connect_s
        self._idle_s = idle_s
        self.limits = limits
        self._tls: ssl.SSLContext | Literal[True] = tls or True
        self._idle: dict[Origin, deque[Connection]] = {}
        self._connecting = TaskOwner()
        self.buffer = memoryview(bytearray(TURN_BYTES))
        """Shared by all connections: each empties it before another fills it."""
        self._closed = False
        self._swept_s = 0.0

    def begin(
        self,
        endpoint: Endpoint,
        body: bytes | None,
        *,
        read_timeout_s: float,
        streamed: bool = False,
        ended: Callable[[Exchange], None] | None = None,
        explain: Callable[[Exception], Exception] | None = None,
        headers: bytes = b"",
    ) -> Exchange:
        """Send a request. See `Exchange` for the answer."""
        exchange = Exchange(self.loop, self.limits, read_timeout_s, streamed, ended, explain)
        request = endpoint.request(body, headers)
        idle = self._idle.get(endpoint.origin)
        while idle:  # the one used last is the least likely to be closed by the server
            connection = idle.pop()
            if (
                self.loop.time() - connection.idle_since_s < self._idle_s
                and not connection.transport.is_closing()
            ):
                connection.send(exchange, request)
                return exchange
            connection.drop()
        self._connecting.start(self._connect(endpoint.origin, exchange, request))
        return exchange

    @property
    def idle(self) -> int:
        """The number of connections that carry nothing and are kept."""
        return sum(map(len, self._idle.values()))

    async def aclose(self, limit_s: float) -> None:
        """Close idle connections, and after `limit_s` those still being opened.

        The rest close as they end.
        """
        self._closed = True
        await self._connecting.aclose(limit_s)
        for idle in self._idle.values():
            for connection in tuple(idle):
                connection.drop()
            idle.clear()

    async def _connect(self, origin: Origin, exchange: Exchange, request: bytes) -> None:
        host, port, secure = origin
        tls = self._tls if secure else None
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await self.loop.create_connection(
                    lambda: Connection(self, origin), host, port, ssl=tls
                )
        except TimeoutError:
            exchange.fail(ConnectionError(f"no connection within {self._connect_s:g} s"))
        except (OSError, ValueError) as error:  # ValueError: a host name that no encoding takes
            exchange.fail(error if isinstance(error, OSError) else ConnectionError(str(error)))
        except asyncio.CancelledError:
            exchange.fail(ConnectionAbortedError("the client is closing"))
            raise
        else:
            if exchange.over:
                self.keep(connection)
            else:
                connection.send(exchange, request)

    def keep(self, connection: Connection) -> None:
        """Keep a connection that carries nothing; close all that were idle for too long."""
        if self._closed:
            connection.drop()
            return
        connection.idle_since_s = now_s = self.loop.time()
        self._idle.setdefault(connection.origin, deque()).append(connection)
        if now_s - self._swept_s >= self._idle_s:
            self._swept_s = now_s
            for idle in self._idle.values():
                while idle and now_s - idle[0].idle_since_s >= self._idle_s:
                    idle.popleft().drop()

    def forget(self, connection: Connection) -> None:
        """Remove a connection that has closed from the idle ones."""
        idle = self._idle.get(connection.origin)
        if idle and connection in idle:
            idle.remove(connection)
