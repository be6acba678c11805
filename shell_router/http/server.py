"""Serves an application on sockets: plain requests by the fast lane, all others by aiohttp."""

import asyncio
import errno
import logging
import socket
import ssl
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from traceback import extract_tb
from typing import Any

from aiohttp import HttpVersion11, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from zstandard import ZstdDecompressor, ZstdError

from shell_router.http.app import (
    UNMATCHED,
    App,
    BodyTooLarge,
    ClientGone,
    MethodNotAllowed,
    Reply,
    Request,
    Response,
    UnknownRoute,
    UnreadableBody,
)
from shell_router.http.fast_lane import REPLYING, Connections, FastLane, ServerLimits, peer_of

CLOSE_LIMIT_S = 1.0
"""How long connections may take to close at the end, before they are broken."""


@contextmanager
def bind_sockets(host: str = "127.0.0.1", port: int = 0) -> Iterator[list[socket.socket]]:
    """Bind one socket per address of `host`, all to one port, a free one where `port` is 0.

    The sockets do not listen yet: no other process can take the port, and clients are refused until
    a server listens. An address that this machine lacks is skipped. On exit the sockets are closed.

    Raises:
        OSError: An address cannot be bound, or this machine lacks all of them.
    """
    with ExitStack() as stack:
        bound: list[socket.socket] = []
        lacking: OSError | None = None
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(infos):
            common_port = bound[0].getsockname()[1] if bound else port
            try:
                listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind((address[0], common_port, *address[2:]))
                bound.append(listener)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                lacking = error
        if not bound:
            raise lacking or OSError(errno.EADDRNOTAVAIL, "no address")
        yield bound


@asynccontextmanager
async def run_server(
    app: App,
    sockets: Sequence[socket.socket],
    limits: ServerLimits,
    *,
    tls: ssl.SSLContext | None = None,
    fast_lane: bool = True,
) -> AsyncIterator[str]:
    """Serve `app` on bound `sockets` while the context is open; yield its base URL.

    A request whose client has gone is cancelled. On exit no new requests are taken, the
    application's `on_shutdown` waits for the running ones, and the remaining connections are cut.
    Without `fast_lane` aiohttp serves every request, with the same replies.
    """
    connections = Connections(limits)
    runner = await _start_aiohttp(app, connections, limits.max_body_bytes)
    assert runner.server is not None
    lane = FastLane(app, runner.server, limits, connections)
    if not fast_lane:
        lane.handlers = {}
    loop = asyncio.get_running_loop()
    handshake_s = limits.body_timeout_s if tls else None  # asyncio would wait for 60 s
    servers: list[asyncio.Server] = []
    for hook in app.on_startup:
        await hook()
    try:
        for listener in sockets:
            server = await loop.create_server(
                lane,
                sock=listener,
                backlog=limits.max_connections,
                ssl=tls,
                ssl_handshake_timeout=handshake_s,
            )
            servers.append(server)
        yield f"{'https' if tls else 'http'}://{_authority(sockets[0].getsockname())}"
    finally:
        for server in servers:
            server.close()
        await asyncio.sleep(0)  # as aiohttp does: requests that have arrived already begin
        lane.stop()
        runner.server.pre_shutdown()
        for hook in app.on_shutdown:
            await hook()
        await runner.cleanup()
        await lane.wait_empty(CLOSE_LIMIT_S)
        lane.abort()
        connections.stop()


_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # as zlib's inflateInit2 has it
_MAX_WINDOW_BYTES = 2**23  # RFC 8878 asks decoders to support it


def _authority(address: tuple[str, int]) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}"


# --- aiohttp


