"""The HTTP API: OpenAI's chat completions, agent requests, and SGLang's native routes."""

from shell_router.api.app import bound_sockets, create_app, listening, refuse_batches
from shell_router.api.page import add_page
from shell_router.api.services import ENGINE_CHECK, ApiSettings, Runs, Services

__all__ = [
    "ENGINE_CHECK",
    "ApiSettings",
    "Runs",
    "Services",
    "add_page",
    "bound_sockets",
    "create_app",
    "listening",
    "refuse_batches",
]
