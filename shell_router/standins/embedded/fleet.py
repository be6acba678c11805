"""Embedded pairs, started, kept running and stopped from a process that loads no torch itself.

async with EmbeddedFleet({"small": EmbeddedSettings(model_path="…")}) as fleet:
    pair = fleet["small"]
    SglangPair(pair.address)
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from shell_router.engines.address import PairAddress
from shell_router.errors import EngineUnreachable
from shell_router.processes.child import Failure, PythonProcess, preload, run_in_thread
from shell_router.processes.restarts import DEFAULT_POLICY, RestartPolicy, keep_running
from shell_router.standins.embedded.settings import ENVIRONMENT, EmbeddedSettings, ServerSettings

log = logging.getLogger(__name__)

START_LIMIT_S = 180.0
STOP_LIMIT_S = 10.0


def preload_servers() -> None:
    """Have the fork server import what embedded servers need; too late once it runs."""
    preload("shell_router.standins.embedded.preload")


class EmbeddedServer:
    """One process of a server, from its start to its end; a restart makes another object.

    `ready` is done when it serves, and fails with `EngineUnreachable` if it cannot. `dead` is set
    when the process has ended, and `exit_code` with it.
    """

    def __init__(self, name: str, settings: ServerSettings) -> None:
        self.name = name
        self.settings = settings
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.dead = asyncio.Event()
        self._process = PythonProcess(
            name,
            "shell_router.standins.embedded.server:run_in_child",
            {"settings": settings},
            ENVIRONMENT,
        )
        self._running = asyncio.create_task(self._run(), name=name)

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://{self.settings.pair.host}:{self.settings.port}"

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return not self.dead.is_set()

    @property
    def pid(self) -> int | None:
        """The process's id; None before its start."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, a signal's as a negative number; None while the process runs."""
        return self._process.exit_code

    def terminate(self) -> None:
        """Ask the process to abort its requests and end; kill one that does not serve yet."""
        if self.ready.done():
            self._process.signal(signal.SIGTERM)
        else:
            self._process.kill()

    def kill(self) -> None:
        """End the process at once; one that is about to start is ended then."""
        self._process.kill()

    def abandon(self) -> None:
        """End the process at once; one that is about to start is ended then, and is `dead` now."""
        self._process.kill()
        if self.pid is None:
            self._running.cancel()

    async def _run(self) -> None:
        try:
            await run_in_thread(self._process.start)
            with suppress(EOFError):
                self._note(await run_in_thread(self._process.connection.recv))
            code = await run_in_thread(self._process.wait)
            self._process.connection.close()
            self._fail(f"Embedded server {self.name} ended with code {code} before it was ready.")
        except EngineUnreachable as error:
            self._fail(str(error))
        finally:
            self.dead.set()

    def _note(self, message: Failure | tuple[int, int]) -> None:
        if isinstance(message, Failure):
            self._fail(f"Embedded server {self.name} cannot start: {message.message}.")
            return
        port, bootstrap_port = message
        self.settings = replace(self.settings, port=port, bootstrap_port=bootstrap_port)
        if not self.ready.done():
            self.ready.set_result(None)

    def _fail(self, reason: str) -> None:
        """Fail `ready`, unless the server has served."""
        if not self.ready.done():
            self.ready.set_exception(
                EngineUnreachable(reason, remedy="Its own log lines say more.")
            )
            self.ready.exception()  # there may be no waiter


@dataclass(frozen=True, slots=True)
class EmbeddedPair:
    """A running pair. `servers` are the fleet's latest ones by "alias/mode", restarts included."""

    alias: str
    settings: EmbeddedSettings
    servers: Mapping[str, EmbeddedServer]

    @property
    def prefill(self) -> EmbeddedServer:
        """The prefill server that was ready last."""
        return self.servers[f"{self.alias}/prefill"]

    @property
    def decode(self) -> EmbeddedServer:
        """The decode server that was ready last."""
        return self.servers[f"{self.alias}/decode"]

    @property
    def address(self) -> PairAddress:
        """The pair's address, which restarts keep."""
        prefill = self.prefill
        return PairAddress(
            prefill.url, self.decode.url, self.settings.host, prefill.settings.bootstrap_port
        )

    @property
    def alive(self) -> bool:
        """Whether both processes run."""
        return self.prefill.alive and self.decode.alive


