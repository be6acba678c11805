"""An HTTP/1.1 client for the legs of a pair: no task, no copy and no parsing in Python on the way
of a chunk.

A general client costs more per request than all else the router does for it
(docs/benchmarks/index.md). This one knows POST and GET with bytes for a body, kept-alive
connections, TLS, and limits; parsing is llhttp's, by `httptools`.
"""

import asyncio
import ssl
from base64 import b64encode
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import httptools
from yarl import URL

from shell_router.http.tasks import TaskOwner

MAX_BUFFERED_BYTES = 2**20
"""A reader that is this far behind stops the connection."""

IDLE_S = 2.0
"""Below uvicorn's and SGLang's 5 s: a connection that the server closes while it is used again
fails the request.
"""

_LENGTHS = (b"content-length", b"transfer-encoding")
_NO_BODY = (204, 304)

Origin = tuple[str, int, bool]
"""Host, port, and whether TLS is spoken: what a connection can be used for."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method at one URL, with the part of the request's head that never changes."""

    origin: Origin
    head: bytes

    def request(self, body: bytes | None, headers: bytes = b"") -> bytes:
        """The whole request as it goes over the wire; `headers` are further lines of its head."""
        if body is None:
            return b"%s%s\r\n" % (self.head, headers)
        length = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        return b"".join((self.head, headers, length, body))


def endpoint(method: str, url: URL, key: str | None = None) -> Endpoint:
    """Read `url` once. A `key` is sent as a bearer; else a user and a password in the URL as basic
    authentication.

    Raises ValueError without a host.
    """
    if url.host is None or url.port is None:
        raise ValueError(f"{url} names no host")
    head = f"{method} {url.raw_path_qs} HTTP/1.1\r\nHost: {url.host_port_subcomponent}\r\n"
    if key is not None:
        head += f"Authorization: Bearer {key}\r\n"
    elif url.user is not None:
        secret = b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
        head += f"Authorization: Basic {secret}\r\n"
    return Endpoint((url.host, url.port, url.scheme == "https"), head.encode())


class Exchange:
    """One request and its answer as it comes, for one reader at a time.

    `status` is 0 until the answer's head has come, `began` False until the first byte of its body.
    `pieces` of the body have not been read yet. `ended` is called once: the answer is complete, or
    it failed, as it also does when its reader leaves before. Without a byte for `read_timeout_s` it
    fails with TimeoutError. With `max_buffered_bytes` None everything is kept until it is read.
    `explain` turns an OSError (a TimeoutError is one) into the `failure` that readers raise.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        read_timeout_s: float,
        ended: Callable[["Exchange"], None] | None,
        max_buffered_bytes: int | None,
        explain: Callable[[Exception], Exception] | None,
    ) -> None:
        self.status = 0
        self.content_type = "application/octet-stream"
        self.began = False
        self.complete = False
        self.over = False
        self.failure: Exception | None = None
        self._ended = ended
        self._explain = explain
        self._read_timeout_s = read_timeout_s
        self._max_buffered_bytes = max_buffered_bytes
        self.pieces: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._last_byte_s = 0.0
        self._loop = loop
        self._carrier: Connection | None = None
        self._reader: asyncio.Future[None] | None = None

    # --- for the reader

    async def head(self) -> None:
        """Return once `status` is known; raises what failed before."""
        while not self.status:
            await self._arrival()

    async def read(self) -> bytes:
        """What has come since the last read, or what comes next; empty at the end. Raises what
        failed.
        """
        while not self.pieces:
            if self.complete:
                return b""
            await self._arrival()
        pieces = self.pieces
        self.pieces = []
        self._buffered = 0
        if self._paused:
            self._paused = False
            self._last_byte_s = self._loop.time()
            if self._carrier is not None:
                self._carrier.resume()
        if len(pieces) == 1:
            return pieces[0]
        return b"".join(pieces)

    async def read_all(self) -> bytes:
        """All of the body that has not been read."""
        pieces = []
        while piece := await self.read():
            pieces.append(piece)
        return b"".join(pieces)

    def held(self) -> bytes:
        """All that has come and has not been read."""
        return b"".join(self.pieces)

    def close(self) -> None:
        """The reader leaves: unless the answer was complete, its connection is closed. Harmless
        when repeated.
        """
        if not self.over:
            self.fail(ConnectionAbortedError("its reader has left"))

    def _arrival(self) -> "asyncio.Future[None]":
        """What to await for the next bytes, or the end; raises what failed."""
        if self.failure is not None:
            raise self.failure
        self._reader = self._loop.create_future()
        return self._reader

    # --- for the connection

    def carried_by(self, carrier: "Connection") -> float:
        """The request is on its way; when it fails, as `due_s`."""
        self._carrier = carrier
        self._last_byte_s = now_s = self._loop.time()
        return now_s + self._read_timeout_s

    def due_s(self) -> float:
        """When it fails, by the loop's clock, unless bytes come before."""
        return (self._loop.time() if self._paused else self._last_byte_s) + self._read_timeout_s

    def bytes_came(self, count: int) -> None:
        """`count` bytes of head or body came: wake the reader, or pause the server if the reader is
        far behind.
        """
        self._last_byte_s = self._loop.time()
        self._buffered += count
        limit = self._max_buffered_bytes
        reader = self._reader
        if limit is not None and self._buffered > limit and not self._paused and self._carrier:
            if not self.pieces:  # no reader takes those, so a pause would never end
                self.fail(
                    ConnectionError("the answer's head, or the frame of its body, is too long")
                )
                return
            self._paused = True
            self._carrier.pause()
        if reader is not None and self.status and not reader.done():
            reader.set_result(None)

    def finished(self) -> None:
        """The answer is complete, and its connection free."""
        if not self.over:
            self.complete = True
            self._end()

    def fail(self, error: Exception) -> None:
        """End it with `error`, unless it has ended; what came before can still be read."""
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


