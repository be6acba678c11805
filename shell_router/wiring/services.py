"""Everything the API works with, started and ended together."""

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

from shell_router.api import Services
from shell_router.config import Config
from shell_router.core.relay import Relay
from shell_router.engines.adapters.on_servers import Adapters
from shell_router.engines.place import Candidate
from shell_router.engines.server_client import ServerClient
from shell_router.errors import ConfigError
from shell_router.execution import Classes, Executor, Judges, Programs, Scores, StepExecutor
from shell_router.telemetry import AdapterState, EngineReports, Metrics, QueueState, ServerState, TraceStore
from shell_router.topology import Conditional, Graph, files_in, load_files
from shell_router.wiring.adapters import adapted_models, model_names
from shell_router.wiring.cache import running_cache
from shell_router.wiring.choosing import chooser_of, running_predictor, running_recorder
from shell_router.wiring.embedding import running_embedder
from shell_router.wiring.models import RunningModel, running_models

log = logging.getLogger(__name__)


@asynccontextmanager
async def running_services(
    config: Config,
    *,
    tell: Callable[[str], None] = log.info,
    engine_restarts: Callable[[], Mapping[str, int]] = dict,
) -> AsyncIterator[Services]:
    """Start what `config` names, telling each step, and give it to the API; end it on leaving, in reverse order.

    Raises ConfigError before anything is started where the files are wrong, EngineError for an engine that does not
    come up. Nothing is left running on any path.
    """
    topologies = load_topologies(config)
    clock = time.monotonic
    async with (
        running_embedder(config.embedder) as embedding,
        running_cache(config.cache, clock) as cache,
        running_predictor(config.prediction) as prediction,
        running_models(config, tell) as models,
        AsyncExitStack() as stack,
    ):
        adapted = {
            name: one for model in models.values() for name, one in adapted_models(model.served, model.pool).items()
        }
        served = {alias: model.served for alias, model in models.items()}
        served |= {name: model for name, (model, _) in adapted.items()}
        relays: dict[str, Relay] = {alias: model.pool for alias, model in models.items()}
        relays |= {name: relay for name, (_, relay) in adapted.items()}
        chooser = chooser_of(config, served, prediction.predictor, clock)
        agents = Executor(served, cache.logs, embedding.embedder, clock=clock, chooser=chooser)
        metrics = Metrics(cache_degraded=cache.degraded, engines=_reports(models, engine_restarts, clock))
        yield Services(
            executor=StepExecutor(agents, Judges(Classes(embedding.embedder), Scores(chooser, served)), clock=clock),
            programs=Programs(served, cache.logs, clock=clock, chooser=chooser),
            topologies=topologies,
            models=served,
            relays=relays,
            engines={alias: model.engine for alias, model in models.items()},
            checks={
                **{f"engine {alias}": model.pool.serves for alias, model in models.items()},
                "cache": cache.healthy,
                "embedder": embedding.loaded,
                **prediction.checks,
            },
            dispensable=("cache", *prediction.checks),  # requests go on from memory, and are chosen for by load alone
            metrics=metrics,
            recorder=await stack.enter_async_context(running_recorder(config, metrics)),
            traces=TraceStore(config.traces.kept),
            clock=clock,
        )


def _reports(
    models: Mapping[str, RunningModel], restarts: Callable[[], Mapping[str, int]], clock: Callable[[], float]
) -> EngineReports:
    """What the metrics ask of the models' engines."""

    def servers() -> Iterator[ServerState]:
        for alias, model in models.items():
            for dispatcher in model.pool.dispatchers:
                for at in dispatcher.candidates:
                    yield _state(alias, at, _adapters(model.pool.adapters, at.engine), clock())

    def queues() -> Iterator[QueueState]:
        for alias, model in models.items():
            for role, one in zip(("prefill", "decode"), model.pool.dispatchers, strict=True):
                yield QueueState(alias, role, one.policy, one.choices, one.waiting, one.waited, one.waited_s)

    def retries() -> Mapping[str, int]:
        return {alias: model.pool.retried for alias, model in models.items()}

    def all_restarts() -> Mapping[str, int]:
        embedded = {name: times for model in models.values() for name, times in model.restarts().items()}
        return {**restarts(), **embedded}

    return EngineReports(servers, queues, retries, all_restarts)


def _state(alias: str, at: Candidate[ServerClient], adapters: AdapterState | None, now_s: float) -> ServerState:
    server, told = at.engine, at.reported
    return ServerState(
        alias,
        server.server.role,
        str(server.server.url),
        server.running,
        server.failures,
        server.breaker.open,
        at.in_flight.tokens,
        None if told is None else told.kv_usage,
        None if told is None else told.hit_rate,
        at.age_s(now_s),
        at.unheard,
        adapters,
    )


def _adapters(adapters: Adapters, server: ServerClient) -> AdapterState | None:
    """What happened to adapters on the server; None where the model has none."""
    if not adapters.settings.folders:
        return None
    at, counts = adapters.leases[server], adapters.leases[server].counts
    return AdapterState(len(at.loaded), at.waiting, **asdict(counts))


def load_topologies(config: Config) -> Mapping[str, Graph]:
    """Every topology that the deployment names, checked against its models. Raises ConfigError."""
    files = [file for path in config.topologies for file in _files(path)]
    found = load_files(files, models=model_names(config))
    _require_embedder(found, config)
    _require_scores(found, config)
    return found


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ConfigError(
            f"topologies: there is no file or folder {path}.",
            remedy="Correct it; a relative path counts from the configuration's folder.",
        )
    return files_in(path) if path.is_dir() else [path]


def _require_embedder(topologies: Mapping[str, Graph], config: Config) -> None:
    if config.embedder.model != "none":
        return
    for one in topologies.values():
        if one.embeds:
            what = "has classifiers" if isinstance(one, Conditional) and one.classifiers else "exits early"
            raise ConfigError(
                f"embedder.model is none, and the topology {one.name!r} {what}.",
                remedy="Set embedder.model: default, or take out of the topology what has to embed:"
                " classifiers, and early_exit with another policy than in_flight.",
            )


def _require_scores(topologies: Mapping[str, Graph], config: Config) -> None:
    asking = [one.name for one in topologies.values() if isinstance(one, Conditional) and one.scored_models]
    if asking and config.prediction.scores is None:
        raise ConfigError(
            f"prediction.scores is not set, and a rule of the topology {asking[0]!r} asks for score_below.",
            remedy="Name a folder that `shell-router train router` wrote, or remove the rule.",
        )
