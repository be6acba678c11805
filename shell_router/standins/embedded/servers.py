"""Embedded servers as the router's process sees them, and the process that forks them
(`spawner`)."""

import asyncio
import json
import os
import pickle
import signal
import sys
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

from shell_router.errors import EngineUnreachable
from shell_router.standins.embedded.settings import ServerSettings

STOP_LIMIT_S = 10.0
ENDED = "The process that starts embedded servers ended."


class EmbeddedServer:
    """One process of a server, from its start to its end; a server that is started again is another
    one of these.

    `ready` is done when it serves, and fails with `EngineUnreachable` where it cannot. `dead` is
    set when it has ended, `exit_code` with it where it is known.
    """

    def __init__(
        self, name: str, number: int, settings: ServerSettings, spawner: "Spawner"
    ) -> None:
        self.name = name
        self.number = number
        self.settings = settings
        self.pid = 0
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.dead = asyncio.Event()
        self.exit_code: int | None = None
        self._spawner = spawner

    @property
    def url(self) -> str:
        return f"http://{self.settings.pair.host}:{self.settings.port}"

    @property
    def alive(self) -> bool:
        return not self.dead.is_set()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, whether it is ready or not, unless it has ended."""
        self._spawner.send({"signal": number, "server": self.number})

    def serve(self, pid: int, port: int, bootstrap_port: int) -> None:
        self.pid = pid
        self.settings = replace(self.settings, port=port, bootstrap_port=bootstrap_port)
        if not self.ready.done():
            self.ready.set_result(None)

    def end(self, reason: str, exit_code: int | None = None) -> None:
        self.fail(reason)
        self.exit_code = exit_code
        self.dead.set()

    def fail(self, reason: str) -> None:
        """It will not serve, unless it does already."""
        if not self.ready.done():
            self.ready.set_exception(
                EngineUnreachable(reason, remedy="Its own log lines say more.")
            )
            self.ready.exception()  # seen: there may be no waiter


class Spawner:
    """A process that imports torch once, and then forks the servers of any number of fleets within
    milliseconds.

    It starts with `launch`, and ends with this context or with this process, however that ends.
    `dead` is set when it has ended, and all its servers with it.
    """

    def __init__(self) -> None:
        self.dead = asyncio.Event()
        self._servers: dict[int, EmbeddedServer] = {}
        self._numbers = count()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._imported = asyncio.Event()

    async def __aenter__(self) -> "Spawner":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def pid(self) -> int | None:
        """None before `launch`, and from `stop` on."""
        if self._process is None:
            return None
        return self._process.pid

    async def launch(self) -> None:
        """Start the process, once, and return when it has imported all that servers need, or has
        ended.
        """
        async with self._starting:
            if self._process is None:
                await self._start()
        await self._imported.wait()

    def start_server(self, name: str, settings: ServerSettings) -> EmbeddedServer:
        """Start a server; `name` is for messages and `ps`."""
        server = EmbeddedServer(name, next(self._numbers), settings, self)
        if self.dead.is_set():
            server.end(ENDED)
            return server
        self._servers[server.number] = server
        self.send(
            {
                "start": server.number,
                "name": name,
                "server": b64encode(pickle.dumps(settings)).decode(),
            }
        )
        return server

    async def stop(self, *, at_once: bool = False) -> None:
        """End the process and all its servers: SIGTERM, unless it is `at_once`, then SIGKILL. Twice
        is no error.
        """
        process = self._process
        self._process = None
        if process is None or self._reader is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(0 if at_once else STOP_LIMIT_S):
                await process.wait()
        except TimeoutError:
            with suppress(
                ProcessLookupError, PermissionError
            ):  # macOS: a group of zombies is EPERM
                os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await self._reader

    def send(self, command: Mapping[str, Any]) -> None:
        """See `spawner`."""
        if self._process is not None:
            assert self._process.stdin is not None
            if (
                not self._process.stdin.is_closing()
            ):  # else it has died, and `_read_events` is about to end
                self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def _start(self) -> None:
        # A session of its own: Ctrl-C in the terminal is for the router, which then stops its
        # engines in order.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "shell_router.standins.embedded.spawner"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "TQDM_DISABLE": "1",
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read_events(self._process))

    async def _read_events(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._note(json.loads(line))
        self.dead.set()
        self._imported.set()
        for server in self._servers.values():
            server.end(ENDED)
        self._servers.clear()

    def _note(self, event: Mapping[str, Any]) -> None:
        match event:
            case {"imported": True}:
                self._imported.set()
            case {"ready": number, "pid": pid, "port": port, "bootstrap_port": bootstrap_port}:
                self._servers[number].serve(pid, port, bootstrap_port)
            case {"failed": number, "message": message}:
                server = self._servers[number]
                server.fail(f"Embedded server {server.name} cannot start: {message}.")
            case {"exited": number, "code": code}:
                server = self._servers.pop(number)
                server.end(
                    f"Embedded server {server.name} ended with code {code} before it was ready.",
                    code,
                )
