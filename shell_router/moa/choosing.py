"""Chooses models for agents that name several, by measured latencies, load in flight and the
predictors' scores.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from shell_router.core.engine import Hints, ServedModel
from shell_router.core.events import Degraded, Emit, ModelChosen
from shell_router.core.predictors import NO_FORECAST, Forecast, Predictor, Prospect
from shell_router.errors import UnknownModel
from shell_router.routing.increments import PrefillLoad
from shell_router.routing.model_choice import (
    Candidate,
    ModelChoiceSettings,
    choose_model,
    scores_decide,
)
from shell_router.topology import Topology

log = logging.getLogger(__name__)

# of models, and of topologies' agents; those that were measured longest ago are forgotten first
_KEPT_MEANS = 100_000
_WEIGHT = 0.2  # of the newest measurement: a change of load shows after about five


def require_models(who: str, named: Iterable[str], models: Mapping[str, ServedModel]) -> None:
    """Raise UnknownModel where `who` names models that are not configured."""
    if unknown := sorted(set(named) - models.keys()):
        raise UnknownModel(
            f"{who} names models that are not configured: {', '.join(unknown)}.",
            remedy=f"Configure them, or use some of: {', '.join(sorted(models))}.",
        )


class LatencyEstimates:
    """Exponential means per model alias, or what comes near them; absent until first measured."""

    def __init__(self) -> None:
        self._prefill: dict[str, PrefillLoad] = {}
        self._means: OrderedDict[tuple[str | None, ...], float] = OrderedDict()

    def _observe(self, newest: float, *key: str | None) -> None:
        before = self._means.get(key, newest)
        self._means[key] = before + _WEIGHT * (newest - before)
        self._means.move_to_end(key)
        if len(self._means) > _KEPT_MEANS:
            self._means.popitem(last=False)

    def prefill(self, model: ServedModel) -> PrefillLoad:
        """The prefill servers of `model`, which it shares with its adapters."""
        name = model.base or model.alias
        found = self._prefill.get(name)
        if found is None:
            found = self._prefill[name] = PrefillLoad(model.prefill_cost)
        found.servers = model.prefill_servers
        return found

    def observe_run(
        self, model: str, hints: Hints, tokens: int, run_s: float, token_s: float | None
    ) -> None:
        """The agent of `hints` wrote `tokens` with `model` to its end, `run_s` after its prompt was
        complete, and took `token_s` for each token after its first."""
        named = (
            ((hints.topology, hints.agent))
            if (hints.topology)
            else ((None, hints.agent, hints.user))
        )
        self._observe(run_s, "run_s", model)
        self._observe(tokens, "tokens", model)
        self._observe(tokens, "tokens", model, *named)
        if token_s is not None:
            self._observe(token_s, "token_s", model)

    def token_s(self, model: str) -> float | None:
        """Mean seconds between a sequence's tokens."""
        return self._means.get(("token_s", model))

    def output_tokens(
        self, model: str, topology: str | None, agent: str | None, *user: str | None
    ) -> float | None:
        """Mean tokens that this agent of this topology writes with `model`; any agent, where it has
        not written yet.

        An agent without a topology is its user's: tenants may name theirs alike.
        """
        return self._means.get(
            ("tokens", model, topology, agent, *user), self._means.get(("tokens", model))
        )

    def observe_fate(self, topology: str, agent: str, *, decoded: bool, read: bool) -> None:
        """A run ended in which the agent's prompt was decoded or not, and its output read or left
        out.
        """
        self._observe(float(decoded), "decoded", topology, agent)
        self._observe(float(read), "read", topology, agent)

    def chance(self, topology: str, agent: str, kind: Literal["decoded", "read"]) -> float:
        """How likely the agent's prompt is decoded, or its output read; 1 before its first run."""
        return self._means.get((kind, topology, agent), 1.0)

    def expected_finish_s(self, topology: Topology) -> Mapping[str, float]:
        """Per agent, seconds from the request's start to its expected end; agents of unmeasured
        models are absent.
        """
        finish: dict[str, float] = {}
        for agent in topology.agents.values():
            run_s = self._means.get(("run_s", agent.model))
            if run_s is not None and all(precursor in finish for precursor in agent.precursors):
                finish[agent.id] = run_s + max((finish[p] for p in agent.precursors), default=0.0)
        return finish


Leave = Callable[[str], None]
"""Called with an agent that has ended."""


