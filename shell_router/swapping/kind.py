"""Models of a deployment that take turns in memory for a few of them: its `swapping`.

Requests for one model stand together, and one that waits longer than a window gets the next place,
as in CoServe's queues (section 4.2); what leaves is chosen by dependencies, usage and the queue
(section 4.3). The paper assigns a request to one of several queues; here all places are one memory,
which has one queue. A request streams from the engine that holds its model, next to any others, so
that a batch is the engine's own.
"""

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from shell_router.app.model_files import ModelFiles
from shell_router.app.models import SGLANG_BATCH_SIZE, address_of, running_pairs
from shell_router.app.topologies import load_topologies
from shell_router.app.wings import Progress, StartedEngine
from shell_router.config import AutoSettings, Config, ModelSettings
from shell_router.core.engine import Engine, Finish, Generation, Prefilled, Tokens
from shell_router.engines.adapter_leases import AdapterLeases
from shell_router.engines.prefill_only import PrefillWay
from shell_router.engines.server_client import ServerClient
from shell_router.engines.sglang import SglangPair
from shell_router.engines.weight_swapping import (
    fall_asleep,
    obstacle_to_swap,
    on_each,
    require_sleep,
    swap_weights,
    wake,
)
from shell_router.errors import (
    AdapterMissing,
    ConfigError,
    EngineError,
    EngineStalled,
    EngineUnavailable,
    EngineUnreachable,
    ModelFailed,
)
from shell_router.http.tasks import TaskOwner
from shell_router.standins.embedded.kind import Embedded
from shell_router.standins.embedded.servers import Spawner
from shell_router.standins.embedded.settings import EmbeddedSection
from shell_router.swapping.eviction import Eviction, ModelInTurn, models_in_turn

log = logging.getLogger(__name__)
Opening = Callable[[str], AbstractAsyncContextManager[Engine]]


class Places:
    """Meets `Loader`: a model is loaded while what `opening` gives for it is open. Loads raise
    ModelFailed.
    """

    def __init__(self, opening: Opening, pairs: Mapping[str, SglangPair] | None = None) -> None:
        self.pairs = pairs or {}
        """See `StartedEngine.pairs`."""
        self._opening = opening
        self._loaded: dict[str, tuple[Engine, AsyncExitStack]] = {}

    async def load(self, alias: str) -> None:
        """See `Loader`."""
        async with AsyncExitStack() as stack:
            try:
                engine = await stack.enter_async_context(self._opening(alias))
            except (EngineError, ConfigError, OSError) as error:
                words, remedy = (
                    (error, "") if isinstance(error, OSError) else (error.args[0], error.remedy)
                )
                raise ModelFailed(
                    f"The model {alias!r} could not be loaded: {words}",
                    remedy=remedy or "Check its folder and the logs.",
                ) from error
            self._loaded[alias] = engine, stack.pop_all()

    async def unload(self, alias: str) -> None:
        """See `Loader`."""
        _, stack = self._loaded.pop(alias)
        await stack.aclose()

    def engine(self, alias: str) -> Engine:
        """What serves a model that is loaded. Raises AdapterMissing from its calls where the
        weights are lost.
        """
        if alias not in self._loaded:
            raise _lost(alias)
        return self._loaded[alias][0]

    async def aclose(self) -> None:
        """Unload all."""
        await asyncio.gather(*map(self.unload, tuple(self._loaded)), return_exceptions=True)


def _lost(alias: str) -> AdapterMissing:
    return AdapterMissing(
        f"The weights of {alias} were lost, and are loaded again.", remedy="Ask again."
    )


@asynccontextmanager
async def started_models(
    files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
) -> AsyncIterator[Places]:
    """Embedded pairs, each started for its model, while the context is open. Raises ConfigError
    without torch.
    """
    async with Spawner() as spawner:
        kind = Embedded(spawner)
        await spawner.launch()

        @asynccontextmanager
        async def started(alias: str) -> AsyncIterator[Engine]:
            async with kind.running({alias: files[alias]}, config, log.debug) as engines:
                yield engines[alias].engine

        async with aclosing(Places(started)) as places:
            yield places


class SwappedPairs:
    """Each of these pairs holds one model at a time, whose weights replace those of the one before.

    `folders` lie at the same paths on the servers' machines. A pair that is left keeps its weights
    until others take their place: a model that comes back in between needs no swap.
    """

    def __init__(self, folders: Mapping[str, Path], pairs: Iterable["WeightPair"]) -> None:
        self._folders = folders
        self._free = list(pairs)

    @asynccontextmanager
    async def opened(self, alias: str) -> AsyncIterator[Engine]:
        """The model on a pair of its own. A pair that fails is the last to be tried again."""
        folder = self._folders[alias]
        pair = next((one for one in self._free if one.folder == folder), self._free[0])
        self._free.remove(pair)
        try:
            await pair.swap(folder)
            yield CheckedEngine(alias, pair, folder)
        finally:
            self._free.append(pair)


