"""Where models that take turns are loaded: embedded pairs, swapped weights, sleeping servers."""

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
from shell_router.app.pairs import address_of, run_pairs
from shell_router.app.wings import Progress
from shell_router.config import AutoSettings, Config, ModelSettings
from shell_router.core.engine import Engine, Finish, Generation, Prefilled, Tokens
from shell_router.engines.pair_fleet import PairFleet
from shell_router.engines.prefill_only import PrefillWay
from shell_router.engines.server_client import ServerClient
from shell_router.engines.sglang import SglangPair
from shell_router.errors import (
    ConfigError,
    EngineError,
    EngineStalled,
    EngineUnreachable,
    ModelFailed,
    WeightsLost,
)
from shell_router.processes.child import run_in_thread, start_fork_server
from shell_router.standins.embedded.kind import Embedded
from shell_router.swapping.sleep import fall_asleep, require_sleep, wake
from shell_router.swapping.weights import obstacle_to_swap, run_all, swap_weights

log = logging.getLogger(__name__)
Opening = Callable[[str], AbstractAsyncContextManager[Engine]]


class Places:
    """Implements `Loader`: a model is loaded while the engine that `opening` gives is open."""

    def __init__(self, opening: Opening, pairs: Mapping[str, SglangPair] | None = None) -> None:
        self.fleets = {name: pair.fleet for name, pair in (pairs or {}).items()}
        """See `StartedEngine.shared_fleets`."""
        self._opening = opening
        self._loaded: dict[str, tuple[Engine, AsyncExitStack]] = {}

    async def load(self, alias: str) -> None:
        """Open the model's engine. Raises ModelFailed."""
        async with AsyncExitStack() as stack:
            try:
                engine = await stack.enter_async_context(self._opening(alias))
            except (EngineError, ConfigError) as error:
                raise _load_failure(alias, error.args[0], error.remedy) from error
            except OSError as error:
                raise _load_failure(alias, str(error)) from error
            self._loaded[alias] = engine, stack.pop_all()

    async def unload(self, alias: str) -> None:
        """Close the model's engine."""
        _, stack = self._loaded.pop(alias)
        await stack.aclose()

    def engine(self, alias: str) -> Engine:
        """Return the engine of a loaded model.

        Raises WeightsLost if the model is not loaded; so do the engine's calls if its weights are
        lost.
        """
        if alias not in self._loaded:
            raise _build_weights_lost(alias)
        return self._loaded[alias][0]

    async def aclose(self) -> None:
        """Unload all models."""
        await asyncio.gather(*map(self.unload, tuple(self._loaded)), return_exceptions=True)


def _load_failure(alias: str, reason: str, remedy: str = "") -> ModelFailed:
    return ModelFailed(
        f"The model {alias!r} could not be loaded: {reason}",
        remedy=remedy or "Check its folder and the logs.",
    )


def _build_weights_lost(alias: str) -> WeightsLost:
    return WeightsLost(
        f"The weights of {alias} were lost, and are loaded again.", remedy="Ask again."
    )


# --- embedded pairs


@asynccontextmanager
async def open_embedded_places(
    files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
) -> AsyncIterator[Places]:
    """Start an embedded pair for a model when it is loaded. Raises ConfigError without torch."""
    kind = Embedded()
    await run_in_thread(start_fork_server)

    @asynccontextmanager
    async def open_pair(alias: str) -> AsyncIterator[Engine]:
        async with kind.running({alias: files[alias]}, config, log.debug) as engines:
            yield engines[alias].engine

    async with aclosing(Places(open_pair)) as places:
        yield places


# --- swapped weights


class SwappedPairs:
    """SGLang pairs that hold one model each, whose weights replace those of the one before.

    `folders` lie at the same paths on the servers' machines. A pair keeps its weights until others
    take their place: a model that comes back before needs no swap.
    """

    def __init__(self, folders: Mapping[str, Path], pairs: Iterable["WeightPair"]) -> None:
        self._folders = folders
        self._free = list(pairs)

    @asynccontextmanager
    async def open(self, alias: str) -> AsyncIterator[Engine]:
        """Serve the model on a pair of its own. A pair that fails is tried again last."""
        folder = self._folders[alias]
        pair = next((pair for pair in self._free if pair.folder == folder), self._free[0])
        self._free.remove(pair)
        try:
            await pair.swap(folder)
            yield CheckedEngine(alias, pair, folder)
        finally:
            self._free.append(pair)


@dataclass(slots=True, eq=False)
class WeightPair:
    """A pair whose weights are replaced: now those in `folder`, if that is known.

    Its servers must get no other requests: whichever model is there would answer them.
    """

    engine: Engine
    servers: Sequence[ServerClient]
    limit_s: float
    folder: Path | None = None
    _began_with: Path = Path()

    async def begin(self) -> None:
        """Ask the servers for their weights. Raises EngineError."""
        served = await self.read_served()
        self._began_with = next(iter(served))
        if len(served) == 1:
            self.folder = self._began_with

    async def read_served(self) -> set[Path]:
        """Return the folders of the servers' weights: one, if all is well. Raises EngineError."""
        queries = (server.get("model_info", limit_s=self.limit_s) for server in self.servers)
        infos = await asyncio.gather(*queries)
        paths = [Path(orjson.loads(info)["model_path"]) for info in infos]
        return {path.resolve() for path in paths}

    async def swap(self, folder: Path) -> None:
        """Have both servers read the weights, unless they have them, and drop the KV of others.

        SGLang 0.5.23 ends if it cannot read a checkpoint to its end. So a bad one is refused
        before, and the servers go on with what they had.

        Raises:
            ConfigError: The checkpoint is missing, cut off or of another shape.
            EngineError: A server failed. The next load finds out what it holds.
        """
        if folder == self.folder:
            return
        if obstacle := await asyncio.to_thread(obstacle_to_swap, self._began_with, folder):
            raise ConfigError(
                f"{folder} cannot take the place of what its pair serves: "
                f"{obstacle.removesuffix('.')}.",
                remedy="Swap checkpoints that differ in nothing but their weights.",
            )
        self.folder = None
        await swap_weights(self.servers, folder, self.limit_s)
        self.folder = folder


