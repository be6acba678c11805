"""Chooses implementations, starts and ends them; no other package knows them behind a protocol."""

from shell_router.app.services import running_services
from shell_router.app.serving import running_server, serve, with_address
from shell_router.app.wings import load_config

__all__ = ["load_config", "running_server", "running_services", "serve", "with_address"]
