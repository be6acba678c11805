"""Chooses the implementations, starts them and ends them; nothing else knows which adapter stands behind a protocol."""

from shell_router.wiring.launching import launch, plan_launch
from shell_router.wiring.services import running_services
from shell_router.wiring.serving import running_server, serve, with_address

__all__ = ["launch", "plan_launch", "running_server", "running_services", "serve", "with_address"]
