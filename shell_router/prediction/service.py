"""The router's side of predictors: each in a process of its own, asked in batches within a limit
(Chimera, 3.8).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import orjson

from shell_router.app.wings import RunningPredictor
from shell_router.config import PredictionSettings
from shell_router.core.predictors import Forecast, Forecasts, Prediction, Prospect
from shell_router.errors import ConfigError, EngineError
from shell_router.launching.side_process import (
    ProcessLimits,
    SideProcess,
    side_command,
    side_environment,
)
from shell_router.prediction.files import FILES

log = logging.getLogger(__name__)

Answers = Sequence[Mapping[str, Mapping[str, float]]]
"""Per prospect, by kind ("scores", "own_tokens", "total_tokens"), per model."""

MAX_BATCH = 32
"""Requests that came while an earlier batch was answered are the next, MAX_BATCH at most."""
HANG_S = 20.0
"""A process that has not answered for this time is killed and started anew; until then its calls
end at their limit.
"""


class PredictionService(SideProcess):
    """One predictor's process. Raises ConfigError where `folder` holds no predictor of this
    `kind`."""

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
            side_command("shell_router.prediction.process:predictor", arguments, MAX_BATCH),
            side_environment(settings.threads),
            ProcessLimits(settings.limit_s, hang_s=hang_s),
        )

    async def answers(self) -> bool:
        """Whether the process is there and ready."""
        return self.pid is not None

    async def predict(
        self, prospects: Sequence[Prospect], trouble: dict[Prediction, str]
    ) -> Answers:
        """One answer per prospect; where none comes in time, which counts a start, too, empty ones,
        and `trouble`.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                found: Answers = orjson.loads(
                    await self.ask(orjson.dumps([asdict(one) for one in prospects]))
                )
                return found
        except EngineError as error:
            trouble[self.kind] = str(error)
        except TimeoutError:
            trouble[self.kind] = "not ready, or too slow for prediction.limit_s"
        return [{} for _ in prospects]

    async def load(self) -> None:
        """Start, and log a failed start; each choice reports it again, and it is tried again after
        a while.
        """
        try:
            await self.start()
        except EngineError as error:
            log.error("no predicted %s: %s", self.kind, error)


class Predictions:
    """Asks both services at the same time (see `core.predictors.Predictor`); either may be missing,
    slow or dead.
    """

    def __init__(self, scores: PredictionService | None, lengths: PredictionService | None) -> None:
        self._scores = scores
        self._lengths = lengths

    async def forecast(self, prospects: Sequence[Prospect]) -> Forecasts:
        """See `Predictor.forecast`."""
        trouble: dict[Prediction, str] = {}

        async def asked(service: PredictionService | None, some: Sequence[Prospect]) -> Answers:
            if service and some:
                return await service.predict(some, trouble)
            return [{} for _ in some]

        scored = [one for one in prospects if one.scored]
        scores, lengths = await asyncio.gather(
            asked(self._scores, scored), asked(self._lengths, prospects)
        )
        of_scored = iter(scores)
        each = [
            Forecast(
                next(of_scored).get("scores", {}) if one.scored else {},
                length.get("own_tokens", {}),
                length.get("total_tokens", {}),
            )
            for one, length in zip(prospects, lengths, strict=True)
        ]
        return Forecasts(each, trouble)


@asynccontextmanager
async def running_predictor(settings: PredictionSettings) -> AsyncIterator[RunningPredictor]:
    """The trained predictors while the context is open, each in its process; they load in the
    background.

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
        asyncio.create_task(one.load(), name=f"{kind}-load") for kind, one in services.items()
    ]
    try:
        checks = {f"predicted {kind}": one.answers for kind, one in services.items()}
        yield RunningPredictor(Predictions(services.get("scores"), services.get("lengths")), checks)
    finally:
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        for service in services.values():
            await service.aclose()
