"""Chooses models for agents that name several: asks the predictors, looks at the load, and tells what was decided."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shell_router.core.events import Degraded, Event, ModelChosen
from shell_router.core.model import ServedModel
from shell_router.core.prediction import Forecast, Predictor, Prospect
from shell_router.errors import UnknownModel
from shell_router.execution.activity import Activity
from shell_router.execution.pace import Pace
from shell_router.scheduling.model_choice import (
    Candidate,
    ModelChoice,
    ModelChoiceSettings,
    choose_model,
    scores_decide,
)

log = logging.getLogger(__name__)

Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """A model's Pi (Algorithm 1, line 11). Without `decode_s_per_token` the router measures it as it goes."""

    max_batch: int = 32
    decode_s_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class Auto:
    """What `auto` stands for, all models where `models` is empty, and how the choice is made."""

    models: tuple[str, ...] = ()
    settings: ModelChoiceSettings = field(default_factory=ModelChoiceSettings)
    figures: Mapping[str, ModelFigures] = field(default_factory=dict)


class ModelChooser:
    """Chooses by `auto`. `activity` is what it reads the load from; its users enter what they run."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        auto: Auto | None = None,
        predictor: Predictor | None = None,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._models = models
        self._auto = auto or Auto()
        self._predictor = predictor
        self._clock = clock
        self._turns = 0
        self.activity = Activity()
        self.pace = Pace()

    @property
    def predicts(self) -> bool:
        """Whether anybody is asked what to expect."""
        return self._predictor is not None

    def now_s(self) -> float:
        """The runs' clock."""
        return self._clock()

    def candidates(self, named: tuple[str, ...]) -> tuple[str, ...]:
        """The models that `named` stands for; none of them means `auto`. Raises UnknownModel."""
        candidates = named or self._auto.models or tuple(self._models)
        if unknown := sorted(set(candidates) - self._models.keys()):
            raise UnknownModel(
                f"Models to choose from are not configured: {', '.join(unknown)}.",
                remedy=f"Configure them, or use some of: {', '.join(sorted(self._models))}.",
            )
        return candidates

    def scores_decide(self, candidates: Sequence[str]) -> bool:
        """Whether scores could change the choice among them, by what is in flight now."""
        return scores_decide([self._candidate(model, Forecast()) for model in candidates], self._auto.settings)

    async def forecasts(self, prospects: Sequence[Prospect], emit: Emit) -> Sequence[Forecast]:
        """What to expect of each; empty ones without a predictor. What cannot be told is logged and emitted."""
        if self._predictor is None:
            return [Forecast() for _ in prospects]
        found = await self._predictor.forecast(prospects)
        for kind, why in found.trouble.items():
            log.warning("no predicted %s: %s", kind, why)
            emit(Degraded(self._clock(), "", kind, why))
        return found.each

    def choose(
        self, agents: tuple[str, ...], candidates: Sequence[str], forecast: Forecast, started_s: float, emit: Emit
    ) -> str:
        """The model of `agents`, chosen now by what is in flight now."""
        choice = choose_model(
            [self._candidate(model, forecast) for model in candidates], self._auto.settings, self._turns
        )
        self._turns += 1
        emit(self._told(agents, candidates, forecast, choice, started_s))
        return choice.model

    def kept(self, agents: tuple[str, ...], model: str, emit: Emit) -> str:
        """The model that the program was given before (Algorithm 1, line 26)."""
        now_s = self._clock()
        emit(ModelChosen(now_s, now_s, agents, model, self._auto.settings.policy, "kept", {}, {}, ()))
        return model

    def _candidate(self, model: str, forecast: Forecast) -> Candidate:
        figures = self._auto.figures.get(model, ModelFigures())
        cost = figures.decode_s_per_token
        return Candidate(
            model,
            forecast.scores.get(model),
            self.activity.in_flight(model),
            self.pace.token_s(model) if cost is None else cost,
            figures.max_batch,
            forecast.own_tokens.get(model),
        )

    def _told(
        self,
        agents: tuple[str, ...],
        candidates: Sequence[str],
        forecast: Forecast,
        choice: ModelChoice,
        started_s: float,
    ) -> ModelChosen:
        scores = {model: forecast.scores[model] for model in candidates if model in forecast.scores}
        policy = self._auto.settings.policy
        return ModelChosen(
            self._clock(), started_s, agents, choice.model, policy, choice.why, scores, choice.waits, choice.unmeasured
        )
