"""Everything the API works with, started and ended together."""

import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain

from shell_router.api import ENGINE_CHECK, Services
from shell_router.app.choosing import chooser_of, running_recorder, running_spans
from shell_router.app.models import Fleet, RunningModel, SglangPairs, adapted_models, running_models
from shell_router.app.resources import running_cache, running_embedder
from shell_router.app.topologies import live_topologies, watched
from shell_router.app.wings import RunningPredictor, wing
from shell_router.config import Config, PredictionSettings
from shell_router.core.engine import Relay
from shell_router.engines.metrics import EngineMetrics
from shell_router.moa.executor import Executor
from shell_router.moa.programs import Programs
from shell_router.moa.steps import StepExecutor
from shell_router.telemetry import Metrics, TraceStore

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
    (topologies, seen), clock = live_topologies(config), time.monotonic
    async with (
        running_embedder(config.embedder) as embedding,
        running_cache(config.cache, clock) as cache,
        _running_predictor(config.prediction) as predicting,
        running_models(config, on_progress, {"pairs": SglangPairs(may_lack=True)}) as models,
        AsyncExitStack() as stack,
    ):
        pools = {alias: model.pool for alias, model in models.items() if model.pool}
        found = (adapted_models(models[alias].served, pool).items() for alias, pool in pools.items())
        adapted = dict(chain.from_iterable(found))
        served = {name: one.served for name, one in models.items()} | {name: one for name, (one, _) in adapted.items()}
        relays: dict[str, Relay] = {**pools, **{name: relay for name, (_, relay) in adapted.items()}}
        chooser = chooser_of(config, served, _batch_sizes(models), predicting.predictor, clock)
        agents = Executor(served, cache.logs, embedding.embedder, clock=clock, chooser=chooser, holdouts=config.holdout)
        metrics = Metrics(cache_degraded=cache.degraded)
        serve = {ENGINE_CHECK + alias: pool.serves for alias, pool in pools.items()}

        def restarts() -> Mapping[str, int]:
            own = {name: times for model in models.values() for name, times in model.engine.restarts().items()}
            return {**engine_restarts(), **own}

        swapping = {model.engine.leases for model in models.values() if model.engine.leases}
        metrics.registry.register(EngineMetrics(pools, restarts, clock, agents.holdouts.comparisons, swapping))
        await stack.enter_async_context(watched(config, topologies, seen, metrics))
        yield Services(
            executor=StepExecutor(agents),
            programs=Programs(served, cache.logs, clock=clock, chooser=chooser, holdouts=agents.holdouts),
            topologies=topologies,
            models=served,
            fleet=Fleet(config.models, pools, served),
            relays=relays,
            engines={alias: model.engine.name for alias, model in models.items()},
            embedders={} if embedding.embedder is None else {config.embedder.name: embedding.embedder},
            serving=lambda: {alias: pool.seems_up for alias, pool in pools.items()},
            checks={**serve, "cache": cache.healthy, "embedder": embedding.loaded, **predicting.checks},
            optional_checks=("cache", *predicting.checks),  # requests go on from memory, and models are chosen by load
            metrics=metrics,
            recorder=await stack.enter_async_context(running_recorder(config.record, metrics)),
            access_log=await stack.enter_async_context(running_recorder(config.access_log, metrics)),
            spans=await stack.enter_async_context(running_spans(config, metrics)),
            traces=TraceStore(config.traces.kept),
            journals=cache.journals,
            holdouts=agents.holdouts,
            clock=clock,
        )


def _batch_sizes(models: Mapping[str, RunningModel]) -> Mapping[str, int]:
    return {alias: model.engine.batch_size for alias, model in models.items()}


@asynccontextmanager
async def _running_predictor(settings: PredictionSettings) -> AsyncIterator[RunningPredictor]:
    """The trained predictors, where the deployment names any."""
    if settings.scores is None and settings.lengths is None:
        yield RunningPredictor()
        return
    async with wing("prediction")(settings) as running:
        yield running