class Activity:
    """The predicted tokens of every agent that was given to a model and has not ended, however it
    will.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, dict[tuple[int, str], float]] = {}
        self._programs = 0

    def in_flight(self, model: str) -> float:
        """P_m = the sum over the entries of `model` (Algorithm 1, line 10)."""
        return sum(self._tokens.get(model, {}).values())

    @contextmanager
    def program(self, expected: Mapping[str, tuple[str, float]]) -> Iterator[Leave]:
        """Enter the agents of one run, each with its model and tokens, for as long as the context
        is open.

        An agent leaves when its end is reported to the function that this gives; the others leave
        with the context. All stages enter at once: together those of a chain hold what the paper's
        entry of the running stage does, the tokens of it and of all that follow.
        """
        self._programs += 1
        program = self._programs
        for agent, (model, tokens) in expected.items():
            self._tokens.setdefault(model, {})[program, agent] = tokens

        def leave(agent: str) -> None:
            self._tokens[expected[agent][0]].pop((program, agent), None)

        try:
            yield leave
        finally:
            for agent, (model, _) in expected.items():
                self._tokens[model].pop((program, agent), None)


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """A model's Pi (Algorithm 1, line 11). Without `decode_s_per_token` the router measures it as
    it goes.
    """

    max_batch: int = 32
    decode_s_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class Auto:
    """What `auto` stands for, all models where `models` is empty, and how the choice is made."""

    models: tuple[str, ...] = ()
    settings: ModelChoiceSettings = field(default_factory=ModelChoiceSettings)
    figures: Mapping[str, ModelFigures] = field(default_factory=dict)


class ModelChooser:
    """Chooses by `auto`. `activity` is what it reads the load from; its users enter what they
    run."""

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
        self.predicts = predictor is not None
        self.clock = clock
        self.activity = Activity()
        self.estimates = LatencyEstimates()

    def anew(self) -> "ModelChooser":
        """The same policy, which has measured nothing yet."""
        return ModelChooser(self._models, self._auto, self._predictor, clock=self.clock)

    def candidates(self, named: tuple[str, ...]) -> tuple[str, ...]:
        """The models that `named` stands for; none of them means `auto`. Raises UnknownModel."""
        candidates = named or self._auto.models or tuple(self._models)
        require_models("The choice", candidates, self._models)
        return candidates

    def scores_decide(self, candidates: Sequence[str]) -> bool:
        """Whether scores could change the choice among them, by what is in flight now."""
        return scores_decide(
            [self._candidate(model, NO_FORECAST) for model in candidates], self._auto.settings
        )

    async def forecasts(self, prospects: Sequence[Prospect], emit: Emit) -> Sequence[Forecast]:
        """What to expect of each; empty ones without a predictor. What the predictor lacks is
        logged and emitted.
        """
        if self._predictor is None:
            return [NO_FORECAST for _ in prospects]
        found = await self._predictor.forecast(prospects)
        for kind, why in found.trouble.items():
            log.warning("no predicted %s: %s", kind, why)
            emit(Degraded(self.clock(), "", kind, why))
        return found.each

    def choose(
        self,
        agents: tuple[str, ...],
        candidates: Sequence[str],
        forecast: Forecast,
        started_s: float,
        emit: Emit,
    ) -> str:
        """The model of `agents`, chosen now by what is in flight now."""
        known = [self._candidate(model, forecast) for model in candidates]
        settings = self._auto.settings
        choice = choose_model(known, settings)
        scores = {one.model: one.score for one in known if one.score is not None}
        how = settings.policy, choice.why, scores, choice.waits, choice.unmeasured
        emit(ModelChosen(self.clock(), started_s, agents, choice.model, *how))
        return choice.model

    def kept(self, agents: tuple[str, ...], model: str, emit: Emit) -> str:
        """The model that the program was given before (Algorithm 1, line 26)."""
        now_s = self.clock()
        emit(
            ModelChosen(now_s, now_s, agents, model, self._auto.settings.policy, "kept", {}, {}, ())
        )
        return model

    def _candidate(self, model: str, forecast: Forecast) -> Candidate:
        figures = self._auto.figures.get(model, ModelFigures())
        cost = figures.decode_s_per_token
        return Candidate(
            model,
            forecast.scores.get(model),
            self.activity.in_flight(model),
            self.estimates.token_s(model) if cost is None else cost,
            figures.max_batch,
            forecast.own_tokens.get(model),
        )