@dataclass(slots=True, eq=False)
class WeightPair:
    """A pair's client, and its servers as their weights are replaced: now by those in `folder`,
    where that is known.

    They must get no other requests, which would be answered by whichever model is there.
    """

    engine: Engine
    servers: Sequence[ServerClient]
    limit_s: float
    folder: Path | None = None
    _began_with: Path = Path()

    async def begin(self) -> None:
        """Read what is served. Raises EngineError."""
        served = await self.served()
        self._began_with = next(iter(served))
        if len(served) == 1:
            self.folder = self._began_with
        else:
            self.folder = None

    async def served(self) -> set[Path]:
        """The folders of the weights that the servers say they have: one, if all is well. Raises
        EngineError.
        """
        infos = await asyncio.gather(
            *(one.get("model_info", limit_s=self.limit_s) for one in self.servers)
        )
        paths = [Path(orjson.loads(info)["model_path"]) for info in infos]
        return {path.resolve() for path in paths}

    async def swap(self, folder: Path) -> None:
        """Have both servers read the weights, unless they have them, and drop the KV of those
        before.

        Raises ConfigError for a checkpoint that is missing, cut off or of another shape: servers
        are not asked then, and go on with what they had. (SGLang 0.5.23 ends where it is asked for
        one that it cannot read to the end.) Raises EngineError where a server fails; then the next
        load sets what it holds.
        """
        if folder == self.folder:
            return
        if obstacle := await asyncio.to_thread(obstacle_to_swap, self._began_with, folder):
            raise ConfigError(
                (
                    f"{folder} cannot take the place of what its pair serves: "
                    f"{obstacle.removesuffix('.')}."
                ),
                remedy="Swap checkpoints that differ in nothing but their weights.",
            )
        self.folder = None
        await swap_weights(self.servers, folder, self.limit_s)
        self.folder = folder


@dataclass(frozen=True, slots=True)
class CheckedEngine:
    """A pair's engine, for a model whose weights it is to have: one that was started again has
    those of its start.

    Calls raise AdapterMissing if it has not, also where that shows only at the end.
    """

    alias: str
    pair: WeightPair
    folder: Path

    async def _check(self) -> None:
        if await self.pair.served() != {self.folder}:
            if self.pair.folder == self.folder:
                self.pair.folder = None
            raise _lost(self.alias)

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`."""
        await self._check()
        async with aclosing(self.pair.engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, Finish):
                    await self._check()
                yield event

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`."""
        await self._check()
        return await self.pair.engine.prefill(request)


@asynccontextmanager
async def swapped_pairs(
    files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
) -> AsyncIterator[Places]:
    """The deployment's `swapping.pairs`, while the context is open. Raises ConfigError and
    EngineError.
    """
    assert config.swapping is not None
    named = {f"pair {number}": pair for number, pair in enumerate(config.swapping.pairs, 1)}
    some = next(iter(files.values()))
    models = {name: ModelSettings(some.folder, pairs=(pair,)) for name, pair in named.items()}
    alike = replace(config, models=models, swapping=None, auto=AutoSettings())
    addresses = {name: [address_of(pair)] for name, pair in named.items()}
    async with running_pairs(addresses, dict.fromkeys(named, some), alike, on_progress) as engines:
        pairs = [
            WeightPair(one, one.servers, config.limits.engine_start_s) for one in engines.values()
        ]
        for pair in pairs:
            await pair.begin()
        folders = {alias: one.folder.resolve() for alias, one in files.items()}
        yield Places(SwappedPairs(folders, pairs).opened, engines)


class SleepingServers(SglangPair):
    """Servers of one model, which may be asleep: before its first load they are asked nothing that
    needs them awake.
    """

    ready_route = "model_info"  # `/health` may have a server generate

    async def probe(self) -> tuple[PrefillWay, ...]:
        """Check the servers' roles, and that they can sleep; what needs an awake one waits for the
        first load.
        """
        await on_each(require_sleep(server) for server in self.servers)
        await asyncio.gather(*(server.knows_contract() for server in self.servers))
        return ()


class SleepingPairs:
    """Models with servers of their own, awake while the model is open. They have `limit_s` to
    change.

    All that are not open sleep before another wakes. A server that ended has no memory, unless its
    model is one of the `launched`, whose servers are started again. A router that ends leaves open
    what is open: the servers stay awake.
    """

    def __init__(
        self, pairs: Mapping[str, SglangPair], limit_s: float, launched: Collection[str]
    ) -> None:
        self.pairs = pairs
        self.limit_s = limit_s
        self._launched = launched
        self._open: set[str] = set()
        self._probed: set[str] = set()

    @asynccontextmanager
    async def opened(self, alias: str) -> AsyncIterator[Engine]:
        """The model, awake. Raises EngineStalled where others may still have GPU memory, and
        EngineError.
        """
        pair = self.pairs[alias]
        await on_each(self._sleep(one) for one in self.pairs if one not in {alias, *self._open})
        await on_each(wake(server, self.limit_s) for server in pair.servers)
        if alias not in self._probed:
            await SglangPair.probe(pair)
            self._probed.add(alias)
        self._open.add(alias)
        yield pair  # without `finally`, so that nothing sleeps where the router ends
        self._open.remove(alias)
        await self._sleep(alias)

    async def _sleep(self, alias: str) -> None:
        try:
            await on_each(self._asleep(alias, server) for server in self.pairs[alias].servers)
        except EngineError as error:
            words = (
                f"the engines of {alias!r} do not sleep, and may hold GPU memory: {error.args[0]}"
            )
            raise EngineStalled(words, remedy=error.remedy) from error

    async def _asleep(self, alias: str, server: ServerClient) -> None:
        try:
            await fall_asleep(server, self.limit_s)
        except EngineUnreachable as error:
            if alias in self._launched:  # one that starts takes its memory before it answers
                raise
            log.info("the %s has ended, and needs not sleep: %s", server, error)


@asynccontextmanager
async def sleeping_pairs(
    files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
) -> AsyncIterator[Places]:
    """The models' own pairs, while the context is open. Raises ConfigError and EngineError."""
    addresses = {alias: [*map(address_of, config.models[alias].pairs)] for alias in files}
    async with running_pairs(
        addresses, files, config, on_progress, client=SleepingServers
    ) as pairs:
        launched = {
            alias for alias in files if any(pair.launch for pair in config.models[alias].pairs)
        }
        yield Places(SleepingPairs(pairs, config.limits.engine_start_s, launched).opened, pairs)


