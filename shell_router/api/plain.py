"""The way of most requests: whole POSTs to the router's own routes, without what a general server
does for each.

aiohttp's server takes a quarter of a small request's time. Here a connection is served while its
requests are plain: a head with a Content-Length and nothing unusual. At the first that is not,
aiohttp takes the connection over for good, with all bytes unread, and answers by the same handlers.
"""

import asyncio
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from math import inf
from typing import Any, cast

from aiohttp import ClientConnectionResetError, web

from shell_router.api.services import ApiSettings

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 8190  # as aiohttp's limit of a line
MAX_BODY_BYTES = 2**16
"""Of a plain request; longer ones are aiohttp's, which gathers their pieces without copying them
again and again.
"""
_BODY_WAIT_S = 1.0  # then aiohttp goes on, with the limit that is set
SWEEP_S = 1.0
RESWEEP_S = 0.05
"""Seconds between looks at all connections, and the least of them where there are too many."""

_HEAD = re.compile(
    rb"POST ([!-~]+) "
    rb"HTTP/1\.1\r\n((?:[!#-'*+.0-9A-Z^-z|~-]++:[^\x00-\x08\x0a-\x1f\x7f]*+\r\n)++)\r\n"
)
_LENGTH = re.compile(r"[0-9]{1,9}", re.ASCII)
_REASONS = {one.value: one.phrase for one in HTTPStatus}
_UNUSUAL = frozenset({"content-encoding", "expect", "transfer-encoding", "upgrade"})


class PlainRequest(dict[Any, Any]):
    """As much of aiohttp's request as handlers use, read already. `headers` are by their lower-case
    names.
    """

    __slots__ = ("app", "body", "connection", "headers", "path", "peername")
    method = "POST"

    def __init__(
        self, connection: "PlainConnection", path: str, headers: Mapping[str, str], body: bytes
    ) -> None:
        self.connection = connection
        self.app = connection.server.app
        self.peername = connection.peername
        self.path = path
        self.headers = headers
        self.body = body


@dataclass(slots=True)
class PlainReply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class PlainStream:
    """A streamed answer in chunks. Its head goes out with its first bytes, or in the loop's next
    turn.
    """

    def __init__(
        self, connection: "PlainConnection", status: int, headers: Mapping[str, str], limit_s: float
    ) -> None:
        self.status = status
        self._connection = connection
        self._limit_s = limit_s
        self._head = _head(status, headers, b"Transfer-Encoding: chunked")
        connection.streaming = True
        connection.loop.call_soon(self._write, b"")

    async def send(self, frames: bytes) -> None:
        """See `EventStream`."""
        if self._connection.transport.is_closing():
            raise ClientConnectionResetError("the client has left")
        if frames:  # an empty chunk would end the answer
            self._write(b"%x\r\n%s\r\n" % (len(frames), frames))
        await self._connection.drained(self._limit_s)

    async def end(self) -> "PlainStream":
        """See `EventStream`."""
        self._write(b"0\r\n\r\n")
        return self

    def _write(self, written: bytes) -> None:
        head = self._head
        self._head = b""
        if (head or written) and not self._connection.transport.is_closing():
            self._connection.transport.write(head + written)


