"""The HTTP application: its routes, and the one middleware before them."""

from aiohttp import web

from shell_router.api import agents, chat, native, views
from shell_router.api.drain import DRAIN, Drain
from shell_router.api.gate import Gate
from shell_router.api.services import SERVICES, SETTINGS, STARTED_AT, Services
from shell_router.api.settings import ApiSettings
from shell_router.api.targets import TARGETS, Targets

ROUTES = (
    web.post("/v1/chat/completions", chat.chat_completions),
    web.get("/v1/models", views.list_models),
    web.get("/v1/models/{model}", views.show_model),
    web.post("/v1/agent/requests", agents.run_agent),
    web.get("/v1/agent/requests/{program}", agents.show_program),
    web.delete("/v1/agent/requests/{program}", agents.cancel_program),
    web.post("/generate", native.generate),
    web.post("/prefill_only", native.prefill_only),
    web.get("/v1/traces/{trace_id}", views.show_trace),
    web.get("/health", views.health),
    web.get("/ready", views.ready),
    web.get("/metrics", views.metrics),
)


def create_app(services: Services, settings: ApiSettings) -> web.Application:
    """The application, to be served by `listening`, which cancels what an absent client had asked for.

    Raises ConfigError where a topology and a model share a name.
    """
    drain = Drain()
    gate = Gate(services, settings, drain)
    app = web.Application(middlewares=[gate.serve], client_max_size=settings.max_body_bytes)
    app[DRAIN] = drain
    app[SERVICES] = services
    app[SETTINGS] = settings
    app[TARGETS] = Targets(services)
    app[STARTED_AT] = int(services.wall())
    app.add_routes(ROUTES)
    return app
