"""Predictors that know what will happen, and blur it until they are about as good as the paper's."""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from choosing.tasks import Task
from shell_router.core.prediction import Forecast, Forecasts, Prospect

NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Blur:
    """How far predictions are off: in deviations of a probit, and of a logarithm of tokens. None predicts nothing.

    With `whole` lengths are of all that remains of a program, without it of the stage alone. `flat` counts an agent as
    one, whatever it writes. A prediction takes `cost_s`.
    """

    scores: float | None = 0.0
    lengths: float | None = 0.0
    whole: bool = True
    flat: bool = False
    oracle_scores: bool = False
    cost_s: float = 0.0


class Foreseen:
    """See `core.prediction.Predictor`. A question begins with its task's number."""

    def __init__(self, tasks: Sequence[Task], blur: Blur, seed: int) -> None:
        self._tasks = tasks
        self._blur = blur
        self._seed = seed

    async def forecast(self, prospects: Sequence[Prospect]) -> Forecasts:
        """What becomes of each, as far as the blur lets see."""
        if self._blur.cost_s:
            await asyncio.sleep(self._blur.cost_s)
        return Forecasts([self.of(one) for one in prospects])

    def of(self, prospect: Prospect) -> Forecast:
        """Of one."""
        number, stage = int(prospect.user.split()[0]), int(prospect.stage)
        task = self._tasks[number]
        scores = self.scores(number, task, prospect.models) if prospect.scored else {}
        own, total = {}, {}
        for model in prospect.models:
            own[model], total[model] = self.lengths(number, task, model, stage)
        return Forecast(scores, own, total) if self._blur.lengths is not None else Forecast(scores)

    def scores(self, number: int, task: Task, models: Sequence[str]) -> Mapping[str, float]:
        """q[m]; an oracle's is 1 where the answer will be right, else 0."""
        if self._blur.scores is None:
            return {}
        if self._blur.oracle_scores:
            return {model: float(task.right[model]) for model in models}
        return {model: self._blurred_score(number, model, task.chance[model]) for model in models}

    def _blurred_score(self, number: int, model: str, chance: float) -> float:
        draws = random.Random(f"{self._seed}/score/{number}/{model}")
        sure = min(1 - 1e-9, max(1e-9, chance))
        return NORMAL.cdf(NORMAL.inv_cdf(sure) + (self._blur.scores or 0.0) * draws.gauss())

    def lengths(self, number: int, task: Task, model: str, stage: int) -> tuple[float, float]:
        """Tokens of the stage, and those that decide whose turn it is."""
        if self._blur.flat:
            return 1.0, 1.0
        draws = random.Random(f"{self._seed}/length/{number}/{model}/{stage}")
        wrong = math.exp((self._blur.lengths or 0.0) * draws.gauss())
        own = task.tokens[model][stage - 1] * wrong
        return own, sum(task.tokens[model][stage - 1 :]) * wrong if self._blur.whole else own
