"""Tasks whose outputs and rightness are drawn, and predictors that see them blurred."""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from shell_router.core.predictors import Forecast, Forecasts, Prospect

NORMAL = NormalDist()
STAGES = (1, 2, 4)
"""Workflows of one, two and four stages, which users choose alike (Chimera, appendix A.1)."""
MOST_TOKENS = 4096
"""Assumed: where an engine cuts a stage's output."""
ABILITY_SPREAD = 1.5
"""Assumed: how much a task's difficulty decides, in standard deviations of all else."""
DIFFICULT_IS_LONG = 0.6
"""Assumed: the correlation of difficulty and length."""


@dataclass(frozen=True, slots=True)
class Ability:
    """Mean and deviation of a workflow's output tokens, and the share of tasks that the model
    answers rightly.
    """

    tokens: float
    deviation: float
    right: float


MATH = {
    # tokens of the smallest and largest: Chimera, section 4.1; those between are assumed. Right
    # answers: MATH in Qwen2.5's technical report
    "qwen2.5-1.5b": Ability(606, 2587, 0.552),
    "qwen2.5-3b": Ability(640, 1900, 0.659),
    "qwen2.5-7b": Ability(680, 1100, 0.755),
    "qwen2.5-14b": Ability(709, 715, 0.800),
}
APPS = {
    # as above; the paper shows right answers, which are shares of tests passed, in a picture only:
    # assumed, near the 21 to 24 % that section 4.3 gives for vLLM on 1.5B and 7B
    "qwen2.5-1.5b": Ability(447, 1276, 0.12),
    "qwen2.5-3b": Ability(510, 1000, 0.20),
    "qwen2.5-7b": Ability(580, 760, 0.38),
    "qwen2.5-14b": Ability(649, 534, 0.44),
}


@dataclass(frozen=True, slots=True)
class Task:
    """Per model the tokens of each stage, the chance of a right answer as the difficulty gives it,
    and the answer.
    """

    tokens: Mapping[str, tuple[int, ...]]
    chance: Mapping[str, float]
    right: Mapping[str, bool]

    @property
    def stages(self) -> int:
        """How many its workflow has."""
        return len(next(iter(self.tokens.values())))


def tasks(number: int, abilities: Mapping[str, Ability], seed: int) -> list[Task]:
    """`number` tasks for models of these abilities; equal seeds give equal ones."""
    draws = random.Random(f"{seed}/tasks")
    return [_task(abilities, draws) for _ in range(number)]


def _task(abilities: Mapping[str, Ability], draws: random.Random) -> Task:
    difficulty, stages = draws.gauss(), draws.choice(STAGES)
    chance = {name: _chance(one.right, difficulty) for name, one in abilities.items()}
    tokens = {
        name: tuple(_tokens(one, difficulty, draws) for _ in range(stages))
        for name, one in abilities.items()
    }
    return Task(tokens, chance, {name: draws.random() < chance[name] for name in abilities})


def _chance(right: float, difficulty: float) -> float:
    """Such that the mean over all difficulties is `right`."""
    middle = NORMAL.inv_cdf(right) * math.sqrt(1 + ABILITY_SPREAD**2)
    return NORMAL.cdf(middle - ABILITY_SPREAD * difficulty)


def _tokens(ability: Ability, difficulty: float, draws: random.Random) -> int:
    """Log-normal; a workflow's mean is shared out over the mean number of stages."""
    variance = math.log(1 + (ability.deviation / ability.tokens) ** 2)
    normal = DIFFICULT_IS_LONG * difficulty + math.sqrt(1 - DIFFICULT_IS_LONG**2) * draws.gauss()
    mean = ability.tokens / (sum(STAGES) / len(STAGES))
    drawn = mean * math.exp(math.sqrt(variance) * normal - variance / 2)
    return max(8, min(MOST_TOKENS, round(drawn)))


@dataclass(frozen=True, slots=True)
class Blur:
    """How far predictions are off: in deviations of a probit, and of a logarithm of tokens. None
    predicts nothing.

    With `whole` lengths are of all that remains of a program, without it of the stage alone. `flat`
    counts an agent as one, whatever it writes. A prediction takes `cost_s`.
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
