"""Who chooses models for `auto`, and who is asked what to expect."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from shell_router.config import Config
from shell_router.config.settings import AccessLogSettings, RecordSettings
from shell_router.core.engine import ServedModel
from shell_router.core.predictors import Predictor
from shell_router.errors import ConfigError
from shell_router.moa.choosing import Auto, ModelChooser, ModelFigures
from shell_router.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from shell_router.telemetry.otlp import SpanExport
    from shell_router.telemetry.recorder import Recorder

log = logging.getLogger(__name__)


@asynccontextmanager
async def running_recorder(
    settings: RecordSettings | AccessLogSettings, metrics: Metrics
) -> AsyncIterator["Recorder | None"]:
    """What writes the settings' files, where the deployment asks for them."""
    if settings.folder is None:
        yield None
        return
    from shell_router.telemetry.recorder import Recorder, RecordTo  # noqa: PLC0415 - most deployments write no files

    prompts = isinstance(settings, RecordSettings) and settings.prompts
    to = RecordTo(settings.folder, prompts, settings.max_file_bytes)
    recorder = Recorder(to, lambda outcome, lines: metrics.recorded_lines.labels(outcome).inc(lines))
    try:
        yield recorder
    finally:
        await asyncio.to_thread(recorder.close)


@asynccontextmanager
async def running_spans(config: Config, metrics: Metrics) -> AsyncIterator["SpanExport | None"]:
    """What exports spans, where the deployment asks for them. Raises ConfigError without the extra."""
    if config.traces.otlp is None:
        yield None
        return
    from shell_router.telemetry.otlp import SpanExport  # noqa: PLC0415 - most deployments export none

    spans = SpanExport(config.traces.otlp, lambda outcome, count: metrics.otlp_spans.labels(outcome).inc(count))
    try:
        yield spans
    finally:
        await asyncio.to_thread(spans.close)


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