class Connections:
    """A server's open connections: bounded in number, and closed where one is idle for too long.

    One is idle from its beginning, or its last answer, until the head of a request is all here:
    what sends a head byte by byte is idle. For one more than `max_connections` the one that has
    been idle longest is closed.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self._settings = settings
        self._open: dict[
            asyncio.BaseTransport, float
        ] = {}  # until when it may be idle; the longest idle ones first
        self._timer: asyncio.TimerHandle | None = None
        self._swept_s = -inf

    def opened(self, transport: asyncio.Transport) -> None:
        """It waits for its first request. It, or an older one, is closed where there are too
        many."""
        self.idle(transport, self._settings.body_timeout_s)
        swept_lately = asyncio.get_running_loop().time() < self._swept_s + RESWEEP_S
        if len(self._open) > self._settings.max_connections and not swept_lately:
            self._sweep()
        if len(self._open) > self._settings.max_connections:
            self._close(
                next((one for one, until_s in self._open.items() if until_s < inf), transport)
            )

    def busy(self, transport: asyncio.BaseTransport | None) -> None:
        """A request of it is all here, or its body is on its way."""
        if transport in self._open:
            self._open[transport] = inf

    def idle(self, transport: asyncio.BaseTransport | None, limit_s: float | None = None) -> None:
        """It has been answered, and waits for the next request."""
        if transport is not None and not transport.is_closing():
            loop = asyncio.get_running_loop()
            self._open.pop(transport, None)
            self._open[transport] = loop.time() + (limit_s or self._settings.idle_timeout_s)
            self._timer = self._timer or loop.call_later(SWEEP_S, self._swept)

    def _swept(self) -> None:
        self._timer = None
        self._sweep()
        if self._open:
            self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._swept)

    def _sweep(self) -> None:
        now_s = self._swept_s = asyncio.get_running_loop().time()
        for transport, until_s in tuple(self._open.items()):
            if transport.is_closing() or until_s < now_s:
                self._close(transport)

    def _close(self, transport: asyncio.BaseTransport) -> None:
        del self._open[transport]
        cast(asyncio.Transport, transport).abort()

    def stop(self) -> None:
        """Sweep no more."""
        if self._timer is not None:
            self._timer.cancel()


Request = web.Request | PlainRequest
Reply = web.StreamResponse | PlainStream | PlainReply
Handler = Callable[[Any], Awaitable[Reply]]


@dataclass(eq=False)
class PlainServer:
    """Makes the connections of one app. `others` makes those of aiohttp, `admit` stands before
    every handler.
    """

    app: web.Application
    routes: Mapping[bytes, Handler]
    admit: Callable[[Request, Handler], Awaitable[Reply]]
    others: Callable[[], asyncio.Protocol]
    settings: ApiSettings
    watch: Connections
    connections: set["PlainConnection"] = field(default_factory=set)
    closing: bool = False
    emptied: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last connection has left."""

    def __call__(self) -> "PlainConnection":
        return PlainConnection(self)

    def stop(self) -> None:
        """Take no new requests: idle connections close now, the others after their answer."""
        self.closing = True
        for connection in tuple(self.connections):
            connection.close_if_idle()

    async def left(self, limit_s: float) -> None:
        """Return once all connections have closed, or after `limit_s`."""
        if self.connections:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.emptied.wait(), limit_s)

    def abort(self) -> None:
        """Break all connections."""
        for connection in tuple(self.connections):
            connection.transport.abort()


