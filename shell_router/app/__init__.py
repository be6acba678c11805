"""Chooses implementations, starts and ends them; no other package knows them behind a protocol."""

from shell_router.app.services import run_services
from shell_router.app.serving import serve, serve_deployment, with_address
from shell_router.app.wings import load_config

__all__ = ["load_config", "run_services", "serve", "serve_deployment", "with_address"]
