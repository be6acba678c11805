"""Start and stop embedded pairs from the router's process, which loads no torch itself.

async with EmbeddedFleet({"small": EmbeddedSettings(model_path="…")}) as fleet:
    pair = fleet["small"]
    pair.prefill_url, pair.decode_url, pair.bootstrap_port
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any

from shell_router.engines.embedded.settings import EmbeddedSettings, ServerSettings
from shell_router.errors import EngineUnreachable

log = logging.getLogger(__name__)

START_LIMIT_S = 180.0
STOP_LIMIT_S = 10.0
GIVE_UP_LIMIT_S = 0.5
RESTART_REMEDY = "Restart the router; until then requests that need it fail."
Progress = Callable[[str], None]


@dataclass(slots=True)
class EmbeddedServer:
    """One running server. `exit_code` is set, and `dead` with it, when its process has ended."""

    host: str
    pid: int
    port: int
    bootstrap_port: int
    exit_code: int | None = None
    dead: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        return not self.dead.is_set()


@dataclass(frozen=True, slots=True)
class EmbeddedPair:
    """A running pair, made by `EmbeddedFleet`."""

    settings: EmbeddedSettings
    prefill: EmbeddedServer
    decode: EmbeddedServer

    @property
    def prefill_url(self) -> str:
        return self.prefill.url

    @property
    def decode_url(self) -> str:
        return self.decode.url

    @property
    def bootstrap_host(self) -> str:
        return self.settings.host

    @property
    def bootstrap_port(self) -> int:
        return self.prefill.bootstrap_port

    @property
    def alive(self) -> bool:
        return self.prefill.alive and self.decode.alive

    async def wait_dead(self) -> EmbeddedServer:
        """Wait until either server has ended, and return it."""
        waits = {asyncio.create_task(server.dead.wait()) for server in (self.prefill, self.decode)}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self.decode if self.prefill.alive else self.prefill


class EmbeddedFleet(Mapping[str, EmbeddedPair]):
    """Several pairs by alias, started together: one process imports torch, the servers are forks of it.

    `start` returns when all answer, and raises `EngineUnreachable` when one cannot start or `start_limit_s` passes;
    nothing is left running then. `on_progress` gets a line of text per step.
    """

    def __init__(
        self,
        pairs: Mapping[str, EmbeddedSettings],
        *,
        start_limit_s: float = START_LIMIT_S,
        on_progress: Progress = lambda _: None,
    ) -> None:
        self._settings = dict(pairs)
        self._start_limit_s = start_limit_s
        self._on_progress = on_progress
        self._pairs: dict[str, EmbeddedPair] = {}
        self._servers: dict[str, EmbeddedServer] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None

    def __getitem__(self, alias: str) -> EmbeddedPair:
        return self._pairs[alias]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def spawner_pid(self) -> int | None:
        """The process that all servers are forks of, and that they end with; None before `start` and after `stop`."""
        return None if self._process is None else self._process.pid

    async def __aenter__(self) -> "EmbeddedFleet":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        try:
            async with asyncio.timeout(self._start_limit_s):
                await self._spawn()
                await self._until_ready()
        except TimeoutError as error:
            await self._give_up()
            raise EngineUnreachable(
                f"The embedded pairs were not ready within {self._start_limit_s:g} s.",
                remedy="Use a smaller model or a longer limit.",
            ) from error
        except BaseException:
            await self._give_up()
            raise

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

    async def _give_up(self) -> None:
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

    async def _spawn(self) -> None:
        self._on_progress("importing torch and transformers")
        self._ready = asyncio.get_running_loop().create_future()
        # A session of its own: Ctrl-C in the terminal is for the router, which then stops its engines in order.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "shell_router.engines.embedded.spawner"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read_events(self._process))
        for alias, settings in self._settings.items():
            for mode in ("prefill", "decode"):
                self._send({"start": f"{alias}/{mode}", "server": asdict(ServerSettings(settings, mode))})

    def _send(self, command: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def _until_ready(self) -> None:
        assert self._ready is not None
        await self._ready
        for alias, settings in self._settings.items():
            prefill, decode = (self._servers[f"{alias}/{mode}"] for mode in ("prefill", "decode"))
            self._pairs[alias] = EmbeddedPair(settings, prefill, decode)

    async def _read_events(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self._note(json.loads(line))
        self._all_dead()

    def _note(self, event: Mapping[str, Any]) -> None:
        if "ready" in event:
            self._note_ready(event["ready"], event)
        elif "failed" in event:
            self._fail(f"Embedded server {event['failed']} cannot start: {event['message']}.")
        elif "exited" in event:
            self._note_exit(event["exited"], event["code"])

    def _note_ready(self, name: str, event: Mapping[str, Any]) -> None:
        host = self._settings[name.rpartition("/")[0]].host
        self._servers[name] = EmbeddedServer(host, event["pid"], event["port"], event["bootstrap_port"])
        wanted = 2 * len(self._settings)
        self._on_progress(f"{name} is ready ({len(self._servers)} of {wanted})")
        if len(self._servers) == wanted and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def _note_exit(self, name: str, code: int) -> None:
        server = self._servers.get(name)
        if server is None:
            self._fail(f"Embedded server {name} ended with code {code} before it was ready.")
            return
        server.exit_code = code
        server.dead.set()
        if self._process is not None:
            log.error("Embedded engine %s (pid %d) %s. %s", name, server.pid, how_ended(code), RESTART_REMEDY)

    def _all_dead(self) -> None:
        self._fail("The process that starts embedded servers ended.")
        if self._pairs and self._process is not None:
            log.error("The process of all embedded engines (pid %d) ended. %s", self._process.pid, RESTART_REMEDY)
        for server in self._servers.values():
            server.dead.set()

    def _fail(self, message: str) -> None:
        """End the start with an error; after the start, a server that ends is seen by its `dead`."""
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineUnreachable(message, remedy="Its own log lines say more."))


def how_ended(code: int) -> str:
    """An exit code in words; a negative one is the signal that ended the process."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _signal_group(leader: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies is EPERM
        os.killpg(leader, number)
