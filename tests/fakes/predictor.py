"""A predictor that says what it is told to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shell_router.core.prediction import Forecast, Forecasts, Prediction, Prospect


@dataclass
class ToldPredictor:
    """Tells the same of every prospect, and keeps what it was asked."""

    scores: Mapping[str, float] = field(default_factory=dict)
    own_tokens: Mapping[str, float] = field(default_factory=dict)
    total_tokens: Mapping[str, float] = field(default_factory=dict)
    trouble: Mapping[Prediction, str] = field(default_factory=dict)
    asked: list[Prospect] = field(default_factory=list)

    async def forecast(self, prospects: Sequence[Prospect]) -> Forecasts:
        self.asked += prospects
        told = [Forecast(self.scores if one.scored else {}, self.own_tokens, self.total_tokens) for one in prospects]
        return Forecasts(told, self.trouble)