class EmbeddedFleet:
    """Several pairs by alias, started together.

    A server that ends is started again on its ports, as `policy` says.

    Args:
        pairs: Settings by alias.
        start_limit_s: Seconds until all servers are ready, and for each restart.
        on_progress: Gets a line of text per step.
        policy: Says when a server is started again.
        sleep: Waits before restarts, and for those that take too long.
    """

    def __init__(
        self,
        pairs: Mapping[str, EmbeddedSettings],
        *,
        start_limit_s: float = START_LIMIT_S,
        on_progress: Callable[[str], None] = lambda _: None,
        policy: RestartPolicy = DEFAULT_POLICY,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._start_limit_s = start_limit_s
        self._on_progress = on_progress
        self._policy = policy
        self._sleep = sleep
        self._started: dict[str, EmbeddedServer] = {}
        """The latest process of each server, ready or not."""
        self._servers: dict[str, EmbeddedServer] = {}
        """The latest that was ready."""
        self._pairs = {
            alias: EmbeddedPair(alias, settings, self._servers) for alias, settings in pairs.items()
        }
        self._restarted_s: dict[str, list[float]] = {
            f"{alias}/{mode}": [] for alias in pairs for mode in ("prefill", "decode")
        }
        self._keeping: list[asyncio.Task[None]] = []

    def __getitem__(self, alias: str) -> EmbeddedPair:
        return self._pairs[alias]

    def restarts_of(self, alias: str) -> Mapping[str, int]:
        """Return how often each of a pair's servers was started again, by "alias/mode"."""
        return {
            f"{alias}/{mode}": len(self._restarted_s[f"{alias}/{mode}"])
            for mode in ("prefill", "decode")
        }

    async def __aenter__(self) -> "EmbeddedFleet":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start all servers and return when all serve; leave none running otherwise.

        Raises:
            EngineUnreachable: A server cannot start, or `start_limit_s` passes.
        """
        try:
            async with asyncio.timeout(self._start_limit_s):
                await self._start_all()
        except BaseException as error:
            await self._kill_all()  # nothing has served yet, so nothing has to end in order
            if not isinstance(error, TimeoutError):
                raise
            raise EngineUnreachable(
                f"The embedded pairs were not ready within {self._start_limit_s:g} s.",
                remedy="Use a smaller model or a longer limit.",
            ) from error

    async def stop(self) -> None:
        """End all servers: SIGTERM, then SIGKILL. A second call does nothing."""
        keeping = self._keeping
        self._keeping = []
        for task in keeping:
            task.cancel()
        try:
            await asyncio.gather(*keeping, return_exceptions=True)
            alive = self._alive()
            for server in alive:
                server.terminate()
            await _wait_until_dead(alive)
        finally:
            await self._kill_all()

    async def _kill_all(self) -> None:
        alive = self._alive()
        for server in alive:
            server.abandon()
        await _wait_until_dead(alive)

    def _alive(self) -> list[EmbeddedServer]:
        return [server for server in self._started.values() if server.alive]

    async def _start_all(self) -> None:
        self._on_progress("importing torch and transformers")
        preload_servers()
        for alias, pair in self._pairs.items():
            for mode in ("prefill", "decode"):
                self._start_server(f"{alias}/{mode}", ServerSettings(pair.settings, mode))
        await asyncio.gather(*map(self._wait_until_ready, self._started.values()))
        for name, restarted_s in self._restarted_s.items():
            kept = keep_running(
                partial(self._wait_for_end, name),
                partial(self._start_again, name),
                restarted_s=restarted_s,
                policy=self._policy,
                sleep=self._sleep,
            )
            self._keeping.append(asyncio.create_task(kept))

    def _start_server(self, name: str, settings: ServerSettings) -> EmbeddedServer:
        server = EmbeddedServer(name, settings)
        self._started[name] = server
        return server

    async def _wait_until_ready(self, server: EmbeddedServer) -> None:
        await server.ready
        self._servers[server.name] = server
        self._on_progress(f"{server.name} is ready ({len(self._servers)} of {len(self._started)})")

    async def _wait_for_end(self, name: str) -> str:
        server = self._started[name]
        await server.dead.wait()
        ending = describe_exit(server.exit_code or 0)
        if server is self._servers[name]:
            return f"Embedded engine {name} (pid {server.pid}) {ending}."
        return f"Embedded engine {name} {ending} before it was ready again."

    async def _start_again(self, name: str) -> None:
        """Start the server on the same ports. One that is not ready in time is killed."""
        server = self._start_server(name, self._servers[name].settings)
        late = asyncio.ensure_future(self._sleep(self._start_limit_s))
        try:
            await asyncio.wait({server.ready, late}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            late.cancel()
        if not server.ready.done():
            server.kill()
            raise EngineUnreachable(
                f"Embedded engine {name} was not ready {self._start_limit_s:g} s after its "
                "restart; it is killed."
            )
        server.ready.result()
        self._servers[name] = server
        self._on_progress(f"{name} is ready again")


async def _wait_until_dead(servers: list[EmbeddedServer]) -> None:
    """Wait until all have ended, for `STOP_LIMIT_S` at most."""
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_LIMIT_S):
            for server in servers:
                await server.dead.wait()


def describe_exit(code: int) -> str:
    """Return an exit code in words; a negative one is the signal that ended the process."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