class _WithoutContent(logging.Filter):
    """Takes errors' messages out of aiohttp's log lines: they quote API keys and bodies.

    Bytes that are no request are the client's error, which gets a 400: they are logged as INFO.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            frames = extract_tb(error.__traceback__)
            place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
            record.msg = f"{record.getMessage()}: {type(error).__name__}{place}"
            record.args = ()
            record.exc_info = None
        if isinstance(error, HttpProcessingError):
            record.levelno = logging.INFO
            record.levelname = "INFO"
        return _AIOHTTP_LOG.isEnabledFor(record.levelno)


_AIOHTTP_LOG = logging.getLogger(f"{__name__}.aiohttp")
_AIOHTTP_LOG.addFilter(_WithoutContent())


async def _continue(request: web.Request) -> None:
    """Ask for the body, as aiohttp does; its own error quotes the header, which may fail."""
    if request.version < HttpVersion11:
        return
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="The only Expect that is met is 100-continue.")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0


def _drop_excess(request: web.Request, transport: asyncio.Transport) -> None:
    """Drop what a client sends behind a request once aiohttp stops to read it.

    Else a client that leaves would not be seen. The connection closes after the reply.
    """
    is_whole = request.method in ("GET", "HEAD") or request.content.is_eof()
    if is_whole and not transport.is_reading() and not transport.is_closing():
        request.protocol.close()
        transport.resume_reading()


async def _start_aiohttp(app: App, connections: Connections, max_body_bytes: int) -> web.AppRunner:
    @web.middleware
    async def serve(request: web.Request, handler: Any) -> web.StreamResponse:
        transport = request.transport
        connections.set_busy(transport)
        if transport is not None:
            connections.checks[transport] = partial(_drop_excess, request, transport)
        adapted = AiohttpRequest(app, request, connections)
        try:
            return adapted.finish(await app.gate(adapted, handler))
        finally:
            connections.checks.pop(transport, None)
            connections.set_idle(request.transport)

    general = web.Application(middlewares=[serve], client_max_size=max_body_bytes)
    paths = [route.path for route in app.routes]
    for route in app.routes:
        path = route.path
        if path.endswith("}") and not any(other.startswith(f"{path}/") for other in paths):
            path = rf"{path[:-1]}:[\s\S]+}}"  # nothing lies below, so a name may hold slashes
        handler: Any = route.handler  # `serve` calls it, or aiohttp's own, which raises
        for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
            general.router.add_route(method, path, handler, expect_handler=_continue)

    async def raise_unmatched(request: Any) -> web.StreamResponse:
        allowed = set[str]()
        for resource in general.router.resources():
            if resource.name != UNMATCHED:
                allowed |= (await resource.resolve(request.incoming))[1]
        if allowed:
            raise MethodNotAllowed(request.method, allowed)
        raise UnknownRoute

    # aiohttp's own route for them fails where it quotes an odd Expect
    general.router.add_route(
        "*", r"/{path:[\s\S]*}", raise_unmatched, name=UNMATCHED, expect_handler=_continue
    )
    options: dict[str, Any] = {
        # it would block the event loop; `unpack` does not
        "auto_decompress": False,
        "handler_cancellation": True,
        "logger": _AIOHTTP_LOG,
        "shutdown_timeout": CLOSE_LIMIT_S,
    }
    runner = web.AppRunner(general, access_log=None, **options)
    await runner.setup()
    return runner


def unpack(body: bytes, coding: str, max_bytes: int) -> bytes:
    """Return the content of a packed body; blocks. Raises UnreadableBody and BodyTooLarge."""
    try:
        if coding == "zstd":
            zstd = ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
            content = zstd.stream_reader(body).read(max_bytes + 1)
            unpacker: Any = zstd.decompressobj()
            if len(content) <= max_bytes:  # the reader takes a cut frame as a whole one
                unpacker.decompress(body)
        else:
            unpacker = zlib.decompressobj(_GZIP_OR_ZLIB)
            content = unpacker.decompress(body, max_bytes + 1)
        is_whole = unpacker.eof and not unpacker.unused_data
        if len(content) <= max_bytes and not is_whole:
            raise UnreadableBody
    except (zlib.error, ZstdError) as error:
        raise UnreadableBody from error
    if len(content) > max_bytes:
        raise BodyTooLarge(max_bytes, len(content))
    return content


class AiohttpRequest(Request):
    """A request that aiohttp has read."""

    def __init__(self, app: App, incoming: web.Request, connections: Connections) -> None:
        resource = incoming.match_info.route.resource
        self.app = app
        self.method = incoming.method
        self.path = incoming.path
        self.route = UNMATCHED
        if resource is not None and resource.name != UNMATCHED:
            self.route = resource.canonical
        self.match = incoming.match_info
        self.query = incoming.query
        self.headers = incoming.headers
        self.peer = peer_of(incoming.transport)
        self.incoming = incoming
        self._connections = connections
        self._stream: AiohttpStream | None = None

    async def read(self, limit_s: float) -> bytes:
        """See `Request`."""
        async with asyncio.timeout(limit_s):
            body = await self.incoming.read()
        if self.coding == "identity":
            return body
        return await asyncio.to_thread(unpack, body, self.coding, self.incoming.client_max_size)

    def pieces(self) -> AsyncIterator[bytes]:
        """See `Request`."""
        return aiter(self.incoming.content.iter_any())

    async def form(self) -> MultipartReader:
        """See `Request`."""
        return await self.incoming.multipart()

    async def open_stream(
        self, status: int, headers: Mapping[str, str], write_timeout_s: float
    ) -> "AiohttpStream":
        """See `Request`."""
        self._connections.set_busy(self.incoming.transport, REPLYING)
        response = web.StreamResponse(status=status, headers=headers)
        self._stream = AiohttpStream(self.incoming, response, write_timeout_s)
        await response.prepare(self.incoming)
        return self._stream

    def finish(self, reply: Reply) -> web.StreamResponse:
        """Return the handler's reply as aiohttp's."""
        if isinstance(reply, Response) and self._stream is None:
            return web.Response(body=reply.body or None, status=reply.status, headers=reply.headers)
        assert self._stream is not None
        if reply is not self._stream and self.incoming.transport is not None:
            self.incoming.transport.abort()  # a second head cannot be sent within a stream
        return self._stream.response


class AiohttpStream:
    """A `Stream` of aiohttp's."""

    def __init__(
        self, incoming: web.Request, response: web.StreamResponse, write_timeout_s: float
    ) -> None:
        self.status = response.status
        self.response = response
        self._incoming = incoming
        self._write_timeout_s = write_timeout_s

    async def send(self, piece: bytes) -> None:
        """See `Stream`."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await self.response.write(piece)
        except TimeoutError:
            if self._incoming.transport is not None:
                self._incoming.transport.abort()
            raise ClientGone(f"nothing taken for {self._write_timeout_s:g} s") from None

    async def end(self) -> "AiohttpStream":
        """See `Stream`."""
        await self.response.write_eof()
        return self
