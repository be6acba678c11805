"""The router's side of the process that forks servers."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from shell_router.engines.embedded.settings import ServerSettings

STOP_LIMIT_S = 10.0
GIVE_UP_LIMIT_S = 0.5


class SpawnerClient:
    """Runs the spawner and tells what it reports: `told` gets each event of the protocol in `spawner`.

    `ended` is called when the process and all its servers have ended.
    """

    def __init__(self, told: Callable[[Mapping[str, Any]], None], ended: Callable[[], None]) -> None:
        self._told = told
        self._ended = ended
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """None before `launch`, and from `stop` or `give_up` on."""
        return None if self._process is None else self._process.pid

    async def launch(self) -> None:
        """Start the process."""
        # A session of its own: Ctrl-C in the terminal is for the router, which then stops its engines in order.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "shell_router.engines.embedded.spawner"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read_events(self._process))

    def start_server(self, name: str, settings: ServerSettings) -> None:
        """Ask for a server; an event tells what becomes of it."""
        self._send({"start": name, "server": asdict(settings)})

    def kill_server(self, name: str) -> None:
        """SIGKILL to the server, ready or not; an event tells of its end."""
        self._send({"kill": name})

    async def stop(self) -> None:
        """End all servers: SIGTERM, then SIGKILL. Calling it twice is no error."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                await process.wait()
        except TimeoutError:
            _signal_group(process.pid, signal.SIGKILL)
            await process.wait()
        if self._reader is not None:
            await self._reader

    async def give_up(self) -> None:
        """End a start that failed or is no longer wanted: nobody is served yet, so nothing has to end in order."""
        if self._process is None:
            return
        process, self._process = self._process, None
        _signal_group(process.pid, signal.SIGTERM)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(GIVE_UP_LIMIT_S):
                    await process.wait()
        finally:
            _signal_group(process.pid, signal.SIGKILL)
        await process.wait()
        if self._reader is not None:
            await self._reader

    def _send(self, command: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        if not self._process.stdin.is_closing():  # else it has died, and `ended` is about to be called
            self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def _read_events(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._told(json.loads(line))
        self._ended()


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies is EPERM
        os.killpg(leader, number)
