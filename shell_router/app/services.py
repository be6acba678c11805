"""Start and end the objects that the API works with, together."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_cache import AgentPromptCache, CacheStats, Journals, MemoryAgentPromptCache
from agent_cache.accounts import Accounts, MemoryAccounts
from shell_router.api import ENGINE_CHECK, Services
from shell_router.api.budgets import TenantBudgets
from shell_router.api.live import LiveTopologies
from shell_router.app.fleet_changes import FleetChanges
from shell_router.app.models import RunningModel, engine_kinds, run_models
from shell_router.app.pairs import SglangPairs
from shell_router.app.rereads import Contents
from shell_router.app.topologies import live_topologies, watch_topologies
from shell_router.app.wings import Progress, RunningPredictor, StartedEngine, wing
from shell_router.config import CacheSettings, Config, EmbedderSettings, PredictionSettings
from shell_router.config.models import read_secret
from shell_router.config.settings import AccessLogSettings, RecordSettings
from shell_router.core.engine import Relay, ServedModel
from shell_router.core.predictors import Embedder, Predictor
from shell_router.engines.embedding import HashEmbedder, SentenceTransformerEmbedder
from shell_router.engines.fleet import Fleet
from shell_router.engines.metrics import EngineMetrics
from shell_router.errors import ConfigError, EngineError
from shell_router.files.read import load_document
from shell_router.moa.choosing import Auto, ModelChooser, ModelFigures
from shell_router.moa.executor import Executor
from shell_router.moa.programs import Programs
from shell_router.moa.registry import ProgramLimits
from shell_router.routing.holdout import Holdouts
from shell_router.telemetry import Metrics, TraceStore

if TYPE_CHECKING:
    from shell_router.telemetry.otlp import SpanExport
    from shell_router.telemetry.recorder import Recorder

log = logging.getLogger(__name__)

Check = Callable[[], Awaitable[bool]]

Costs = Mapping[str, Mapping[str, Any]]
"""Decode costs by model, as `shell-router profile` measures them."""


@dataclass(frozen=True, slots=True)
class RunningCache:
    """The logs in use.

    Attributes:
        healthy: Tells whether they can be shared now.
        accounts: What tenants have spent.
        stats: Counts failures.
        journals: None if nothing outlives the router.
    """

    logs: AgentPromptCache
    healthy: Check
    accounts: Accounts
    stats: CacheStats = field(default_factory=CacheStats)
    journals: Journals | None = None


@asynccontextmanager
async def open_cache(
    settings: CacheSettings, clock: Callable[[], float], environ: Mapping[str, str] = os.environ
) -> AsyncIterator[RunningCache]:
    """Open the cache.

    Raises:
        ConfigError: It needs redis-py, or a password.
    """
    if settings.backend == "memory":
        async with MemoryAgentPromptCache(clock=clock, ttl_s=settings.ttl_s) as logs:
            yield RunningCache(logs, _always, MemoryAccounts(clock))
        return
    try:
        from agent_cache.redis import RedisAgentPromptCache  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            "cache.backend is redis, and redis-py is not installed.",
            remedy="pip install 'shell-router[redis]'",
        ) from error
    options = {"password": read_secret(settings.password, "cache.password", environ)}
    if tls := settings.tls:
        # redis-py would ask the terminal for the password of an encrypted key
        tls.context("cache.tls")
        files = {"ssl_ca_certs": tls.ca, "ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
        options |= {name: str(path) for name, path in files.items() if path}
    async with RedisAgentPromptCache(
        settings.url,
        clock=clock,
        ttl_s=settings.ttl_s,
        prefix=settings.prefix,
        journal_ttl_s=settings.run_ttl_s,
        lease_s=settings.lease_s,
        options=options,
    ) as shared:
        if not await shared.healthy():
            log.warning("Redis is away: agents are cached in this router's memory meanwhile")
        yield RunningCache(shared, shared.healthy, shared.accounts, shared.stats, shared.journals)


async def _always() -> bool:
    return True


@asynccontextmanager
async def run_embedder(settings: EmbedderSettings) -> AsyncIterator[tuple[Embedder | None, Check]]:
    """Start the embedder, None without one; its model loads in the background.

    It comes with a check whether the start has ended. Raises ConfigError.
    """
    if settings.model in ("none", "hash"):
        yield HashEmbedder() if settings.model == "hash" else None, _always
        return
    model = None if settings.model == "default" else settings.model
    embedder = SentenceTransformerEmbedder(model, device=settings.device, threads=settings.threads)
    loading = asyncio.create_task(load_embedder(embedder), name="embedder-load")

    async def has_loaded() -> bool:
        return loading.done()

    try:
        yield embedder, has_loaded
    finally:
        loading.cancel()
        await asyncio.wait({loading})
        await embedder.aclose()


OUTPUT_TOKENS = 500
SLOW_JUDGEMENT_S = 5.0
"""Seconds in which a GPU writes OUTPUT_TOKENS, at 10 ms each."""


async def load_embedder(embedder: SentenceTransformerEmbedder) -> None:
    """Start the embedder, and log a failure or how slow it is.

    Each run that needs it tries again, and reports it.
    """
    clock = asyncio.get_running_loop().time
    try:
        await embedder.start()
        begun_s = clock()
        await embedder.embed("pens " * (OUTPUT_TOKENS // 10))
        output_s = 10 * (clock() - begun_s)
    except EngineError as error:
        log.error("the embedder does not answer, so no early exit: %s", error)
        return
    if output_s > SLOW_JUDGEMENT_S:
        log.warning(
            "the embedder takes about %.0f s for an output of %d tokens: most clusters end before "
            "early exit has judged them. Give it a GPU (embedder.device), more embedder.threads, "
            "or a smaller embedder.model.",
            output_s,
            OUTPUT_TOKENS,
        )


@asynccontextmanager
async def run_services(
    config: Config,
    *,
    on_progress: Progress = log.info,
    engine_restarts: Callable[[], Mapping[str, int]] = dict,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Services]:
    """Start all that `config` names, and end it on leaving, in reverse order.

    `on_progress` gets a line per step. Nothing is left running on any path.

    Raises:
        ConfigError: A file is wrong; then nothing was started.
        EngineError: An engine does not come up.
    """
    topologies, seen, costs = read_named(config)
    kinds = engine_kinds(config, {"pairs": SglangPairs(may_lack=True)})
    async with (
        run_embedder(config.embedder) as (embedder, embedder_ready),
        open_cache(config.cache, clock) as cache,
        _run_predictor(config.prediction) as predicting,
        run_models(config, on_progress, kinds) as models,
        AsyncExitStack() as stack,
    ):
        served, relays = _collect_models(models)
        engines = {alias: model.engine for alias, model in models.items()}
        batch_sizes = {alias: engine.batch_size for alias, engine in engines.items()}
        chooser = build_chooser(config, costs, served, batch_sizes, predicting.predictor, clock)
        executor = Executor(
            served, cache.logs, embedder, clock=clock, chooser=chooser, holdouts=config.holdout
        )
        metrics = _build_metrics(cache.stats)
        _register_engines(metrics, engines, engine_restarts, clock, executor.holdouts)
        fleets = {alias: at for alias, at in _fleets_of(engines).items() if alias in models}
        checks = _list_checks(fleets, {"cache": cache.healthy, "embedder": embedder_ready})
        await stack.enter_async_context(watch_topologies(config, topologies, seen, metrics))
        yield Services(
            executor=executor,
            programs=Programs(executor, ProgramLimits(ttl_s=config.cache.ttl_s)),
            topologies=topologies,
            models=served,
            fleet=FleetChanges(engines, served),
            relays=relays,
            engines={alias: engine.name for alias, engine in engines.items()},
            embedders={} if embedder is None else {config.embedder.name: embedder},
            serving=lambda: {alias: fleet.seems_up for alias, fleet in fleets.items()},
            checks={**checks, **predicting.checks},
            # requests go on from memory, and models are chosen by load
            optional_checks=("cache", *predicting.checks),
            metrics=metrics,
            recorder=_recorder("trace files", config.record, metrics, stack),
            access_log=_recorder("access log", config.access_log, metrics, stack),
            spans=_span_export(config, metrics, stack),
            traces=TraceStore(config.traces.kept, contents=config.traces.contents),
            journals=cache.journals,
            budgets=TenantBudgets(cache.accounts, time.time),
            holdouts=executor.holdouts,
            clock=clock,
        )


def _list_checks(
    fleets: Mapping[str, Fleet[Any]], others: Mapping[str, Check]
) -> Mapping[str, Check]:
    return {**{ENGINE_CHECK + name: fleet.serves for name, fleet in fleets.items()}, **others}


def _collect_models(
    models: Mapping[str, RunningModel],
) -> tuple[dict[str, ServedModel], dict[str, Relay]]:
    """Return the models and their adapters, and the relays among their engines, by name."""
    served = {alias: model.served for alias, model in models.items()}
    relays = {alias: model.engine.relay for alias, model in models.items() if model.engine.relay}
    for model in models.values():
        for adapted, relay in model.list_adapted_models():
            served[adapted.alias] = adapted
            relays[adapted.alias] = relay
    return served, relays


def _register_engines(
    metrics: Metrics,
    engines: Mapping[str, StartedEngine],
    launched_restarts: Callable[[], Mapping[str, int]],
    clock: Callable[[], float],
    holdouts: Holdouts,
) -> None:
    restarts = (launched_restarts, *(engine.restarts for engine in engines.values()))
    metrics.registry.register(
        EngineMetrics(_fleets_of(engines), restarts, clock, holdouts.comparisons)
    )
    for collector in {engine.metrics for engine in engines.values() if engine.metrics}:
        metrics.registry.register(collector)


def _fleets_of(engines: Mapping[str, StartedEngine]) -> dict[str, Fleet[Any]]:
    """Return all fleets: by model, or by number if models are swapped."""
    fleets: dict[str, Fleet[Any]] = {}
    for alias, engine in engines.items():
        fleets |= engine.shared_fleets
        if engine.fleet is not None:
            fleets[alias] = engine.fleet
    return fleets


def read_named(config: Config) -> tuple[LiveTopologies, Contents, Costs]:
    """Read the files that `config` names for the router.

    Raises:
        ConfigError: One is wrong, or the extra `otel` is missing.
    """
    if config.traces.otlp and not any(
        Distribution.discover(name="opentelemetry-exporter-otlp-proto-http")
    ):
        what = "traces.otlp is set, and OpenTelemetry's exporter is not installed."
        raise ConfigError(what, remedy="pip install 'shell-router[otel]'")
    return *live_topologies(config), _read_profile(
        config.auto.profile
    ) if config.auto.profile else {}


def _run_predictor(
    settings: PredictionSettings,
) -> AbstractAsyncContextManager[RunningPredictor]:
    """Start the trained predictors, if the deployment names any."""
    folder = settings.scores or settings.lengths
    return wing("prediction")(settings) if folder else nullcontext(RunningPredictor())


def _build_metrics(cache: CacheStats) -> Metrics:
    from shell_router.telemetry.recorder import LogLines  # noqa: PLC0415 - as below

    metrics = Metrics(cache)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogLines):
            handler.lost = metrics.log_lines_lost.inc
    return metrics


def _recorder(
    what: str, settings: AccessLogSettings, metrics: Metrics, stack: AsyncExitStack
) -> "Recorder | None":
    """Make the writer of the settings' files, if the deployment asks for them."""
    if settings.folder is None:
        return None
    from shell_router.telemetry.recorder import Recorder  # noqa: PLC0415 - rarely used

    def count(outcome: str, lines: int) -> None:
        metrics.recorded_lines.labels(outcome).inc(lines)

    prompts = isinstance(settings, RecordSettings) and settings.prompts
    recorder = Recorder(what, settings.folder, settings.max_file_bytes, count, prompts=prompts)
    stack.push_async_callback(asyncio.to_thread, recorder.close)  # it may have much to write
    return recorder


