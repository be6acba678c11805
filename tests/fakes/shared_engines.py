"""Embedded pairs that the tests of a session share; a pair starts when first asked for."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.random_checkpoint import make_checkpoint
from shell_router.standins.embedded.fleet import EmbeddedFleet, EmbeddedPair
from shell_router.standins.embedded.settings import EmbeddedSettings

Result = TypeVar("Result")
START_LIMIT_S = 180.0


class SharedEngines:
    """Running pairs by their settings, and model folders by their shape.

    Tests leave both unchanged. The pairs are supervised on an event loop of their own thread, so
    that tests on any loop can ask them.
    """

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._folder = folder
        self._loop = loop
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
            fleet = EmbeddedFleet({"shared": settings})
            self._run(fleet.start())
            self._fleets[settings] = fleet
        return self._fleets[settings]["shared"]

    def close(self) -> None:
        """End all pairs."""
        self._run(self._stop())

    async def _stop(self) -> None:
        await asyncio.gather(*(fleet.stop() for fleet in self._fleets.values()))

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_LIMIT_S)


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
