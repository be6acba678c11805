"""The HTTP application: its routes, and the one middleware before them."""

from aiohttp import web

from shell_router.api import agents, batches, chat, files, native, views
from shell_router.api.batch.folder import BatchFolder
from shell_router.api.batch.runner import ChatLines
from shell_router.api.batch.runs import BatchRuns
from shell_router.api.batch.split import SplitLines
from shell_router.api.batches import BATCH_RUNS
from shell_router.api.chat import CHATS
from shell_router.api.chat_run import Chats
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
    web.post("/v1/files", files.upload_file),
    web.get("/v1/files", files.list_files),
    web.get("/v1/files/{file_id}", files.show_file),
    web.get("/v1/files/{file_id}/content", files.file_content),
    web.delete("/v1/files/{file_id}", files.delete_file),
    web.post("/v1/batches", batches.create_batch),
    web.get("/v1/batches", batches.list_batches),
    web.get("/v1/batches/{batch_id}", batches.show_batch),
    web.post("/v1/batches/{batch_id}/cancel", batches.cancel_batch),
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
    app[CHATS] = Chats(services, settings, app[TARGETS], drain)
    app[STARTED_AT] = int(services.wall())
    app.add_routes(ROUTES)
    if services.batch_folder is not None:
        _run_batches(app, services.batch_folder)
    return app


def _run_batches(app: web.Application, folder: BatchFolder) -> None:
    """From the server's start to its stop, when lines make room at once for the requests that still run."""
    settings = app[SETTINGS]
    runner = SplitLines(ChatLines(app[CHATS], settings.batch_concurrency), app[SERVICES].batch_pools)
    runs = app[BATCH_RUNS] = BatchRuns(folder, runner, app[SERVICES], settings.max_body_bytes)

    async def resume(_: web.Application) -> None:
        runs.resume()

    async def stop(_: web.Application) -> None:
        await runs.stop()

    app.on_startup.append(resume)
    app.on_shutdown.append(stop)