def _span_export(config: Config, metrics: Metrics, stack: AsyncExitStack) -> "SpanExport | None":
    """Make the exporter of spans, if the deployment asks for it."""
    if config.traces.otlp is None:
        return None
    from shell_router.telemetry.otlp import SpanExport  # noqa: PLC0415 - rarely used

    export = SpanExport(
        config.traces.otlp,
        lambda outcome, count: metrics.otlp_spans.labels(outcome).inc(count),
    )
    stack.push_async_callback(asyncio.to_thread, export.close)
    return export


def build_chooser(
    config: Config,
    costs: Costs,
    served: Mapping[str, ServedModel],
    batch_sizes: Mapping[str, int],
    predictor: Predictor | None,
    clock: Callable[[], float],
) -> ModelChooser:
    """Make the chooser that the deployment's `auto` describes.

    Args:
        config: The deployment.
        costs: Measured decode costs by model.
        served: The models by name.
        batch_sizes: Those of the models' engines, by alias.
        predictor: Predicts scores, if there is one.
        clock: Gives monotonic seconds.
    """
    figures = {
        name: _figures(config, model, batch_sizes[model.base or name], costs)
        for name, model in served.items()
    }
    models = config.auto.models or tuple(config.models)  # adapters only where they are named
    return ModelChooser(served, Auto(models, config.auto, figures), predictor, clock=clock)


def _figures(config: Config, model: ServedModel, batch_size: int, costs: Costs) -> ModelFigures:
    """Return the figures of a model, or of an adapter, which costs the same as its base."""
    base = model.base or model.alias
    decode = costs.get(model.alias, costs.get(base))
    batch = config.auto.max_batch.get(model.alias, config.auto.max_batch.get(base, batch_size))
    if decode is None:
        return ModelFigures(batch)
    return ModelFigures(batch, decode["step_s"] + batch * decode.get("sequence_s", 0.0))


def _read_profile(file: Path) -> Costs:
    remedy = "Name a file that `shell-router profile` wrote."
    content = load_document(file, remedy).value
    models = content.get("models") if isinstance(content, dict) else None
    measured = {}
    for name, model in models.items() if isinstance(models, dict) else ():
        decode = model.get("decode")
        if isinstance(decode, dict) and "step_s" in decode:
            measured[name] = decode
    if not measured:
        raise ConfigError(
            f"auto.profile {file} has no model's measured decode costs.", remedy=remedy
        )
    return measured
