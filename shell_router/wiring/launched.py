"""Engines that a plan names, started and stopped."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from shutil import which

from shell_router.engines.restarts import RestartPolicy
from shell_router.errors import ConfigError
from shell_router.launching import EngineCommand, EngineRestarts, Engines, LaunchPlan, Patience, running_engines

WEIGHTS_LIMIT_S = 120.0


@asynccontextmanager
async def launched_engines(launched: LaunchPlan) -> AsyncIterator[Engines]:
    """The plan's engines, which serve while the context is open. Raises ConfigError and EngineError."""
    _require_startable(launched.engines)
    launched.folder.mkdir(parents=True, exist_ok=True)
    for command in launched.weights:
        await _finished(command)
    settings = launched.config.launch
    policy = EngineRestarts(RestartPolicy(limit=settings.restart_limit, delay_s=settings.restart_delay_s))
    patience = Patience(start_s=launched.config.limits.engine_start_s)
    async with running_engines(launched, policy=policy, patience=patience) as engines:
        yield engines


def _require_startable(engines: Sequence[EngineCommand]) -> None:
    for engine in engines:
        if which(engine.argv[0]) is None:
            raise ConfigError(
                f"{engine.argv[0]} is not a program that can be run.",
                remedy="Correct launch.python, or make it executable.",
            )
        for port in engine.ports:
            _require_free(engine, port)


def _require_free(engine: EngineCommand, port: int) -> None:
    """Without this look another server there would be taken for the engine."""
    try:
        socket.create_server((engine.host, port)).close()
    except OSError as error:
        raise ConfigError(
            f"{engine.name} cannot listen on {engine.host}, port {port}: {error.strerror}.",
            remedy="Stop what listens there, or correct the pair's URLs; --machine says which host this is.",
        ) from error


async def _finished(command: Sequence[str]) -> None:
    """Run `command` to its end. Raises ConfigError with what it says where it fails."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        async with asyncio.timeout(WEIGHTS_LIMIT_S):
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise ConfigError(f"random weights could not be made: {said.decode(errors='replace').strip()[-500:]}")
