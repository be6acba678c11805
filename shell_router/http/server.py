"""Serves an application on sockets: plain requests by the fast lane, all others by aiohttp."""

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

from aiohttp import MultipartReader, web

from shell_router.http.app import (
    UNMATCHED,
    App,
    BodyTooLarge,
    ClientGone,
    Handler,
    Hook,
    MethodNotAllowed,
    Request,
    Response,
    Route,
    UnknownRoute,
    UnreadableBody,
)
from shell_router.http.connections import Connections, ServerLimits
from shell_router.http.fast_lane import FastLane, peer_of

CLOSE_LIMIT_S = 1.0
"""How long connections may take to close at the end, before they are broken."""


@contextmanager
def bound_sockets(host: str = "127.0.0.1", port: int = 0) -> Iterator[list[socket.socket]]:
    """Bind one socket per address of `host`, all to one port, a free one where `port` is 0.

    They do not listen yet: no other process can take the port, and clients are refused until a
    server listens. Addresses that this machine lacks are left out while there are others. The
    sockets are closed in the end. Raises OSError.
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
async def serving(
    app: App,
    sockets: Sequence[socket.socket],
    limits: ServerLimits,
    *,
    tls: ssl.SSLContext | None = None,
    fast_lane: bool = True,
) -> AsyncIterator[str]:
    """Serve `app` on bound `sockets` while the context is open; gives its base URL.

    A request whose client has gone is cancelled. On leaving no new requests are taken, the
    application's `on_shutdown` waits for the running ones, and what is left is broken.
    Without `fast_lane` aiohttp serves every request, with the same replies.
    """
    connections = Connections(limits)
    runner = await _start_aiohttp(app, connections)
    assert runner.server is not None
    lane = FastLane(app, runner.server, limits, connections)
    factory: Callable[[], asyncio.Protocol] = lane if fast_lane else runner.server
    loop = asyncio.get_running_loop()
    handshake_s = limits.body_timeout_s if tls else None  # or a client could stay without one
    servers: list[asyncio.Server] = []
    try:
        for listener in sockets:
            server = await loop.create_server(
                factory, sock=listener, ssl=tls, ssl_handshake_timeout=handshake_s
            )
            servers.append(server)
        yield f"{'https' if tls else 'http'}://{_authority(sockets[0].getsockname())}"
    finally:
        for server in servers:
            server.close()
        await asyncio.sleep(0)  # as aiohttp does: requests that are here already begin
        lane.stop()
        await runner.cleanup()
        await lane.wait_empty(CLOSE_LIMIT_S)
        lane.abort()
        connections.stop()


def _authority(address: tuple[str, int]) -> str:
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"{host}:{address[1]}"


# --- aiohttp


async def _start_aiohttp(app: App, connections: Connections) -> web.AppRunner:
    general = web.Application(client_max_size=app.max_body_bytes)
    general.middlewares.append(_answer_unmatched(app, connections))
    for route in app.routes:
        handler = _as_aiohttp_handler(app, connections, route)
        methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
        for method in methods:
            general.router.add_route(method, route.path, handler)
    general.on_startup.extend(map(_as_signal, app.on_startup))
    general.on_shutdown.extend(map(_as_signal, app.on_shutdown))
    options: dict[str, Any] = {
        # unpacking would hold up the event loop and take a thousand times the memory
        "auto_decompress": False,
        "handler_cancellation": True,
        "shutdown_timeout": CLOSE_LIMIT_S,
    }
    runner = web.AppRunner(general, access_log=None, **options)
    await runner.setup()
    return runner


def _as_signal(hook: Hook) -> Callable[[web.Application], Awaitable[None]]:
    async def call(_: web.Application) -> None:
        await hook()

    return call


AiohttpHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _as_aiohttp_handler(app: App, connections: Connections, route: Route) -> AiohttpHandler:
    async def handle(incoming: web.Request) -> web.StreamResponse:
        return await _serve(app, connections, incoming, route.path, route.handler)

    return handle


def _answer_unmatched(app: App, connections: Connections) -> Any:
    @web.middleware
    async def answer(incoming: web.Request, handler: AiohttpHandler) -> web.StreamResponse:
        refusal = incoming.match_info.http_exception
        if refusal is None:
            return await handler(incoming)

        async def refuse(_: Request) -> Response:
            if isinstance(refusal, web.HTTPMethodNotAllowed):
                raise MethodNotAllowed(refusal.method, refusal.allowed_methods)
            raise UnknownRoute(incoming.path)

        return await _serve(app, connections, incoming, UNMATCHED, refuse)

    return answer


async def _serve(
    app: App, connections: Connections, incoming: web.Request, route: str, handler: Handler
) -> web.StreamResponse:
    connections.set_busy(incoming.transport)
    request = AiohttpRequest(app, incoming, route)
    try:
        reply = await app.gate(request, handler)
    finally:
        connections.set_idle(incoming.transport)
    stream = request.stream
    if stream is None:
        assert isinstance(reply, Response)
        return web.Response(body=reply.body or None, status=reply.status, headers=reply.headers)
    if stream is not reply and incoming.transport is not None:
        incoming.transport.abort()  # a second head cannot be sent within a stream
    return stream.response


class AiohttpRequest(Request):
    """A request that aiohttp has read."""

    def __init__(self, app: App, incoming: web.Request, route: str) -> None:
        self.app = app
        self.method = incoming.method
        self.path = incoming.path
        self.route = route
        self.match = incoming.match_info
        self.query = incoming.query
        self.headers = incoming.headers
        self.peer = peer_of(incoming.transport)
        self.stream: AiohttpStream | None = None
        self._incoming = incoming

    async def read(self) -> bytes:
        """See `Request`."""
        try:
            return await self._incoming.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise BodyTooLarge from error
        except web.RequestPayloadError as error:
            raise UnreadableBody from error

    async def pieces(self) -> AsyncIterator[bytes]:
        """See `Request`."""
        try:
            async for piece in self._incoming.content.iter_any():
                yield piece
        except web.RequestPayloadError as error:
            raise UnreadableBody from error

    async def form(self) -> MultipartReader:
        """See `Request`."""
        return await self._incoming.multipart()

    async def open_stream(
        self, status: int, headers: Mapping[str, str], write_timeout_s: float
    ) -> "AiohttpStream":
        """See `Request`."""
        response = web.StreamResponse(status=status, headers=headers)
        self.stream = AiohttpStream(self._incoming, response, write_timeout_s)
        await response.prepare(self._incoming)
        return self.stream


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
