"""Everything the API works with, started and ended together."""

import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from shell_router.api import Services
from shell_router.app.choosing import chooser_of, running_recorder
from shell_router.app.model_files import model_names
from shell_router.app.models import adapted_models, running_models
from shell_router.app.resources import running_cache, running_embedder
from shell_router.app.wings import RunningPredictor, wing
from shell_router.config import Config, PredictionSettings
from shell_router.core.engine import Relay
from shell_router.engines.metrics import EngineMetrics
from shell_router.errors import ConfigError
from shell_router.moa import Classes, Executor, Programs, Scores, StepExecutor
from shell_router.telemetry import Metrics, TraceStore
from shell_router.topology import Conditional, Graph, files_in, load_files

log = logging.getLogger(__name__)


@asynccontextmanager
async def running_services(
    config: Config,
    *,
    on_progress: Callable[[str], None] = log.info,
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
        _running_predictor(config.prediction) as predicting,
        running_models(config, on_progress) as models,
        AsyncExitStack() as stack,
    ):
        pools = {alias: model.pool for alias, model in models.items() if model.pool}
        adapted = {
            name: one
            for alias, pool in pools.items()
            for name, one in adapted_models(models[alias].served, pool).items()
        }
        served = {alias: model.served for alias, model in models.items()}
        served |= {name: model for name, (model, _) in adapted.items()}
        relays: dict[str, Relay] = {**pools, **{name: relay for name, (_, relay) in adapted.items()}}
        batch_sizes = {alias: model.engine.batch_size for alias, model in models.items()}
        chooser = chooser_of(config, served, batch_sizes, predicting.predictor, clock)
        agents = Executor(served, cache.logs, embedding.embedder, clock=clock, chooser=chooser, holdouts=config.holdout)
        metrics = Metrics(cache_degraded=cache.degraded)

        def restarts() -> Mapping[str, int]:
            own = {name: times for model in models.values() for name, times in model.engine.restarts().items()}
            return {**engine_restarts(), **own}

        metrics.registry.register(EngineMetrics(pools, restarts, clock, agents.holdouts.comparisons))
        yield Services(
            executor=StepExecutor(agents, Classes(embedding.embedder), Scores(chooser, served), clock=clock),
            programs=Programs(served, cache.logs, clock=clock, chooser=chooser, holdouts=agents.holdouts),
            topologies=topologies,
            models=served,
            relays=relays,
            engines={alias: model.engine.name for alias, model in models.items()},
            checks={
                **{f"engine {alias}": pool.serves for alias, pool in pools.items()},
                "cache": cache.healthy,
                "embedder": embedding.loaded,
                **predicting.checks,
            },
            # without them requests go on: from memory, and with models chosen by load alone
            optional_checks=("cache", *predicting.checks),
            metrics=metrics,
            recorder=await stack.enter_async_context(running_recorder(config, metrics)),
            traces=TraceStore(config.traces.kept),
            holdouts=agents.holdouts,
            clock=clock,
        )


@asynccontextmanager
async def _running_predictor(settings: PredictionSettings) -> AsyncIterator[RunningPredictor]:
    """The trained predictors, where the deployment names any."""
    if settings.scores is None and settings.lengths is None:
        yield RunningPredictor()
        return
    async with wing("prediction")(settings) as running:
        yield running


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