class SwappedModel:
    """A model that takes turns with the others of the catalog. Implements `Engine`."""

    def __init__(
        self, alias: str, leases: AdapterLeases, places: Places, catalog: Mapping[str, ModelInTurn]
    ) -> None:
        self.alias = alias
        self.leases = leases
        self.places = places
        self._followers = [name for name, one in catalog.items() if alias in one.after]

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`. Raises ModelFailed, and EngineUnavailable for what waits too long
        for its turn.
        """
        async with self._leased() as engine:
            if request.hints.topology is not None:
                for follower in self._followers:
                    self.leases.load_ahead(follower, evicting=True)
            async with aclosing(engine.generate(request)) as events:
                async for event in events:
                    yield event

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`. Raises EngineUnavailable unless the model is loaded; it is then
        loaded if it may be.

        An update of a growing prompt must not take the place of a model that others wait for.
        """
        if not self.leases.serves(self.alias):
            self.leases.load_ahead(self.alias, evicting=True)
            raise EngineUnavailable(
                f"The model {self.alias!r} is not loaded yet.", remedy="Its request will wait."
            )
        async with self._leased() as engine:
            return await engine.prefill(request)

    @asynccontextmanager
    async def _leased(self) -> AsyncIterator[Engine]:
        lease = await self.leases.lease(self.alias)
        try:
            yield self.places.engine(self.alias)
        except AdapterMissing:
            await lease.missing()
            raise
        finally:
            lease.close()


class Swapping:
    """Serves the models of `swapping`; shaped as an `EngineKind`."""

    @asynccontextmanager
    async def running(
        self, files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
    ) -> AsyncIterator[Mapping[str, StartedEngine]]:
        """See `EngineKind`. The most used models are loaded first; one that does not load then is
        left out.
        """
        assert config.swapping is not None
        settings = config.swapping.settings
        tasks = TaskOwner()
        clock = asyncio.get_running_loop().time
        graphs = await asyncio.to_thread(load_topologies, config)
        folders = {alias: one.folder for alias, one in files.items()}
        catalog = await asyncio.to_thread(
            models_in_turn, folders, graphs.values(), config.swapping.usage
        )
        if config.sleeping:
            opening = sleeping_pairs
        elif config.swapping.pairs:
            opening = swapped_pairs
        else:
            opening = started_models
        async with opening(files, config, on_progress) as places:
            order = Eviction(catalog)
            leases = AdapterLeases(
                "engines' memory", places, settings, tasks, clock, kind="model", order=order
            )
            try:
                by_usage = sorted(catalog, key=lambda alias: (-catalog[alias].usage, alias))
                first = by_usage[: settings.max_loaded_adapters]
                await _load_first(leases, first, on_progress)
                yield {
                    alias: _started(SwappedModel(alias, leases, places, catalog), config)
                    for alias in files
                }
            finally:
                await tasks.aclose(0)


def _started(model: SwappedModel, config: Config) -> StartedEngine:
    section = config.models[model.alias].engine.get("embedded") or EmbeddedSection()
    name = f"embedded pair, {section.device}, loaded in turns"
    batch_size = section.max_running_requests
    if model.places.pairs:
        name = "SGLang pairs, loaded in turns"
        batch_size = SGLANG_BATCH_SIZE
    return StartedEngine(model, name, batch_size, leases=model.leases, pairs=model.places.pairs)


async def _load_first(leases: AdapterLeases, aliases: Sequence[str], on_progress: Progress) -> None:
    """Load these; one that cannot be loaded waits for its first request. Raises ModelFailed if none
    can.
    """
    failed: list[EngineError] = []
    for alias in aliases:
        try:
            (await leases.lease(alias)).close()
            on_progress(f"model {alias} is loaded")
        except EngineError as error:
            failed.append(error)
    if len(failed) == len(aliases):
        raise failed[0]
