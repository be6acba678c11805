"""Chooses the implementations, starts them and ends them; nothing else knows which adapter stands
behind a protocol.
"""

from shell_router.app.services import running_services
from shell_router.app.serving import running_server, serve, with_address
from shell_router.app.wings import load_config

__all__ = ["load_config", "running_server", "running_services", "serve", "with_address"]
