"""The HTTP API: OpenAI's chat completions, agent requests, and SGLang's native routes."""

from shell_router.api.app import create_app
from shell_router.api.batch.folder import BatchFolder, opened_folder
from shell_router.api.server import listening
from shell_router.api.services import AgentPrograms, Runs, Services
from shell_router.api.settings import ApiSettings
from shell_router.api.sockets import bound_sockets

__all__ = [
    "AgentPrograms",
    "ApiSettings",
    "BatchFolder",
    "Runs",
    "Services",
    "bound_sockets",
    "create_app",
    "listening",
    "opened_folder",
]
