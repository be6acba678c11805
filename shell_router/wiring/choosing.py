"""Who chooses models for `auto`, and who is asked what to expect."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shell_router.config import Config, EmbeddedSection, PredictionSettings
from shell_router.core.model import ServedModel
from shell_router.core.prediction import Prediction, Predictor
from shell_router.errors import ConfigError, EngineError
from shell_router.execution import Auto, ModelChooser, ModelFigures
from shell_router.prediction.service import Limits, Predictions, PredictionService
from shell_router.telemetry import Recorder, RecordTo
from shell_router.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

UNKNOWN_BATCH = 32
"""Sequences that an SGLang engine decodes at once, where nobody says."""


@dataclass(frozen=True, slots=True)
class RunningPredictor:
    """The predictor, None where there is none, and per service whether it can be asked."""

    predictor: Predictor | None = None
    checks: Mapping[str, Callable[[], Awaitable[bool]]] = field(default_factory=dict)


@asynccontextmanager
async def running_predictor(settings: PredictionSettings) -> AsyncIterator[RunningPredictor]:
    """The trained predictors while the context is open, each in its process; they load in the background.

    Raises ConfigError for a folder that holds none.
    """
    limits = Limits(settings.limit_s, settings.gather_s, settings.max_batch, settings.device, settings.threads)
    folders: Mapping[Prediction, Path | None] = {"scores": settings.scores, "lengths": settings.lengths}
    services = {kind: PredictionService(kind, folder, limits) for kind, folder in folders.items() if folder is not None}
    if not services:
        yield RunningPredictor()
        return
    loading = [asyncio.create_task(_load(one), name=f"{kind}-load") for kind, one in services.items()]
    try:
        checks = {f"predicted {kind}": one.answers for kind, one in services.items()}
        yield RunningPredictor(Predictions(services.get("scores"), services.get("lengths")), checks)
    finally:
        for task in loading:
            task.cancel()
        await asyncio.wait(loading)
        for service in services.values():
            await service.aclose()


async def _load(service: PredictionService) -> None:
    """A failed start is told here and again by each choice; it is tried again after a while."""
    try:
        await service.start()
    except EngineError as error:
        log.error("no predicted %s: %s", service.kind, error)


@asynccontextmanager
async def running_recorder(config: Config, metrics: Metrics) -> AsyncIterator[Recorder | None]:
    """What writes trace files, where the deployment asks for them."""
    settings = config.record
    if settings.folder is None:
        yield None
        return
    to = RecordTo(settings.folder, settings.prompts, settings.max_file_bytes)
    recorder = Recorder(to, lambda outcome, lines: metrics.recorded_lines.labels(outcome).inc(lines))
    try:
        yield recorder
    finally:
        await asyncio.to_thread(recorder.close)


def chooser_of(
    config: Config, served: Mapping[str, ServedModel], predictor: Predictor | None, clock: Callable[[], float]
) -> ModelChooser:
    """As the deployment's `auto` says. Raises ConfigError for a profile that does not fit."""
    costs = _profiled(config.auto.profile) if config.auto.profile else {}
    figures = {name: _figures(config, name, model.base or name, costs) for name, model in served.items()}
    models = config.auto.models or tuple(config.models)  # adapters only where they are named
    return ModelChooser(served, Auto(models, config.auto.choice(), figures), predictor, clock=clock)


def _figures(config: Config, name: str, base: str, costs: Mapping[str, Mapping[str, Any]]) -> ModelFigures:
    """Of a model, or of an adapter, which costs what its base costs."""
    model, decode = config.models[base], costs.get(name, costs.get(base))
    own = UNKNOWN_BATCH if model.pairs else (model.embedded or EmbeddedSection()).max_running_requests
    batch = config.auto.max_batch.get(name, config.auto.max_batch.get(base, own))
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
        raise ConfigError(f"auto.profile {file} tells no model's measured decode costs.", remedy=remedy)
    return measured
