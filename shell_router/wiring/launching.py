"""A deployment whose engines the router starts itself."""

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from shell_router.config import Config
from shell_router.launching import LaunchPlan, plan
from shell_router.wiring.launched import launched_engines
from shell_router.wiring.serving import serve

log = logging.getLogger(__name__)


def plan_launch(config: Config, name: str, machine: str | None, environ: Mapping[str, str]) -> LaunchPlan:
    """What `launch` will run. Logs lie where the deployment says, or in the user's cache folder under `name`."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = config.launch.folder or cache / "shell-router" / "launch" / name
    return plan(config, folder=folder, python=sys.executable, machine=machine)


async def launch(launched: LaunchPlan, *, engines_only: bool, ready: Callable[[str], None]) -> None:
    """Start the plan's engines, serve until SIGINT or SIGTERM, and stop all. `ready` is told the router's URL.

    With `engines_only` no router is started, and a signal cancels this. Raises ConfigError and EngineError.
    """
    async with launched_engines(launched) as engines:
        if engines_only:
            log.info("all engines serve; no router is started here")
            await asyncio.Event().wait()  # until a signal cancels this task
        await serve(launched.config, ready=ready, engine_restarts=engines.restarts)
