"""One spawner for fleets that come and go: torch is imported once, and each fleet starts as fast as a fork."""

import asyncio
from collections.abc import Callable, Mapping
from itertools import count
from types import TracebackType
from typing import Any, Protocol

from shell_router.engines.embedded.settings import ServerSettings
from shell_router.engines.embedded.spawner_client import STOP_LIMIT_S, SpawnerClient

Told = Callable[[Mapping[str, Any]], None]


class Spawner(Protocol):
    """What a fleet needs to start and end its servers; `SpawnerClient` is one, with a process of its own."""

    @property
    def pid(self) -> int | None:
        """The process that the servers are forks of."""
        ...

    async def launch(self) -> None:
        """Get ready to start servers."""
        ...

    def start_server(self, name: str, settings: ServerSettings) -> None:
        """Ask for a server; an event tells what becomes of it."""
        ...

    def kill_server(self, name: str) -> None:
        """SIGKILL to the server."""
        ...

    async def stop(self) -> None:
        """End the fleet's servers in order."""
        ...

    async def give_up(self) -> None:
        """End the fleet's servers at once."""
        ...


MakeSpawner = Callable[[Told, Callable[[], None]], Spawner]
"""Makes a fleet's spawner of what is told of each event, and of the end of all."""


class SharedSpawner:
    """A spawner process that several fleets use while this context is open. It starts with `launch`."""

    def __init__(self) -> None:
        self._client = SpawnerClient(self._note, self._end)
        self._numbers = count()
        self._lent: dict[str, LentSpawner] = {}
        self._starting = asyncio.Lock()
        self._imported = asyncio.Event()

    async def __aenter__(self) -> "SharedSpawner":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.stop()

    def lend(self, told: Told, ended: Callable[[], None]) -> "LentSpawner":
        """A `MakeSpawner`."""
        number = str(next(self._numbers))
        self._lent[number] = LentSpawner(self, number, told, ended)
        return self._lent[number]

    @property
    def client(self) -> SpawnerClient:
        """The process."""
        return self._client

    async def launch(self) -> None:
        """Start the process, once, and return when it has imported all that servers need, or has ended."""
        async with self._starting:
            if self._client.pid is None:
                await self._client.launch()
        await self._imported.wait()

    def take_back(self, number: str) -> None:
        """Tell that fleet no more."""
        self._lent.pop(number, None)

    def _note(self, event: Mapping[str, Any]) -> None:
        """Pass an event on to the fleet whose server it is, by that server's own name."""
        if "imported" in event:
            self._imported.set()
        for kind in ("ready", "failed", "exited"):
            if kind in event:
                number, _, name = event[kind].partition(":")
                if number in self._lent:
                    self._lent[number].note({**event, kind: name})

    def _end(self) -> None:
        self._imported.set()
        for lent in list(self._lent.values()):
            lent.end()


class LentSpawner:
    """One fleet's view of a shared spawner: its servers alone, under their own names."""

    def __init__(self, shared: SharedSpawner, number: str, told: Told, ended: Callable[[], None]) -> None:
        self._shared = shared
        self._number = number
        self._told = told
        self._ended = ended
        self._running: set[str] = set()
        self._all_gone = asyncio.Event()
        self._all_gone.set()

    @property
    def pid(self) -> int | None:
        """See `Spawner`."""
        return self._shared.client.pid

    async def launch(self) -> None:
        """See `Spawner`."""
        await self._shared.launch()

    def start_server(self, name: str, settings: ServerSettings) -> None:
        """See `Spawner`."""
        self._running.add(name)
        self._all_gone.clear()
        self._shared.client.start_server(f"{self._number}:{name}", settings)

    def kill_server(self, name: str) -> None:
        """See `Spawner`."""
        self._shared.client.kill_server(f"{self._number}:{name}")

    async def stop(self) -> None:
        """End its servers. They serve nobody any more, and hold nothing that outlives them."""
        try:
            for name in self._running:
                self.kill_server(name)
            async with asyncio.timeout(STOP_LIMIT_S):
                await self._all_gone.wait()
        finally:
            self._shared.take_back(self._number)

    async def give_up(self) -> None:
        """See `Spawner`."""
        await self.stop()

    def note(self, event: Mapping[str, Any]) -> None:
        """Pass an event on."""
        if "exited" in event:
            self._running.discard(event["exited"])
            if not self._running:
                self._all_gone.set()
        self._told(event)

    def end(self) -> None:
        """The process has ended, and all servers with it."""
        self._running.clear()
        self._all_gone.set()
        self._ended()
