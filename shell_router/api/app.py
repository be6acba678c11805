"""The application of the API: its routes, what they share, and its life on sockets."""

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Sequence

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
from shell_router.api.admission import ADMISSION, Admission
from shell_router.api.chat import CHATS, Chats
from shell_router.api.drain import DRAIN, Drain
from shell_router.api.live import TARGETS, Targets
from shell_router.api.runs import KEPT_RUNS, KeptRuns
from shell_router.api.services import SERVICES, SETTINGS, STARTED_AT, ApiSettings, Services
from shell_router.http.app import App, Route
from shell_router.http.fast_lane import ServerLimits
from shell_router.http.server import run_server
from shell_router.telemetry import StallWatch

ROUTES = (
    Route("POST", "/v1/chat/completions", chat.chat_completions),
    Route("POST", "/v1/completions", chat.completions),
    Route("POST", "/v1/responses", responses.create_response),
    Route("POST", "/v1/responses/input_tokens", responses.count_input_tokens),
    Route("GET", "/v1/responses/{response_id}", responses.show_response),
    Route("POST", "/v1/responses/{response_id}/cancel", responses.cancel_response),
    Route("POST", "/v1/messages", messages.create_message),
    Route("POST", "/v1/messages/count_tokens", messages.count_tokens),
    Route("POST", "/v1/embeddings", embeddings.create_embeddings),
    Route("GET", "/v1/models", views.list_models),
    Route("GET", "/v1/models/{model}", views.show_model),
    Route("GET", "/v1/topologies", views.list_topologies),
    Route("GET", "/v1/topologies/{name}", views.show_topology),
    Route("PUT", "/v1/topologies/{name}", views.put_topology),
    Route("DELETE", "/v1/topologies/{name}", views.delete_topology),
    Route("GET", "/v1/engines", views.list_engines),
    Route("POST", "/v1/engines", views.add_engines),
    Route("DELETE", "/v1/engines", views.drain_engines),
    Route("POST", "/v1/agent/requests", agents.run_agent),
    Route("GET", "/v1/agent/requests/{program}", agents.show_program),
    Route("DELETE", "/v1/agent/requests/{program}", agents.cancel_program),
    Route("GET", "/v1/agent/outputs/{marker}", lazy.show_output),
    Route("PUT", "/v1/agent/outputs/{program}/{agent}", agents.write_output),
    Route("POST", "/generate", native.generate),
    Route("POST", "/prefill_only", native.prefill_only),
    Route("GET", "/v1/traces", views.list_traces),
    Route("GET", "/v1/traces/{trace_id}", views.show_trace),
    Route("GET", "/openapi.json", openapi.show),
    Route("GET", "/", views.show_root),
    Route("GET", "/health", views.health),
    Route("GET", "/ready", views.ready),
    Route("GET", "/metrics", views.metrics),
)


def create_app(services: Services, settings: ApiSettings) -> App:
    """Build the application, to be served by `serve_app`.

    Raises ConfigError where a topology and a model share a name.
    """
    drain = Drain(services.deadlines)
    gate = Admission(services, settings, drain)
    app = App(gate.serve)
    app[ADMISSION] = gate
    app[DRAIN] = drain
    app[SERVICES] = services
    app[SETTINGS] = settings
    app[TARGETS] = Targets(services.topologies, services.models)
    app[openapi.BODIES] = dict(openapi.ROUTER_BODIES)
    app[CHATS] = Chats(services, settings, app[TARGETS])
    app[KEPT_RUNS] = KeptRuns(services.journals, services.deadlines)
    app[embeddings.EMBEDDING] = asyncio.Semaphore()
    app[STARTED_AT] = int(services.wall())
    app.routes.extend(ROUTES)
    return app


def server_limits(settings: ApiSettings) -> ServerLimits:
    """Return the limits of the API's server."""
    return ServerLimits(
        settings.max_connections,
        settings.idle_timeout_s,
        settings.body_timeout_s,
        settings.write_timeout_s,
        settings.max_body_bytes,
    )


@contextlib.asynccontextmanager
async def serve_app(
    app: App,
    sockets: Sequence[socket.socket],
    *,
    force_shutdown: asyncio.Event | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """Serve `app` on bound `sockets` while the context is open; gives its base URL.

    On leaving the router says for `lame_duck_s` that it is not ready, and takes requests still.
    Then none are taken and running ones get `drain_s` to end; the ones that do not, or all of them
    once `force_shutdown` is set, end with RouterStopping.
    """
    force = force_shutdown or asyncio.Event()
    settings = app[SETTINGS]
    metrics = app[SERVICES].metrics
    loop = asyncio.get_running_loop()
    app.on_shutdown.append(functools.partial(app[DRAIN].finish, settings.drain_s, force))
    async with run_server(app, sockets, server_limits(settings), tls=tls) as url:
        metrics.tasks.set_function(lambda: len(asyncio.all_tasks(loop)))
        with contextlib.closing(StallWatch(loop, metrics.longest_stall)):
            yield url
            app.leaving.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(force.wait(), settings.lame_duck_s)
