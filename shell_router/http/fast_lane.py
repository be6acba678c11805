"""The fast lane: plain POSTs of an application, without what a general server does for each.

aiohttp's server takes a quarter of a small request's time. Here a connection is served while its
requests are plain: a head with a Content-Length and nothing unusual. At the first other request
aiohttp takes the connection over for good, with all unread bytes, and calls the same handlers.
"""

import asyncio
import logging
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from math import inf, nan
from typing import cast

from shell_router.http.app import App, ClientGone, Handler, Request, Response

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 8190  # as aiohttp's limit of a line
MAX_HEADERS = 100
MAX_BODY_BYTES = 2**16
"""The longest plain body; aiohttp gathers the pieces of a longer one without copying them again."""
_BODY_WAIT_S = 1.0
"""How long a body may take to arrive before aiohttp waits for it, with the limit that is set."""

_HEAD = re.compile(
    rb"POST ([!-~]+) "
    rb"HTTP/1\.1\r\n((?:[!#-'*+.0-9A-Z^-z|~-]++:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n)++)\r\n"
)
_LENGTH = re.compile(r"[0-9]{1,9}", re.ASCII)
_REASONS = {status.value: status.phrase for status in HTTPStatus}
_UNUSUAL = frozenset(
    {
        "content-encoding",
        "expect",
        "proxy-connection",
        "sec-websocket-key1",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that aiohttp acts on or refuses."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The limits of a server.

    Attributes:
        max_connections: The most open connections.
        idle_timeout_s: How long a connection may wait for its next request.
        body_timeout_s: How long a head, a handshake, or a plain request's body may take to arrive.
        write_timeout_s: How long a client may take nothing of its reply.
        max_body_bytes: The longest body of `Request.read`.
    """

    max_connections: int
    idle_timeout_s: float
    body_timeout_s: float
    write_timeout_s: float
    max_body_bytes: int


class FastRequest(Request):
    """A plain request, with its body."""

    method = "POST"

    def __init__(
        self, connection: "FastConnection", path: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        self.app = connection.lane.app
        self.path = self.route = path
        self.headers = headers
        self.peer = connection.peer
        self._connection = connection
        self._body = body

    async def read(self, limit_s: float) -> bytes:
        """See `Request`."""
        return self._body

    async def open_stream(
        self, status: int, headers: Mapping[str, str], write_timeout_s: float
    ) -> "FastStream":
        """See `Request`."""
        return FastStream(self._connection, status, headers, write_timeout_s)


class FastStream:
    """A `Stream` in chunks. Its head goes out with its first piece, or in the loop's next turn."""

    def __init__(
        self,
        connection: "FastConnection",
        status: int,
        headers: Mapping[str, str],
        write_timeout_s: float,
    ) -> None:
        self.status = status
        self._connection = connection
        self._write_timeout_s = write_timeout_s
        self._head = connection.format_head(status, headers, b"Transfer-Encoding: chunked")
        connection.streaming = True
        connection.lane.watch.set_busy(connection.transport, REPLYING)
        connection.loop.call_soon(self._write, b"")

    async def send(self, piece: bytes) -> None:
        """See `Stream`."""
        if self._connection.transport.is_closing():
            raise ClientGone("the client has left")
        if piece:  # an empty chunk would end the reply
            self._write(b"%x\r\n%s\r\n" % (len(piece), piece))
        await self._connection.drain(self._write_timeout_s)

    async def end(self) -> "FastStream":
        """See `Stream`."""
        self._write(b"0\r\n\r\n")
        return self

    def _write(self, chunk: bytes) -> None:
        head = self._head
        self._head = b""
        if (head or chunk) and not self._connection.transport.is_closing():
            self._connection.transport.write(head + chunk)


# --- connections

SWEEP_S = 1.0
"""Seconds between two sweeps, which close the connections that are idle for too long."""
_HALF_OPEN_S = 0.1
"""Seconds between two looks at a connection whose client sends no more."""
_UNANSWERED = inf
"""The state of a connection with a request whose reply has not begun; idle ones have a time."""
REPLYING = nan
"""The state while a reply is streamed."""
RESWEEP_S = 0.05
"""The least seconds between two sweeps when there are too many connections."""


class Connections:
    """A server's open connections; the ones that are idle for too long are closed.

    A connection is idle from its beginning, or its last answer, until the head of a request is
    complete, so a client that sends a head byte by byte is idle. When one more than
    `max_connections` is opened, the longest idle one is closed.
    """

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self.checks: dict[asyncio.BaseTransport | None, Callable[[], object]] = {}
        """Called at every sweep, for the connections whose requests aiohttp serves."""
        self._idle_until_s: dict[asyncio.WriteTransport, float] = {}  # the longest idle first
        self._timer: asyncio.TimerHandle | None = None
        self._swept_s = -inf

    def add(self, transport: asyncio.WriteTransport) -> None:
        """Add a connection that waits for its first request.

        If there are too many, the longest idle one is closed, or else this one.
        """
        self.set_idle(transport, self._limits.body_timeout_s)
        most = self._limits.max_connections
        swept_lately = asyncio.get_running_loop().time() < self._swept_s + RESWEEP_S
        if len(self._idle_until_s) > most and not swept_lately:
            self._close_overdue()
        if len(self._idle_until_s) > most:
            idle = (each for each, until_s in self._idle_until_s.items() if until_s < inf)
            self._close(next(idle, transport))

    def set_busy(
        self, transport: asyncio.WriteTransport | None, state: float = _UNANSWERED
    ) -> None:
        """Note that a request's head has arrived, or that its reply has begun."""
        if transport in self._idle_until_s:
            self._idle_until_s[transport] = state

    def keep_half_open(self, transport: asyncio.WriteTransport) -> bool:
        """Keep a connection, if it has no TLS, whose client sends no more and awaits a reply.

        A client that has begun to receive a stream has left.
        """
        if transport.get_extra_info("ssl_object") or self._idle_until_s.get(transport) is REPLYING:
            return False
        self._check_later(transport)
        return True

    def _check_later(self, transport: asyncio.WriteTransport) -> None:
        asyncio.get_running_loop().call_later(_HALF_OPEN_S, self._check_half_open, transport)

    def _check_half_open(self, transport: asyncio.WriteTransport) -> None:
        """Close the connection once it awaits no reply, or find out that its client has left."""
        state = self._idle_until_s.get(transport, 0)
        if state < inf:
            transport.close()
        elif not transport.is_closing():
            if state == _UNANSWERED and not transport.get_write_buffer_size():
                transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # fails if the client has left
            self._check_later(transport)

    def set_idle(
        self, transport: asyncio.WriteTransport | None, limit_s: float | None = None
    ) -> None:
        """Note that the connection waits for a request, for `idle_timeout_s` or `limit_s`."""
        if transport is None or transport.is_closing():
            return
        loop = asyncio.get_running_loop()
        self._idle_until_s.pop(transport, None)
        self._idle_until_s[transport] = loop.time() + (limit_s or self._limits.idle_timeout_s)
        self._timer = self._timer or loop.call_later(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._timer = None
        self._close_overdue()
        for check in tuple(self.checks.values()):
            check()
        if self._idle_until_s:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def _close_overdue(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._swept_s = now_s
        for transport, until_s in tuple(self._idle_until_s.items()):
            has_sent_all = transport.is_closing() and not transport.get_write_buffer_size()
            if has_sent_all or until_s < now_s:
                self._close(transport)

    def _close(self, transport: asyncio.WriteTransport) -> None:
        del self._idle_until_s[transport]
        transport.abort()

    def stop(self) -> None:
        """Stop the sweeps."""
        if self._timer is not None:
            self._timer.cancel()


@dataclass(eq=False)
class FastLane:
    """Makes the connections of one application; `general` makes the ones of aiohttp."""

    app: App
    general: Callable[[], asyncio.Protocol]
    limits: ServerLimits
    watch: Connections
    handlers: Mapping[bytes, Handler] = field(init=False)
    connections: set["FastConnection"] = field(default_factory=set)
    closing: bool = False
    emptied: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last connection has left."""

    def __post_init__(self) -> None:
        self.handlers = {
            route.path.encode(): route.handler
            for route in self.app.routes
            if route.method == "POST" and "{" not in route.path and not route.streams_body
        }

    def __call__(self) -> "FastConnection":
        """Make the connection of a new client."""
        return FastConnection(self)

    def stop(self) -> None:
        """Take no new requests: idle connections close now, the others after their reply."""
        self.closing = True
        for connection in tuple(self.connections):
            connection.close_if_idle()

    async def wait_empty(self, limit_s: float) -> None:
        """Return once all connections have closed, or after `limit_s`."""
        if self.connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.emptied.wait(), limit_s)

    def abort(self) -> None:
        """Break all connections."""
        for connection in tuple(self.connections):
            connection.transport.abort()


class FastConnection(asyncio.Protocol):
    """One client's connection, with one request at a time."""

    transport: asyncio.Transport
    peer: str | None

    def __init__(self, lane: FastLane) -> None:
        self.lane = lane
        self.loop = asyncio.get_running_loop()
        self.streaming = False
        self._is_last = False
        self._received = b""
        self._head: _Head | None = None
        self._task: asyncio.Task[None] | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve the connection."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        client = transport.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.peer = peer_of(transport)
        self.lane.connections.add(self)
        self.lane.emptied.clear()
        self.lane.watch.add(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the request that runs."""
        self._leave()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Begin a request, or keep the bytes until the one before has its reply.

        More than MAX_BODY_BYTES are dropped, and the connection closes after that reply.
        """
        self._received = self._received + data if self._received else data
        if self._task is None:
            self._begin_next()
        elif len(self._received) > MAX_BODY_BYTES:
            # to stop reading would hide that the client leaves
            self._received = b""
            self._is_last = True

    def eof_received(self) -> bool:
        """Keep the connection for the reply to a client that sends no more."""
        return self.lane.watch.keep_half_open(self.transport)

    def pause_writing(self) -> None:
        """Note that the client takes too little."""
        self._writable = self.loop.create_future()

    def resume_writing(self) -> None:
        """Wake the writers."""
        writable = self._writable
        self._writable = None
        if writable is not None and not writable.done():
            writable.set_result(None)

    async def drain(self, limit_s: float) -> None:
        """Wait until the client has taken most of what was written.

        Raises ClientGone when it takes nothing for `limit_s`.
        """
        while self._writable is not None:
            unsent = self.transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(limit_s):
                    await asyncio.shield(self._writable)  # a request's own limit must not end it
            except TimeoutError:
                if self.transport.get_write_buffer_size() >= unsent:
                    self.transport.abort()
                    raise ClientGone(f"nothing taken for {limit_s:g} s") from None

    def close_if_idle(self) -> None:
        """Close it unless a request is under way."""
        if self._task is None:
            self.transport.close()

    # --- requests

    def _begin_next(self) -> None:
        """Begin the next request if all of it is here, or give the connection away."""
        head = self._head or self._read_head()
        if head is None:
            self._give_away()
            return
        self._head = head
        received = self._received
        if len(received) < head.body_end:
            wait_s = min(_BODY_WAIT_S, self.lane.limits.body_timeout_s)
            self._body_timer = self._body_timer or self.loop.call_later(wait_s, self._give_away)
            return
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        self._received = received[head.body_end :]
        self._head = None
        self._is_last = head.is_last
        self.lane.watch.set_busy(self.transport)
        body = received[head.body_start : head.body_end]
        request = FastRequest(self, head.path, head.headers, body)
        self._task = self.loop.create_task(self._serve(request, head.handler))

    def _read_head(self) -> "_Head | None":
        """Read a head; None for one that is incomplete or not plain."""
        match = _HEAD.match(self._received, 0, MAX_HEAD_BYTES)
        handler = self.lane.handlers.get(match[1]) if match else None
        if match is None or handler is None:
            return None
        headers: dict[str, str] = {}
        lines = match[2][:-2].decode("utf-8", "surrogateescape").split("\r\n")
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip(" \t")
        length = headers.get("content-length", "")
        if len(headers) != len(lines) or len(lines) > MAX_HEADERS:
            return None
        if "host" not in headers or not _UNUSUAL.isdisjoint(headers):
            return None
        connection = headers.get("connection", "keep-alive").lower()
        if connection not in ("keep-alive", "close"):
            return None
        if not _LENGTH.fullmatch(length):
            return None
        if int(length) > min(MAX_BODY_BYTES, self.lane.limits.max_body_bytes):
            return None
        start = match.end()
        end = start + int(length)
        return _Head(handler, match[1].decode(), headers, start, end, connection == "close")

    async def _serve(self, request: FastRequest, handler: Handler) -> None:
        try:
            reply = await self.lane.app.gate(request, handler)
            if isinstance(reply, Response):
                self._write(reply)
            if self._writable is not None:
                await self.drain(self.lane.limits.write_timeout_s)
        except ClientGone:
            return
        except asyncio.CancelledError:  # nothing else would end the reply
            self.transport.abort()
            raise
        except Exception:
            log.exception("a reply to %s could not be written", request.path)
            self.transport.abort()
            return
        finally:
            self._task = None
            self.streaming = False
        self.lane.watch.set_idle(self.transport)
        if self.lane.closing or self._is_last:
            self.transport.close()
        elif self._received and not self.transport.is_closing():
            self._begin_next()

    def _write(self, reply: Response) -> None:
        if self.streaming:  # a second head cannot be sent within a stream
            self.transport.abort()
        elif not self.transport.is_closing():
            length = b"Content-Length: %d" % len(reply.body)
            head = self.format_head(reply.status, reply.headers, length)
            self.transport.write(head + reply.body)

    def format_head(self, status: int, headers: Mapping[str, str], framing: bytes) -> bytes:
        """Format a reply's head, which says so if the connection closes after it."""
        if self._is_last and "Connection" not in headers:
            framing += b"\r\nConnection: close"
        return format_head(status, headers, framing)

    def _give_away(self) -> None:
        """Let aiohttp serve this connection from now on."""
        self._leave()
        self.lane.watch.set_idle(self.transport, self.lane.limits.body_timeout_s)
        general = self.lane.general()
        for name in ("data_received", "connection_lost", "pause_writing", "resume_writing"):
            setattr(self, name, getattr(general, name))
        self.transport.set_protocol(self)  # uvloop has looked the methods up
        general.connection_made(self.transport)
        general.data_received(self._received)
        self._received = b""

    def _leave(self) -> None:
        self.lane.connections.discard(self)
        if not self.lane.connections:
            self.lane.emptied.set()
        if self._body_timer is not None:
            self._body_timer.cancel()


@dataclass(slots=True)
class _Head:
    """A plain head, and where its body begins and ends in the received bytes.

    `is_last` tells that the client wants the connection closed after the reply.
    """

    handler: Handler
    path: str
    headers: Mapping[str, str]
    body_start: int
    body_end: int
    is_last: bool


def peer_of(transport: asyncio.BaseTransport | None) -> str | None:
    """Return the client's IP address; None for a Unix socket."""
    address = transport.get_extra_info("peername") if transport else None
    return address[0] if isinstance(address, tuple) else None


class _Clock:
    """The Date header, formatted once a second."""

    second = 0
    date = b""


def format_head(status: int, headers: Mapping[str, str], framing: bytes) -> bytes:
    """Format a reply's head; `framing` is the header that says how its body is framed.

    Raises:
        ValueError: A header holds the end of a line.
    """
    now = int(time.time())
    if _Clock.second != now:
        _Clock.second = now
        _Clock.date = formatdate(now, usegmt=True).encode()
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    lines = text.encode("utf-8", "surrogateescape")
    if lines.count(b"\n") + lines.count(b"\r") > 2 * len(headers):
        raise ValueError("a header holds the end of a line")
    reason = _REASONS.get(status, "").encode()
    return b"HTTP/1.1 %d %s\r\n%sDate: %s\r\n%s\r\n\r\n" % (
        status,
        reason,
        lines,
        _Clock.date,
        framing,
    )
