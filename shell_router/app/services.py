"""Everything the API works with, started and ended together."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import yaml

from shell_router.api import ENGINE_CHECK, Services
from shell_router.app.models import Fleet, SglangPairs, adapted_models, running_models
from shell_router.app.resources import running_cache, running_embedder
from shell_router.app.topologies import live_topologies, watched
from shell_router.app.wings import RunningPredictor, wing
from shell_router.config import Config, PredictionSettings
from shell_router.config.settings import AccessLogSettings, RecordSettings
from shell_router.core.engine import Relay, ServedModel
from shell_router.core.predictors import Predictor
from shell_router.engines.metrics import EngineMetrics
from shell_router.errors import ConfigError
from shell_router.moa.choosing import Auto, ModelChooser, ModelFigures
from shell_router.moa.executor import Executor
from shell_router.moa.programs import Programs
from shell_router.moa.steps import StepExecutor
from shell_router.telemetry import Metrics, TraceStore

if TYPE_CHECKING:
    from shell_router.telemetry.otlp import SpanExport
    from shell_router.telemetry.recorder import Recorder

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
        batch_sizes = {alias: model.engine.batch_size for alias, model in models.items()}
        chooser = chooser_of(config, served, batch_sizes, predicting.predictor, clock)
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
            recorder=_closed_by(stack, _recorder(config.record, metrics)),
            access_log=_closed_by(stack, _recorder(config.access_log, metrics)),
            spans=_closed_by(stack, _span_export(config, metrics)),
            traces=TraceStore(config.traces.kept),
            journals=cache.journals,
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


class _Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closable)


def _closed_by(stack: AsyncExitStack, made: C | None) -> C | None:
    """What was made; it is closed with the stack, on a thread, as it may have much to write."""
    if made is not None:
        stack.push_async_callback(asyncio.to_thread, made.close)
    return made


def _recorder(settings: RecordSettings | AccessLogSettings, metrics: Metrics) -> "Recorder | None":
    """What writes the settings' files, where the deployment asks for them."""
    if settings.folder is None:
        return None
    from shell_router.telemetry.recorder import Recorder, RecordTo  # noqa: PLC0415 - most deployments write no files

    prompts = isinstance(settings, RecordSettings) and settings.prompts
    to = RecordTo(settings.folder, prompts, settings.max_file_bytes)
    return Recorder(to, lambda outcome, lines: metrics.recorded_lines.labels(outcome).inc(lines))


def _span_export(config: Config, metrics: Metrics) -> "SpanExport | None":
    """What exports spans, where the deployment asks for them. Raises ConfigError without the extra."""
    if config.traces.otlp is None:
        return None
    from shell_router.telemetry.otlp import SpanExport  # noqa: PLC0415 - most deployments export none

    return SpanExport(config.traces.otlp, lambda outcome, count: metrics.otlp_spans.labels(outcome).inc(count))


def chooser_of(
    config: Config,
    served: Mapping[str, ServedModel],
    batch_sizes: Mapping[str, int],
    predictor: Predictor | None,
    clock: Callable[[], float],
) -> ModelChooser:
    """The chooser that the deployment's `auto` describes; `batch_sizes` are those of the models' engines, by alias.

    Raises ConfigError for a profile that does not fit.
    """
    costs = _profiled(config.auto.profile) if config.auto.profile else {}
    figures = {name: _figures(config, model, batch_sizes[model.base or name], costs) for name, model in served.items()}
    models = config.auto.models or tuple(config.models)  # adapters only where they are named
    return ModelChooser(served, Auto(models, config.auto, figures), predictor, clock=clock)


def _figures(
    config: Config, model: ServedModel, batch_size: int, costs: Mapping[str, Mapping[str, Any]]
) -> ModelFigures:
    """Of a model, or of an adapter, which costs what its base costs."""
    base = model.base or model.alias
    decode = costs.get(model.alias, costs.get(base))
    batch = config.auto.max_batch.get(model.alias, config.auto.max_batch.get(base, batch_size))
    if decode is None:
        return ModelFigures(batch)
    return ModelFigures(batch, decode["step_s"] + batch * decode.get("sequence_s", 0.0))


def _profiled(file: Path) -> Mapping[str, Mapping[str, Any]]:
    """Per model what a file of `shell-router profile` says of its decoding."""
    remedy = "Name a file that `shell-router profile` wrote."
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"auto.profile {file} cannot be read: {error}.", remedy=remedy) from error
    models = found.get("models") if isinstance(found, dict) else None
    costs = {name: one.get("decode") for name, one in models.items()} if isinstance(models, dict) else {}
    measured = {name: one for name, one in costs.items() if isinstance(one, dict) and "step_s" in one}
    if not measured:
        raise ConfigError(f"auto.profile {file} has no model's measured decode costs.", remedy=remedy)
    return measured
