"""Predictors (Chimera, 3.8), each in a process of its own, asked in batches within a limit."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from shell_router.app.wings import RunningPredictor
from shell_router.config import PredictionSettings
from shell_router.core.predictors import Forecast, Forecasts, Prediction, Prospect
from shell_router.errors import ConfigError, EngineError
from shell_router.prediction.files import FILES
from shell_router.processes.worker import WorkerLimits, WorkerProcess

log = logging.getLogger(__name__)

Answers = Sequence[Mapping[str, Mapping[str, float]]]
"""The predictions per prospect, by kind ("scores", "own_tokens", "total_tokens") and model."""

MAX_BATCH = 32
HANG_S = 20.0
"""A process silent for this time is killed; until then its calls end at their own limit."""


class PredictionService(WorkerProcess):
    """A predictor's process. Raises ConfigError if `folder` holds no predictor of this `kind`."""

    def __init__(
        self,
        kind: Prediction,
        folder: Path,
        settings: PredictionSettings,
        *,
        hang_s: float = HANG_S,
    ) -> None:
        description, _ = FILES[kind]
        if not (folder / description).is_file():
            command = "router" if kind == "scores" else "lengths"
            raise ConfigError(
                f"prediction.{kind}: {folder} holds no {description}.",
                remedy=f"Name a folder that `shell-router train {command}` wrote.",
            )
        self.kind = kind
        self._limit_s = settings.limit_s
        arguments = {
            "kind": kind,
            "folder": str(folder),
            "device": settings.device,
            "threads": settings.threads,
        }
        super().__init__(
            f"{kind} predicting",
            "shell_router.prediction.process:predictor_work",
            arguments,
            max_batch=MAX_BATCH,
            threads=settings.threads,
            limits=WorkerLimits(settings.limit_s, hang_s=hang_s),
        )

    async def answers(self) -> bool:
        """Return whether the process runs and is ready."""
        return self.pid is not None

    async def predict(
        self, prospects: Sequence[Prospect], trouble: dict[Prediction, str]
    ) -> Answers:
        """Return one answer per prospect; empty ones, and an entry in `trouble`, after `limit_s`.

        The limit includes a start of the process.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                answers: Answers = await self.ask(prospects)
                return answers
        except EngineError as error:
            trouble[self.kind] = str(error)
        except TimeoutError:
            trouble[self.kind] = "not ready, or too slow for prediction.limit_s"
        return [{} for _ in prospects]

    async def load(self) -> None:
        """Start, and log a failed start; each choice reports it, and it is tried again later."""
        try:
            await self.start()
        except EngineError as error:
            log.error("no predicted %s: %s", self.kind, error)


class Predictions:
    """Both services, asked at the same time; either may be missing, slow or dead.

    See `core.predictors.Predictor`.
    """

    def __init__(self, scores: PredictionService | None, lengths: PredictionService | None) -> None:
        self._scores = scores
        self._lengths = lengths

    async def forecast(self, prospects: Sequence[Prospect]) -> Forecasts:
        """Forecast each prospect; see `Predictor.forecast`."""
        trouble: dict[Prediction, str] = {}

        async def ask(service: PredictionService | None, some: Sequence[Prospect]) -> Answers:
            if service and some:
                return await service.predict(some, trouble)
            return [{} for _ in some]

        scored = [prospect for prospect in prospects if prospect.scored]
        score_answers, length_answers = await asyncio.gather(
            ask(self._scores, scored), ask(self._lengths, prospects)
        )
        remaining_scores = iter(score_answers)
        forecasts = []
        for prospect, lengths in zip(prospects, length_answers, strict=True):
            scores = next(remaining_scores) if prospect.scored else {}
            forecasts.append(
                Forecast(
                    scores.get("scores", {}),
                    lengths.get("own_tokens", {}),
                    lengths.get("total_tokens", {}),
                )
            )
        return Forecasts(forecasts, trouble)


@asynccontextmanager
async def run_predictor(settings: PredictionSettings) -> AsyncIterator[RunningPredictor]:
    """Run the trained predictors, each in its process; they load in the background.

    Raises ConfigError for a folder that holds none.
    """
    folders: Mapping[Prediction, Path | None] = {
        "scores": settings.scores,
        "lengths": settings.lengths,
    }
    services = {
        kind: PredictionService(kind, folder, settings)
        for kind, folder in folders.items()
        if folder
    }
    loading = [
        asyncio.create_task(service.load(), name=f"{kind}-load")
        for kind, service in services.items()
    ]
    try:
        checks = {f"predicted {kind}": service.answers for kind, service in services.items()}
        yield RunningPredictor(Predictions(services.get("scores"), services.get("lengths")), checks)
    finally:
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        for service in services.values():
            await service.aclose()
