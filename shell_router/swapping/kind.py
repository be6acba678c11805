"""The engine kind of `swapping`: models that take turns in memory which holds only a few of them.

Requests for one model are queued as a group, and a model that is awaited longer than a window gets
the next place, as in CoServe's queues (section 4.2). Dependencies, usage and the queue decide which
model leaves (section 4.3). The paper assigns a request to one of several queues; here all places
are one memory, which has one queue. Any number of requests stream from the engine that holds their
model, which forms the batches.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager

from shell_router.app.model_files import ModelFiles
from shell_router.app.pairs import SGLANG_BATCH_SIZE
from shell_router.app.topologies import load_topologies
from shell_router.app.wings import Progress, StartedEngine
from shell_router.config import Config
from shell_router.core.engine import Finish, Generation, Prefilled, Tokens
from shell_router.errors import EngineError, EngineUnavailable
from shell_router.http.tasks import TaskOwner
from shell_router.standins.embedded.settings import EmbeddedSection
from shell_router.swapping.eviction import Eviction, ModelInTurn, models_in_turn
from shell_router.swapping.leases import ModelLeases
from shell_router.swapping.metrics import TurnMetrics
from shell_router.swapping.places import (
    Places,
    open_embedded_places,
    open_sleeping_places,
    open_swapped_places,
)


class SwappedModel:
    """The engine of one model that takes turns with the others of the catalog."""

    def __init__(
        self, alias: str, leases: ModelLeases, places: Places, catalog: Mapping[str, ModelInTurn]
    ) -> None:
        self.alias = alias
        self.leases = leases
        self.places = places
        self._readers = [name for name, model in catalog.items() if alias in model.after]

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`.

        Raises ModelFailed, and EngineUnavailable for a request that waits too long for its turn.
        """
        async with self.leases.lease(self.alias):
            if request.hints.topology is not None:
                for reader in self._readers:
                    self.leases.load_ahead(reader)
            engine = self.places.engine(self.alias)
            async with aclosing(engine.generate(request)) as events:
                async for event in events:
                    yield event

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`.

        An update of a growing prompt must not take the place of a model that others wait for. If
        the model is not loaded, this starts loading it when a place is free, and raises
        EngineUnavailable.
        """
        if not self.leases.serves(self.alias):
            self.leases.load_ahead(self.alias)
            raise EngineUnavailable(
                f"The model {self.alias!r} is not loaded yet.", remedy="Its request will wait."
            )
        async with self.leases.lease(self.alias):
            return await self.places.engine(self.alias).prefill(request)


class Swapping:
    """Serves the models of `swapping`; shaped as an `EngineKind`."""

    @asynccontextmanager
    async def running(
        self, files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
    ) -> AsyncIterator[Mapping[str, StartedEngine]]:
        """See `EngineKind`.

        The most used models are loaded at the start. A model that fails to load then is loaded
        again by its first request.
        """
        assert config.swapping is not None
        settings = config.swapping
        tasks = TaskOwner()
        graphs = await asyncio.to_thread(load_topologies, config)
        folders = {alias: model.folder for alias, model in files.items()}
        catalog = await asyncio.to_thread(models_in_turn, folders, graphs.values(), settings.usage)
        if config.sleeping:
            opening = open_sleeping_places
        elif settings.pairs:
            opening = open_swapped_places
        else:
            opening = open_embedded_places
        async with opening(files, config, on_progress) as places:
            leases = ModelLeases(
                places,
                tasks,
                asyncio.get_running_loop().time,
                places=settings.places,
                window_s=settings.window_s,
                wait_s=settings.wait_s,
                order=Eviction(catalog),
            )
            metrics = TurnMetrics(leases)
            by_usage = sorted(catalog, key=lambda alias: (-catalog[alias].usage, alias))
            try:
                await _load_first(leases, by_usage[: settings.places], on_progress)
                yield {
                    alias: _describe_engine(
                        SwappedModel(alias, leases, places, catalog), config, metrics
                    )
                    for alias in files
                }
            finally:
                await tasks.aclose(0)


def _describe_engine(model: SwappedModel, config: Config, metrics: TurnMetrics) -> StartedEngine:
    fleets = model.places.fleets
    if fleets:
        name = "SGLang pairs, loaded in turns"
        batch_size = SGLANG_BATCH_SIZE
    else:
        section = config.models[model.alias].engine.get("embedded") or EmbeddedSection()
        name = f"embedded pair, {section.device}, loaded in turns"
        batch_size = section.max_running_requests
    return StartedEngine(model, name, batch_size, None, shared_fleets=fleets, metrics=metrics)


async def _load_first(leases: ModelLeases, aliases: Sequence[str], on_progress: Progress) -> None:
    """Load `aliases`, and raise the first EngineError if none of them loads."""
    failures: list[EngineError] = []
    for alias in aliases:
        try:
            async with leases.lease(alias):
                on_progress(f"model {alias} is loaded")
        except EngineError as error:
            failures.append(error)
    if len(failures) == len(aliases):
        raise failures[0]
