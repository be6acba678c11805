"""Start and stop embedded pairs from the router's process, which loads no torch itself.

async with EmbeddedFleet({"small": EmbeddedSettings(model_path="…")}) as fleet:
    pair = fleet["small"]
    pair.prefill_url, pair.decode_url, pair.bootstrap_port
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from shell_router.engines.embedded.running import EmbeddedPair, EmbeddedServer
from shell_router.engines.embedded.server_restarts import Later, ServerRestarts, call_later
from shell_router.engines.embedded.settings import EmbeddedSettings, ServerSettings
from shell_router.engines.embedded.shared_spawner import MakeSpawner
from shell_router.engines.embedded.spawner_client import SpawnerClient
from shell_router.engines.restarts import DEFAULT_POLICY, RestartPolicy
from shell_router.errors import EngineUnreachable

log = logging.getLogger(__name__)

START_LIMIT_S = 180.0
RESTART_REMEDY = "Restart the router; until then requests that need it fail."
Progress = Callable[[str], None]


class EmbeddedFleet(Mapping[str, EmbeddedPair]):
    """Several pairs by alias, started together: one process imports torch, the servers are forks of it.

    `start` returns when all answer, and raises `EngineUnreachable` when one cannot start or `start_limit_s` passes;
    nothing is left running then. From then on a server that ends is started again on its ports, as `policy` says
    and when `later` calls. `on_progress` gets a line of text per step. `spawner` may be one that other fleets use, too.
    """

    def __init__(
        self,
        pairs: Mapping[str, EmbeddedSettings],
        *,
        start_limit_s: float = START_LIMIT_S,
        on_progress: Progress = lambda _: None,
        policy: RestartPolicy = DEFAULT_POLICY,
        later: Later = call_later,
        spawner: MakeSpawner = SpawnerClient,
    ) -> None:
        self._settings = dict(pairs)
        self._start_limit_s = start_limit_s
        self._on_progress = on_progress
        self._wanted = {
            f"{alias}/{mode}": ServerSettings(settings, mode)
            for alias, settings in pairs.items()
            for mode in ("prefill", "decode")
        }
        self._pairs: dict[str, EmbeddedPair] = {}
        self._servers: dict[str, EmbeddedServer] = {}
        self._ready: asyncio.Future[None] | None = None
        self._spawner = spawner(self._note, self._all_dead)
        self._restarts = ServerRestarts(
            self._wanted,
            policy,
            start=self._start_server,
            kill=self._spawner.kill_server,
            start_limit_s=start_limit_s,
            later=later,
        )

    def __getitem__(self, alias: str) -> EmbeddedPair:
        return self._pairs[alias]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def spawner_pid(self) -> int | None:
        """The process that all servers are forks of, and that they end with; None before `start` and after `stop`."""
        return self._spawner.pid

    @property
    def restarts(self) -> Mapping[str, int]:
        """How often each server was started again, by "alias/mode"."""
        return self._restarts.counts

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
        self._restarts.stop()
        await self._spawner.stop()

    async def _give_up(self) -> None:
        self._restarts.stop()
        await self._spawner.give_up()

    async def _until_ready(self) -> None:
        self._on_progress("importing torch and transformers")
        self._ready = asyncio.get_running_loop().create_future()
        await self._spawner.launch()
        for name in self._wanted:
            self._start_server(name)
        await self._ready
        self._pairs = {alias: EmbeddedPair(alias, each, self._servers) for alias, each in self._settings.items()}

    def _start_server(self, name: str) -> None:
        self._spawner.start_server(name, self._wanted[name])

    def _note(self, event: Mapping[str, Any]) -> None:
        if "ready" in event:
            self._note_ready(event["ready"], event)
        elif "failed" in event:
            self._note_failed(event["failed"], event["message"])
        elif "exited" in event:
            self._note_exit(event["exited"], event["code"])

    def _note_ready(self, name: str, event: Mapping[str, Any]) -> None:
        """Show the server, and remember its ports: it will be started again on the same."""
        again = name in self._servers
        ports = {"port": event["port"], "bootstrap_port": event["bootstrap_port"]}
        self._wanted[name] = replace(self._wanted[name], **ports)
        self._servers[name] = EmbeddedServer(self._wanted[name].pair.host, event["pid"], **ports)
        self._restarts.ready(name)
        if again:
            self._on_progress(f"{name} is ready again")
            return
        self._on_progress(f"{name} is ready ({len(self._servers)} of {len(self._wanted)})")
        if len(self._servers) == len(self._wanted) and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def _note_failed(self, name: str, message: str) -> None:
        told = f"Embedded server {name} cannot start: {message}."
        if name in self._servers:
            log.warning("%s", told)
        else:
            self._fail(told)

    def _note_exit(self, name: str, code: int) -> None:
        server = self._servers.get(name)
        if server is None:
            self._fail(f"Embedded server {name} ended with code {code} before it was ready.")
        elif server.alive:
            server.exit_code = code
            server.dead.set()
            self._restarts.ended(name, f"Embedded engine {name} (pid {server.pid}) {how_ended(code)}.")
        else:
            self._restarts.ended(name, f"Embedded engine {name} {how_ended(code)} before it was ready again.")

    def _all_dead(self) -> None:
        self._fail("The process that starts embedded servers ended.")
        self._restarts.stop()
        if self._pairs and self._spawner.pid is not None:
            log.error("The process of all embedded engines (pid %d) ended. %s", self._spawner.pid, RESTART_REMEDY)
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


__all__ = ["START_LIMIT_S", "EmbeddedFleet", "EmbeddedPair", "EmbeddedServer"]
