"""The HTTP application: its routes, the one middleware before them, and the sockets it is served
on.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from aiohttp import web

from shell_router.api import (
    agents,
    chat,
    embeddings,
    lazy,
    messages,
    native,
    openapi,
    responses,
    views,
)
from shell_router.api.admission import ADMISSION, DRAIN, Admission, Drain
from shell_router.api.chat import CHATS, Chats
from shell_router.api.models import TARGETS, Targets
from shell_router.api.plain import Handler, PlainServer
from shell_router.api.runs import KEPT_RUNS, KeptRuns
from shell_router.api.services import LEAVING, SERVICES, SETTINGS, STARTED_AT, ApiSettings, Services
from shell_router.telemetry import StallWatch

log = logging.getLogger(__name__)


def _post(path: str, handler: Handler) -> web.RouteDef:
    return web.post(path, cast(Any, handler))


ROUTES = (
    _post("/v1/chat/completions", chat.chat_completions),
    _post("/v1/completions", native.completions),
    _post("/v1/responses", responses.create_response),
    web.get("/v1/responses/{response_id}", cast(Any, responses.show_response)),
    web.post("/v1/responses/{response_id}/cancel", cast(Any, responses.cancel_response)),
    _post("/v1/messages", messages.create_message),
    _post("/v1/embeddings", embeddings.create_embeddings),
    web.get("/v1/models", views.list_models),
    web.get("/v1/models/{model}", views.show_model),
    web.get("/v1/topologies", views.list_topologies),
    web.get("/v1/topologies/{name}", views.show_topology),
    web.put("/v1/topologies/{name}", views.put_topology),
    web.delete("/v1/topologies/{name}", views.delete_topology),
    web.get("/v1/engines", views.list_engines),
    _post("/v1/engines", views.add_engines),
    web.delete("/v1/engines", views.drain_engines),
    _post("/v1/agent/requests", agents.run_agent),
    web.get("/v1/agent/requests/{program}", agents.show_program),
    web.delete("/v1/agent/requests/{program}", agents.cancel_program),
    web.get("/v1/agent/outputs/{marker}", lazy.show_output),
    web.put("/v1/agent/outputs/{program}/{agent}", agents.write_output),
    _post("/generate", native.generate),
    _post("/prefill_only", native.prefill_only),
    web.get("/v1/traces", views.list_traces),
    web.get("/v1/traces/{trace_id}", views.show_trace),
    web.get("/openapi.json", openapi.show),
    web.get("/health", views.health),
    web.get("/ready", views.ready),
    web.get("/metrics", views.metrics),
)


def create_app(services: Services, settings: ApiSettings) -> web.Application:
    """The application, to be served by `listening`, which cancels what an absent client had asked
    for.

    Raises ConfigError where a topology and a model share a name.
    """
    drain = Drain()
    gate = Admission(services, settings, drain)
    app = web.Application(
        middlewares=[cast(Any, gate.serve)], client_max_size=settings.max_body_bytes
    )
    app[ADMISSION] = gate
    app[DRAIN] = drain
    app[LEAVING] = asyncio.Event()
    app[SERVICES] = services
    app[SETTINGS] = settings
    app[TARGETS] = Targets(services)
    app[CHATS] = Chats(services, settings, app[TARGETS], drain)
    app[KEPT_RUNS] = KeptRuns(services.journals, drain)
    app[embeddings.EMBEDDING] = asyncio.Semaphore()
    app[STARTED_AT] = int(services.wall())
    app.add_routes(ROUTES)
    return app


@contextmanager
def bound_sockets(host: str = "127.0.0.1", port: int = 0) -> Iterator[list[socket.socket]]:
    """One socket per address of `host`, all on one port, free where `port` is 0; closed in the end.

    They are bound and do not listen yet: no other process can take the port, and clients are
    refused until a server listens. Addresses that this machine lacks are left out while there are
    others. Raises OSError.
    """
    with ExitStack() as stack:
        taken: list[socket.socket] = []
        lacking: OSError | None = None
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            chosen = taken[0].getsockname()[1] if taken else port
            try:
                one = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.bind((address[0], chosen, *address[2:]))
                taken.append(one)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                lacking = error
        if not taken:
            raise lacking or OSError(errno.EADDRNOTAVAIL, "no address")
        yield taken


CLOSE_LIMIT_S = 1.0
"""For what is left after the drain: requests that only look, and clients that take nothing."""


@contextlib.asynccontextmanager
async def listening(
    app: web.Application,
    sockets: Sequence[socket.socket],
    *,
    force_shutdown: asyncio.Event | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """Serve `app` on bound `sockets` while the context is open, with `tls` over https; gives its
    base URL.

    A request whose client has gone is cancelled. On leaving the router says for `lame_duck_s` that
    it is not ready, and takes requests still. Then none are taken and running ones get `drain_s` to
    end; those that do not, or all of them once `force_shutdown` is set, end with RouterStopping.
    """
    force = force_shutdown or asyncio.Event()
    settings = app[SETTINGS]
    app.on_shutdown.append(lambda app: app[DRAIN].finish(settings.drain_s, force))
    # what unpacks a body would hold up the event loop, and take a thousand times the memory:
    # admission refuses it
    kept: dict[str, Any] = {
        "auto_decompress": False,
        "handler_cancellation": True,
        "shutdown_timeout": CLOSE_LIMIT_S,
    }
    runner = web.AppRunner(app, access_log=None, **kept)
    await runner.setup()
    assert runner.server is not None
    posted = [one for one in ROUTES if one.method == "POST" and "{" not in one.path]
    posts: Mapping[bytes, Any] = {one.path.encode(): one.handler for one in posted}
    gate = app[ADMISSION]
    plain = PlainServer(app, posts, gate.serve, runner.server, settings, gate.connections)
    loop = asyncio.get_running_loop()
    servers = list[asyncio.Server]()
    try:
        for one in sockets:
            limit_s = (
                settings.body_timeout_s if tls else None
            )  # or a client could stay without a handshake
            servers.append(
                await loop.create_server(plain, sock=one, ssl=tls, ssl_handshake_timeout=limit_s)
            )
        app[SERVICES].metrics.tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
        with contextlib.closing(StallWatch(loop, app[SERVICES].metrics.longest_stall)):
            yield f"{'https' if tls else 'http'}://{_authority(sockets[0].getsockname())}"
            app[LEAVING].set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(force.wait(), settings.lame_duck_s)
    finally:
        for server in servers:
            server.close()
        await asyncio.sleep(0)  # as aiohttp does: requests that are here already begin
        plain.stop()
        await runner.cleanup()
        await plain.left(CLOSE_LIMIT_S)
        plain.abort()
        gate.connections.stop()


def _authority(address: tuple[str, int]) -> str:
    host = address[0]
    port = address[1]
    if ":" in host:
        return f"[{host}]:{port}"
    return f"{host}:{port}"