class PlainConnection(asyncio.Protocol):
    """One client's connection, with one request at a time."""

    transport: asyncio.Transport
    peername: object

    def __init__(self, server: PlainServer) -> None:
        self.server = server
        self.loop = asyncio.get_running_loop()
        self._received = b""
        self.streaming = False
        self._head: tuple[Handler, str, dict[str, str], int, int] | None = None
        self._task: asyncio.Task[None] | None = None
        self._late: asyncio.TimerHandle | None = None
        self._writable: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        self.transport.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1
        )
        self.peername = self.transport.get_extra_info("peername")
        self.server.connections.add(self)
        self.server.emptied.clear()
        self.server.watch.opened(self.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._received:
            self._received = self._received + data
        else:
            self._received = data
        if self._task is None:
            self._next()
        elif len(self._received) > MAX_BODY_BYTES:
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        self._writable = self.loop.create_future()

    def resume_writing(self) -> None:
        writable = self._writable
        self._writable = None
        if writable is not None and not writable.done():
            writable.set_result(None)

    async def drained(self, limit_s: float) -> None:
        """Return once the client has taken most of what was written; raises
        ClientConnectionResetError.
        """
        while self._writable is not None:
            left = self.transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(limit_s):
                    await asyncio.shield(self._writable)  # a request's own limit must not end it
            except TimeoutError:
                if self.transport.get_write_buffer_size() >= left:
                    self.transport.abort()
                    raise ClientConnectionResetError(f"nothing taken for {limit_s:g} s") from None

    def close_if_idle(self) -> None:
        """Close it unless a request is under way."""
        if self._task is None:
            self.transport.close()

    # --- requests

    def _next(self) -> None:
        """Begin the next request if it is all here, or give the connection away."""
        head = self._head or self._read_head()
        if head is None:
            self._give_away()
            return
        handler, path, headers, begin, end = self._head = head
        received = self._received
        if len(received) < end:
            wait_s = min(_BODY_WAIT_S, self.server.settings.body_timeout_s)
            self._late = self._late or self.loop.call_later(wait_s, self._give_away)
            return
        if self._late is not None:
            self._late.cancel()
            self._late = None
        self._received = received[end:]
        self._head = None
        self.server.watch.busy(self.transport)
        request = PlainRequest(self, path, headers, received[begin:end])
        self._task = self.loop.create_task(self._serve(request, handler))

    def _read_head(self) -> tuple[Handler, str, dict[str, str], int, int] | None:
        """Handler, path, headers, and where the body begins and ends; None for what is not
        plain."""
        found = _HEAD.match(self._received, 0, MAX_HEAD_BYTES)
        if found:
            handler = self.server.routes.get(found[1])
        else:
            handler = None
        if found is None or handler is None:
            return None
        headers: dict[str, str] = {}
        lines = found[2][:-2].decode("utf-8", "surrogateescape").split("\r\n")
        for line in lines:
            name, _, text = line.partition(":")
            headers[name.lower()] = text.strip(" \t")
        length = headers.get("content-length", "")
        usual = (
            len(headers) == len(lines)
            and headers.get("connection", "keep-alive").lower() == "keep-alive"
        )
        if not usual or not _LENGTH.fullmatch(length) or not _UNUSUAL.isdisjoint(headers):
            return None
        begin = found.end()
        end = found.end() + int(length)
        fits = int(length) <= min(MAX_BODY_BYTES, self.server.settings.max_body_bytes)
        if fits:
            return (handler, found[1].decode(), headers, begin, end)
        return None

    async def _serve(self, request: PlainRequest, handler: Handler) -> None:
        try:
            reply = await self.server.admit(request, handler)
            if isinstance(reply, PlainReply):
                if self.streaming:  # it cannot be sent in another's stream
                    self.transport.abort()
                elif not self.transport.is_closing():
                    head = _head(
                        reply.status, reply.headers, b"Content-Length: %d" % len(reply.body)
                    )
                    self.transport.write(head + reply.body)
            if self._writable is not None:
                await self.drained(self.server.settings.write_timeout_s)
        except ClientConnectionResetError:
            return
        except asyncio.CancelledError:  # nothing else would end the answer
            self.transport.abort()
            raise
        except Exception:
            log.exception("an answer to %s could not be written", request.path)
            self.transport.abort()
            return
        finally:
            self._task = None
            self.streaming = False
        self.server.watch.idle(self.transport)
        if self.server.closing:
            self.transport.close()
        elif not self.transport.is_closing():
            self.transport.resume_reading()
            if self._received:
                self._next()

    def _give_away(self) -> None:
        """From now on aiohttp serves this connection."""
        self._leave()
        self.server.watch.idle(self.transport, self.server.settings.body_timeout_s)
        other = self.server.others()
        self.transport.set_protocol(other)
        other.connection_made(self.transport)
        other.data_received(self._received)

    def _leave(self) -> None:
        self.server.connections.discard(self)
        if not self.server.connections:
            self.server.emptied.set()
        if self._late is not None:
            self._late.cancel()


_date = [0, b""]


def _head(status: int, headers: Mapping[str, str], framing: bytes) -> bytes:
    """The head of an answer whose body is framed as `framing` says. Raises ValueError for a header
    of several lines.
    """
    now = int(time.time())
    if _date[0] != now:
        _date[:] = now, formatdate(now, usegmt=True).encode()
    lines = "".join([f"{name}: {text}\r\n" for name, text in headers.items()]).encode(
        "utf-8", "surrogateescape"
    )
    if lines.count(b"\n") + lines.count(b"\r") > 2 * len(headers):
        raise ValueError("a header holds the end of a line")
    start = b"HTTP/1.1 %d %s\r\n" % (status, _REASONS.get(status, "").encode())
    return b"%s%sDate: %s\r\n%s\r\n\r\n" % (start, lines, _date[1], framing)