class Connection(asyncio.Protocol):
    """Carries one exchange at a time; `released` is called when it can carry the next, `lost` when
    it is gone.

    One timer watches over all its exchanges: setting one for each would cost as much as parsing the
    answer.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        origin: Origin,
        released: Callable[["Connection"], None],
        lost: Callable[["Connection"], None],
    ) -> None:
        self.origin = origin
        self.idle_since_s = 0.0
        self.transport: asyncio.Transport
        self._loop = loop
        self._released = released
        self._lost = lost
        self._watch: asyncio.TimerHandle | None = None
        self._watch_s = 0.0
        self._exchange: Exchange | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._content_type = ""
        self._sized = False
        self._ended = False
        self._reusable = True
        self._paused = False

    def send(self, exchange: Exchange, request: bytes) -> None:
        """Begin `exchange` by writing its request."""
        self._exchange = exchange
        self._ended = False
        self._reusable = True
        self.transport.write(request)
        due_s = exchange.carried_by(self)
        if self._watch is None or due_s < self._watch_s:
            self._watch_until(due_s)

    # --- for the exchange

    def drop(self) -> None:
        """Close it: the exchange is over before its end."""
        self._exchange = None
        self.transport.abort()

    def pause(self) -> None:
        if not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(self)
        if self._watch is not None:
            self._watch.cancel()
        exchange = self._exchange
        self._exchange = None
        if exchange is None:
            return
        if exc is None and exchange.status and not self._sized:
            exchange.finished()  # such a body ends with its connection
        else:
            exchange.fail(
                ConnectionError(f"the connection broke before the answer's end ({exc or 'closed'})")
            )

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:  # bytes without a request
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._reusable = False
            if not self._ended:
                exchange.fail(ConnectionError(f"the answer is not HTTP/1.1 ({error})"))
        if self._ended:
            self._end()
        else:
            exchange.bytes_came(len(data))

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
            self._released(self)
        else:
            self.transport.close()
        if exchange is not None:
            exchange.finished()

    # --- httptools

    def on_message_begin(self) -> None:
        self._reusable = not self._ended  # an answer behind the answer was not asked for
        self._content_type = ""
        self._sized = False

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower == b"content-type":
            self._content_type = value.decode("latin-1")
        elif lower in _LENGTHS:
            self._sized = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._sized = self._sized or status in _NO_BODY
        exchange = self._exchange
        if status >= 200 and exchange is not None and not self._ended:
            exchange.status = status
            if self._content_type:
                exchange.content_type = self._content_type

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is not None and not self._ended:
            exchange.began = True
            exchange.pieces.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:  # a 1xx is not the answer yet
            self._ended = True
            self._reusable = self._reusable and self._parser.should_keep_alive()


class HttpClient:
    """Begins exchanges over pooled connections, which are not used again once they were idle for
    `idle_s`.

    `tls` is for https; without it certificates are checked by the system's. Make it where its loop
    runs: asking asyncio for the loop again and again costs a system call each on Python 3.11.
    """

    def __init__(
        self, *, connect_s: float, idle_s: float = IDLE_S, tls: ssl.SSLContext | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._tls: ssl.SSLContext | Literal[True] = tls or True
        self._idle: dict[Origin, deque[Connection]] = {}
        self._connecting = TaskOwner()
        self._closed = False
        self._swept_s = 0.0

    def begin(
        self,
        endpoint: Endpoint,
        body: bytes | None,
        *,
        read_timeout_s: float,
        ended: Callable[[Exchange], None] | None = None,
        max_buffered_bytes: int | None = MAX_BUFFERED_BYTES,
        explain: Callable[[Exception], Exception] | None = None,
        headers: bytes = b"",
    ) -> Exchange:
        """Send a request. See `Exchange` for the answer."""
        exchange = Exchange(self._loop, read_timeout_s, ended, max_buffered_bytes, explain)
        request = endpoint.request(body, headers)
        idle = self._idle.get(endpoint.origin)
        while idle:  # the one used last is the least likely to be closed by the server
            connection = idle.pop()
            if (
                self._loop.time() - connection.idle_since_s < self._idle_s
                and not connection.transport.is_closing()
            ):
                connection.send(exchange, request)
                return exchange
            connection.drop()
        self._connecting.start(self._connect(endpoint.origin, exchange, request))
        return exchange

    @property
    def idle(self) -> int:
        """Connections that carry nothing and are kept."""
        return sum(map(len, self._idle.values()))

    async def aclose(self, limit_s: float) -> None:
        """Close idle connections, after `limit_s` also those still being opened; the rest close as
        they end.
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
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._loop, origin, self._keep, self._forget),
                    host,
                    port,
                    ssl=tls,
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
                self._keep(connection)
            else:
                connection.send(exchange, request)

    def _keep(self, connection: Connection) -> None:
        """Keep a connection that carries nothing, and close those, to any server, that were idle
        for too long.
        """
        if self._closed:
            connection.drop()
            return
        connection.idle_since_s = now_s = self._loop.time()
        self._idle.setdefault(connection.origin, deque()).append(connection)
        if now_s - self._swept_s >= self._idle_s:
            self._swept_s = now_s
            for idle in self._idle.values():
                while idle and now_s - idle[0].idle_since_s >= self._idle_s:
                    idle.popleft().drop()

    def _forget(self, connection: Connection) -> None:
        idle = self._idle.get(connection.origin)
        if idle and connection in idle:
            idle.remove(connection)
