"""Start, keep running and stop embedded pairs from the router's process, which loads no torch
itself.

async with EmbeddedFleet({"small": EmbeddedSettings(model_path="…")}) as fleet:
    pair = fleet["small"]
    SglangPair(pair.address)
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from shell_router.engines.address import PairAddress
from shell_router.errors import EngineUnreachable
from shell_router.processes.restarts import DEFAULT_POLICY, RestartPolicy, keep_running
from shell_router.standins.embedded.servers import STOP_LIMIT_S, EmbeddedServer, Spawner
from shell_router.standins.embedded.settings import EmbeddedSettings, ServerSettings

log = logging.getLogger(__name__)

START_LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class EmbeddedPair:
    """A running pair. `servers` are the fleet's latest processes by "alias/mode": restarts are seen
    here.
    """

    alias: str
    settings: EmbeddedSettings
    servers: Mapping[str, EmbeddedServer]

    @property
    def prefill(self) -> EmbeddedServer:
        return self.servers[f"{self.alias}/prefill"]

    @property
    def decode(self) -> EmbeddedServer:
        return self.servers[f"{self.alias}/decode"]

    @property
    def address(self) -> PairAddress:
        """Where the router finds it, now and after restarts."""
        prefill = self.prefill
        return PairAddress(
            prefill.url, self.decode.url, self.settings.host, prefill.settings.bootstrap_port
        )

    @property
    def alive(self) -> bool:
        return self.prefill.alive and self.decode.alive


class EmbeddedFleet:
    """Several pairs by alias, started together: one process imports torch, the servers are forks of
    it.

    `start` returns when all answer, and raises `EngineUnreachable` when one cannot start or
    `start_limit_s` passes; nothing is left running then. From then on a server that ends is started
    again on its ports, as `policy` says. `on_progress` gets a line of text per step. `spawner` is
    one that other fleets use, too; without it the fleet has one of its own. `sleep` waits before
    restarts, and for those that take too long.
    """

    def __init__(
        self,
        pairs: Mapping[str, EmbeddedSettings],
        *,
        start_limit_s: float = START_LIMIT_S,
        on_progress: Callable[[str], None] = lambda _: None,
        policy: RestartPolicy = DEFAULT_POLICY,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        spawner: Spawner | None = None,
    ) -> None:
        self._start_limit_s = start_limit_s
        self._on_progress = on_progress
        self._policy = policy
        self._sleep = sleep
        self._spawner = spawner or Spawner()
        self._owns_spawner = spawner is None
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
        """How often each of a pair's servers was started again, by "alias/mode"."""
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
        try:
            async with asyncio.timeout(self._start_limit_s):
                await self._start_all()
        except BaseException as error:
            await self._end(at_once=True)  # nothing has served yet, so nothing has to end in order
            if not isinstance(error, TimeoutError):
                raise
            raise EngineUnreachable(
                f"The embedded pairs were not ready within {self._start_limit_s:g} s.",
                remedy="Use a smaller model or a longer limit.",
            ) from error

    async def stop(self) -> None:
        """End all servers: SIGTERM, then SIGKILL. Calling it twice is no error."""
        keeping = self._keeping
        self._keeping = []
        for task in keeping:
            task.cancel()
        try:
            await asyncio.gather(*keeping, return_exceptions=True)
        finally:
            await self._end()

    async def _end(self, *, at_once: bool = False) -> None:
        if self._owns_spawner:
            await self._spawner.stop(at_once=at_once)
        for number in (signal.SIGKILL,) if at_once else (signal.SIGTERM, signal.SIGKILL):
            alive = [server for server in self._started.values() if server.alive]
            for server in alive:
                server.signal(number)
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_LIMIT_S):
                    for server in alive:
                        await server.dead.wait()

    async def _start_all(self) -> None:
        self._on_progress("importing torch and transformers")
        await self._spawner.launch()
        for alias, pair in self._pairs.items():
            for mode in ("prefill", "decode"):
                self._start_server(f"{alias}/{mode}", ServerSettings(pair.settings, mode))
        await asyncio.gather(*(self._serves(server) for server in self._started.values()))
        for name, restarted_s in self._restarted_s.items():
            ended = partial(self._ended, name)
            start = partial(self._start_again, name)
            kept = keep_running(
                ended, start, restarted_s=restarted_s, policy=self._policy, sleep=self._sleep
            )
            self._keeping.append(asyncio.create_task(kept))
        self._keeping.append(asyncio.create_task(self._watch_spawner()))

    def _start_server(self, name: str, settings: ServerSettings) -> EmbeddedServer:
        self._started[name] = self._spawner.start_server(name, settings)
        return self._started[name]

    async def _serves(self, server: EmbeddedServer) -> None:
        await server.ready
        self._servers[server.name] = server
        self._on_progress(f"{server.name} is ready ({len(self._servers)} of {len(self._started)})")

    async def _ended(self, name: str) -> str:
        server = self._started[name]
        await server.dead.wait()
        if self._spawner.dead.is_set():
            await asyncio.Event().wait()  # until `_watch_spawner` cancels this
        how = how_ended(server.exit_code or 0)
        if server is self._servers[name]:
            return f"Embedded engine {name} (pid {server.pid}) {how}."
        return f"Embedded engine {name} {how} before it was ready again."

    async def _start_again(self, name: str) -> None:
        """On the same ports. A server that is not ready in time is killed."""
        server = self._start_server(name, self._servers[name].settings)
        late = asyncio.ensure_future(self._sleep(self._start_limit_s))
        try:
            await asyncio.wait({server.ready, late}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            late.cancel()
        if not server.ready.done():
            server.signal(signal.SIGKILL)
            raise EngineUnreachable(
                f"Embedded engine {name} was not ready {self._start_limit_s:g} s after its "
                "restart; it is killed."
            )
        server.ready.result()
        self._servers[name] = server
        self._on_progress(f"{name} is ready again")

    async def _watch_spawner(self) -> None:
        pid = self._spawner.pid
        await self._spawner.dead.wait()
        for task in self._keeping[:-1]:
            task.cancel()
        log.error(
            "The process of all embedded engines (pid %s) ended. Restart the router; until then "
            "requests that need "
            "them fail.",
            pid,
        )


def how_ended(code: int) -> str:
    """An exit code in words; a negative one is the signal that ended the process."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
