"""Embedded pairs that the tests of a session share: torch is imported once, a pair starts when
first asked for.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.random_checkpoint import make_checkpoint
from shell_router.standins.embedded.fleet import EmbeddedFleet, EmbeddedPair
from shell_router.standins.embedded.servers import EmbeddedServer, Spawner
from shell_router.standins.embedded.settings import EmbeddedSettings, ServerSettings

Result = TypeVar("Result")
START_LIMIT_S = 180.0


class SharedEngines:
    """Pairs by their settings, and model folders by their shape. Tests leave both as they found
    them.

    The pairs are supervised on an event loop of their own thread, so that tests on any loop can ask
    them.
    """

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._folder = folder
        self._loop = loop
        self._spawner = Spawner()
        self._fleets: dict[EmbeddedSettings, EmbeddedFleet] = {}
        self._models: dict[tuple[tuple[str, Any], ...], Path] = {}

    def model(self, **shape: Any) -> Path:
        """A folder that `make_checkpoint` wrote with these arguments."""
        key = tuple(sorted(shape.items()))
        if key not in self._models:
            self._models[key] = make_checkpoint(
                self._folder / f"model-{len(self._models)}", **shape
            )
        return self._models[key]

    def pair(self, settings: EmbeddedSettings) -> EmbeddedPair:
        """A running pair with these settings."""
        if settings not in self._fleets:
            fleet = EmbeddedFleet({"shared": settings}, spawner=self._spawner)
            self._run(fleet.start())
            self._fleets[settings] = fleet
        return self._fleets[settings]["shared"]

    def spawner(self) -> Spawner:
        """For fleets on the caller's event loop, whose servers are forks of the same process."""
        return _FromAnotherLoop(self._spawner, self._loop)

    @property
    def spawner_pid(self) -> int | None:
        """The process that all servers are forks of; None before the first."""
        return self._spawner.pid

    def close(self) -> None:
        """End all pairs."""
        self._run(self._stop())

    async def _stop(self) -> None:
        await asyncio.gather(*(fleet.stop() for fleet in self._fleets.values()))
        async with self._spawner:
            pass

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_LIMIT_S)


class _FromAnotherLoop(Spawner):
    """The process of `shared`, which lives on the loop `home`, for servers on the caller's loop."""

    def __init__(self, shared: Spawner, home: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._shared = shared
        self._home = home
        self._loop = asyncio.get_running_loop()
        self._theirs: dict[int, EmbeddedServer] = {}
        self._following: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        return self._shared.pid

    async def launch(self) -> None:
        await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._shared.launch(), self._home)
        )

    def start_server(self, name: str, settings: ServerSettings) -> EmbeddedServer:
        server = EmbeddedServer(name, next(self._numbers), settings, self)
        self._home.call_soon_threadsafe(self._start_at_home, server)
        return server

    def send(self, command: Mapping[str, Any]) -> None:
        self._home.call_soon_threadsafe(self._signal_at_home, command)

    def _start_at_home(self, server: EmbeddedServer) -> None:
        self._theirs[server.number] = self._shared.start_server(server.name, server.settings)
        task = asyncio.create_task(self._follow(self._theirs[server.number], server))
        self._following.add(task)

    def _signal_at_home(self, command: Mapping[str, Any]) -> None:
        self._theirs[command["server"]].signal(command["signal"])

    async def _follow(self, theirs: EmbeddedServer, server: EmbeddedServer) -> None:
        tell = self._loop.call_soon_threadsafe
        await asyncio.wait([theirs.ready])
        if error := theirs.ready.exception():
            tell(server.fail, error.args[0])
        else:
            tell(server.serve, theirs.pid, theirs.settings.port, theirs.settings.bootstrap_port)
        await theirs.dead.wait()
        tell(server.end, "", theirs.exit_code)


@contextmanager
def shared_engines(folder: Path) -> Iterator[SharedEngines]:
    """Engines whose models lie in `folder`; they end with the context."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="shared engines")
    thread.start()
    engines = SharedEngines(folder, loop)
    try:
        yield engines
    finally:
        try:
            engines.close()
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
