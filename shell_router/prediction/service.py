"""The router's side of the predictors: each a process of its own, asked in batches, given up at a limit (3.8)."""

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shell_router.core.prediction import Forecast, Forecasts, Prediction, Prospect
from shell_router.errors import ConfigError, EngineError
from shell_router.prediction.wire import Answers, packed_prospects, unpacked_answers
from shell_router.side_process import ProcessLimits, SideProcess

HANG_S = 20.0
"""A process that owes an answer for so long is killed and started anew; until then its calls end at their limit."""
DESCRIPTIONS = {"scores": "router.json", "lengths": "lengths.json"}
"""The file that a folder of each kind holds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Most seconds for a call; how long a batch gathers and how large it gets; where the models run."""

    call_s: float = 0.2
    gather_s: float = 0.002
    max_batch: int = 32
    device: str = "cpu"
    threads: int = 1


class PredictionService:
    """One predictor's process. Raises ConfigError where `folder` holds no predictor of this `kind`."""

    def __init__(self, kind: Prediction, folder: Path, limits: Limits) -> None:
        if not (folder / DESCRIPTIONS[kind]).is_file():
            command = "router" if kind == "scores" else "lengths"
            raise ConfigError(
                f"prediction.{kind}: {folder} holds no {DESCRIPTIONS[kind]}.",
                remedy=f"Name a folder that `shell-router train {command}` wrote.",
            )
        self.kind = kind
        self._call_s = limits.call_s
        command_line = [sys.executable, "-m", "shell_router.prediction.process", kind, str(folder)]
        command_line += ["--device", limits.device, "--threads", str(limits.threads)]
        command_line += ["--max-batch", str(limits.max_batch), "--gather-s", str(limits.gather_s)]
        self._process = SideProcess(
            f"{kind} predicting",
            command_line,
            _environment(limits.threads),
            ProcessLimits(limits.call_s, hang_s=HANG_S),
        )

    @property
    def pid(self) -> int | None:
        """The running process's id."""
        return self._process.pid

    async def start(self) -> None:
        """Start the process and wait until its model is loaded. EngineError if it cannot be."""
        await self._process.start()

    async def answers(self) -> bool:
        """Whether the process is there and ready."""
        return self._process.pid is not None

    async def ask(self, prospects: Sequence[Prospect]) -> Answers:
        """One answer per prospect. EngineError, or TimeoutError at the limit, which counts a start, too."""
        async with asyncio.timeout(self._call_s):
            return unpacked_answers(await self._process.ask(packed_prospects(prospects)))

    async def aclose(self) -> None:
        """End the process."""
        await self._process.aclose()


def _environment(threads: int) -> dict[str, str]:
    count = str(threads)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **offline, "OMP_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count}


class Predictions:
    """Asks both services at the same time (core.prediction.Predictor); either may be missing, slow or dead."""

    def __init__(self, scores: PredictionService | None, lengths: PredictionService | None) -> None:
        self._scores = scores
        self._lengths = lengths

    async def forecast(self, prospects: Sequence[Prospect]) -> Forecasts:
        """See `Predictor.forecast`."""
        trouble: dict[Prediction, str] = {}
        scored = [one for one in prospects if one.scored]
        scores, lengths = await asyncio.gather(
            _asked(self._scores, scored, trouble), _asked(self._lengths, prospects, trouble)
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


async def _asked(
    service: PredictionService | None, prospects: Sequence[Prospect], trouble: dict[Prediction, str]
) -> Answers:
    nothing: Answers = [{} for _ in prospects]
    if service is None or not prospects:
        return nothing
    try:
        return await service.ask(prospects)
    except EngineError as error:
        trouble[service.kind] = str(error)
    except TimeoutError:
        trouble[service.kind] = "not ready, or too slow for prediction.limit_s"
    return nothing
