"""The HTTP API: OpenAI's chat completions, agent requests, and SGLang's native routes."""

from shell_router.api.app import create_app, serve_app
from shell_router.api.services import ENGINE_CHECK, ApiSettings, Runs, Services
from shell_router.api.views import add_page

__all__ = [
    "ENGINE_CHECK",
    "ApiSettings",
    "Runs",
    "Services",
    "add_page",
    "create_app",
    "serve_app",
]
