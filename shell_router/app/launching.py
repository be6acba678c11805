"""A deployment whose engines the router starts, restarts and stops itself."""

import asyncio
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from pathlib import Path
from shutil import which

from shell_router.app.pairs import address_of, connect_pairs
from shell_router.app.services import read_named
from shell_router.app.serving import serve
from shell_router.app.wings import wing
from shell_router.config import Config
from shell_router.errors import ConfigError
from shell_router.launching.plan import EngineCommand, LaunchPlan, plan
from shell_router.launching.supervisor import Engines, Patience, run_engines
from shell_router.processes.command import require_free_ports
from shell_router.processes.restarts import RestartPolicy

log = logging.getLogger(__name__)


def plan_launch(
    config: Config, name: str, machine: str | None, environ: Mapping[str, str]
) -> LaunchPlan:
    """Plan what `launch` runs; logs lie in the deployment's folder, or in the user's cache."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = config.launch.folder or cache / "shell-router" / "launch" / name
    return plan(config, folder=folder, python=sys.executable, machine=machine)


async def launch(launched: LaunchPlan, *, engines_only: bool, ready: Callable[[str], None]) -> None:
    """Start the plan's engines, serve until SIGINT or SIGTERM, and stop all.

    `ready` gets the router's URL. With `engines_only` no router is started, and a signal cancels
    this. Raises ConfigError and EngineError.
    """
    if not engines_only:
        read_named(launched.config)  # a mistake shows before engines load for minutes
    async with launch_engines(launched) as engines:
        if engines_only:
            log.info("all engines serve; no router is started here")
            await asyncio.Event().wait()  # until a signal cancels this task
        await serve(launched.config, ready=ready, engine_restarts=engines.restarts)


def launch_engines(launched: LaunchPlan) -> AbstractAsyncContextManager[Engines]:
    """Return a context in which the plan's engines serve; entering it may raise EngineError.

    Raises ConfigError for a wrong interpreter, and EngineUnreachable for a taken port.
    """
    _require_startable(launched.engines)
    settings = launched.config.launch
    policy = RestartPolicy(limit=settings.restart_limit, delay_s=settings.restart_delay_s)
    patience = Patience(start_s=launched.config.limits.engine_start_s)
    return run_engines(
        launched, policy=policy, patience=patience, sleep=partial(put_to_sleep, launched.config)
    )


async def put_to_sleep(config: Config, engines: Sequence[EngineCommand]) -> None:
    """See `launching.supervisor.Sleep`."""
    (alias,) = {str(engine.sleeper) for engine in engines}
    addresses = [address_of(at) for at in config.models[alias].sglang]
    async with aclosing(connect_pairs(alias, addresses, config)) as pool:
        started = [
            server
            for server in pool.fleet.servers
            if str(server.server.url / "health") in {at.ready_url for at in engines}
        ]
        await wing("sleep")(started, config.limits.engine_start_s)


def _require_startable(engines: Sequence[EngineCommand]) -> None:
    for engine in engines:
        if which(engine.argv[0]) is None:
            raise ConfigError(
                f"{engine.argv[0]} is not a program that can be run.",
                remedy="Correct launch.python, or make it executable.",
            )
        require_free_ports(engine.name, engine.host, engine.ports)