@dataclass(frozen=True, slots=True)
class CheckedEngine:
    """A pair's engine that checks for each request that the servers have the model's weights.

    A server that was started again has the weights of its start. Calls then raise WeightsLost,
    also if that shows only after the answer.
    """

    alias: str
    pair: WeightPair
    folder: Path

    async def _check_weights(self) -> None:
        if await self.pair.read_served() != {self.folder}:
            if self.pair.folder == self.folder:
                self.pair.folder = None
            raise _build_weights_lost(self.alias)

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`."""
        await self._check_weights()
        async with aclosing(self.pair.engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, Finish):
                    await self._check_weights()
                yield event

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`."""
        await self._check_weights()
        return await self.pair.engine.prefill(request)


@asynccontextmanager
async def open_swapped_places(
    files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
) -> AsyncIterator[Places]:
    """Use the deployment's `swapping.pairs`. Raises ConfigError and EngineError."""
    assert config.swapping is not None
    some = next(iter(files.values()))
    models = {}
    addresses = {}
    for number, pair in enumerate(config.swapping.pairs, 1):
        name = f"pair {number}"
        models[name] = ModelSettings(Path(), pairs=(pair,))
        addresses[name] = [address_of(pair)]
    alike = replace(config, models=models, swapping=None, auto=AutoSettings())
    async with run_pairs(addresses, dict.fromkeys(models, some), alike, on_progress) as clients:
        pairs = []
        for client in clients.values():
            pair_of_weights = WeightPair(client, client.fleet.servers, config.limits.engine_start_s)
            await pair_of_weights.begin()
            pairs.append(pair_of_weights)
        folders = {alias: model.folder.resolve() for alias, model in files.items()}
        yield Places(SwappedPairs(folders, pairs).open, clients)


# --- sleeping servers


class SleepingFleet(PairFleet):
    """The servers of one model, which may be asleep.

    Before its first load they are asked nothing that needs them awake.
    """

    ready_route = "model_info"  # `/health` may have a server generate

    async def probe(self) -> tuple[PrefillWay, ...]:
        """Check the servers' roles and that they can sleep; the first load probes the rest."""
        await run_all(require_sleep(server) for server in self.servers)
        await asyncio.gather(*(server.knows_contract() for server in self.servers))
        return ()


class SleepingPair(SglangPair):
    """The pairs of one model, which may be asleep."""

    fleet_type = SleepingFleet


class SleepingPairs:
    """Models with servers of their own, which are awake while the model is open.

    All other models sleep before one wakes. Servers have `limit_s` to change. A server that ended
    has no memory, unless its model is one of the `launched`, whose servers are started again. A
    router that ends leaves the servers of open models awake.
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
    async def open(self, alias: str) -> AsyncIterator[Engine]:
        """Keep the model awake.

        Raises EngineStalled if other models may still have GPU memory, and EngineError.
        """
        pair = self.pairs[alias]
        stays = {alias, *self._open}
        await run_all(self._put_to_sleep(other) for other in self.pairs if other not in stays)
        await run_all(wake(server, self.limit_s) for server in pair.fleet.servers)
        if alias not in self._probed:
            await PairFleet.probe(pair.fleet)
            self._probed.add(alias)
        self._open.add(alias)
        yield pair  # without `finally`: nothing is put to sleep when the router ends
        self._open.remove(alias)
        await self._put_to_sleep(alias)

    async def _put_to_sleep(self, alias: str) -> None:
        servers = self.pairs[alias].fleet.servers
        try:
            await run_all(self._put_server_to_sleep(alias, server) for server in servers)
        except EngineError as error:
            words = (
                f"the engines of {alias!r} do not sleep, and may hold GPU memory: {error.args[0]}"
            )
            raise EngineStalled(words, remedy=error.remedy) from error

    async def _put_server_to_sleep(self, alias: str, server: ServerClient) -> None:
        try:
            await fall_asleep(server, self.limit_s)
        except EngineUnreachable as error:
            if alias in self._launched:  # a server that starts takes its memory before it answers
                raise
            log.info("the %s has ended, and needs not sleep: %s", server, error)


@asynccontextmanager
async def open_sleeping_places(
    files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
) -> AsyncIterator[Places]:
    """Use the models' own engines. Raises ConfigError and EngineError."""
    addresses = {}
    launched = set()
    for alias in files:
        own = config.models[alias].sglang
        addresses[alias] = [address_of(at) for at in own]
        if any(at.launch for at in own):
            launched.add(alias)
    limit_s = config.limits.engine_start_s
    async with run_pairs(addresses, files, config, on_progress, client=SleepingPair) as clients:
        yield Places(SleepingPairs(clients, limit_s, launched).open, clients)
