"""Chooses models for agents that name several: by load in flight, latencies and predicted scores.

Agents of one program with the same candidates share one model (Chimera, Algorithm 1).
"""

import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field

from shell_router.core.engine import Hints, ServedModel
from shell_router.core.events import Degraded, Emit, ModelChosen
from shell_router.core.predictors import NO_FORECAST, Forecast, Predictor, Prospect
from shell_router.core.sampling import require_possible
from shell_router.errors import UnknownModel
from shell_router.moa.expectations import (
    AGENT_REQUEST,
    PLAIN_REQUEST,
    Activity,
    ForecastQuery,
    LatencyEstimates,
    name_workflow,
    number_stages,
    read_agent_prompt,
    read_request_prompt,
)
from shell_router.moa.prompt import run_off_loop
from shell_router.moa.requests import AgentRequest, MoaRequest
from shell_router.routing.model_choice import (
    Candidate,
    ModelChoiceSettings,
    choose_model,
    scores_decide,
)
from shell_router.topology import AUTO, Topology

log = logging.getLogger(__name__)

Candidates = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """The configured Pi of a model (Algorithm 1, line 11).

    Without `decode_s_per_token` the router measures it.
    """

    max_batch: int = 32
    decode_s_per_token: float | None = None


@dataclass(frozen=True, slots=True)
class Auto:
    """The models that `auto` stands for, all if `models` is empty, and the rules of the choice."""

    models: Candidates = ()
    settings: ModelChoiceSettings = field(default_factory=ModelChoiceSettings)
    figures: Mapping[str, ModelFigures] = field(default_factory=dict)


class ModelChooser:
    """Chooses among candidates by the load that `activity` holds and by `estimates`."""

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

    def copy_unmeasured(self) -> "ModelChooser":
        """Return a chooser with the same policy, which has measured nothing yet."""
        return ModelChooser(self._models, self._auto, self._predictor, clock=self.clock)

    def require_models(self, who: str, names: Set[str]) -> None:
        """Raise UnknownModel if `who` names models that are not configured."""
        if unknown := sorted(names - self._models.keys()):
            raise UnknownModel(
                f"{who} names models that are not configured: {', '.join(unknown)}.",
                remedy=f"Configure them, or use some of: {', '.join(sorted(self._models))}.",
            )

    def require_possible(self, characters: int) -> None:
        """Raise PromptTooLong for a text that is too long for the longest context."""
        longest = max([model.context_length for model in self._models.values()])
        require_possible(characters, longest)

    async def choose_for_topology(
        self, topology: Topology, request: MoaRequest, emit: Emit
    ) -> tuple[Topology, Mapping[str, Forecast]]:
        """Choose a model for every agent that names several; equal candidates share one.

        Args:
            topology: The graph whose agents may name several models.
            request: The request whose prompts they get.
            emit: Gets every choice.

        Returns:
            The topology with one model for every agent, and the forecast of each agent.
        """
        started_s = self.clock()
        undecided: dict[str, Candidates] = {}
        for agent in topology.agents.values():
            if agent.model == AUTO:
                undecided[agent.id] = self.list_candidates(agent.candidates)
        forecasts = await self._forecast_agents(topology, request, undecided, emit)
        chosen: dict[str, str] = {}
        for candidates in dict.fromkeys(undecided.values()):
            agents = tuple(name for name in undecided if undecided[name] == candidates)
            forecast = forecasts.get(agents[0], NO_FORECAST)
            model = self.choose(agents, candidates, forecast, started_s, emit)
            chosen |= dict.fromkeys(agents, model)
        return topology.with_models(chosen), forecasts

    async def choose_for_agent(
        self, request: AgentRequest, chosen: MutableMapping[Candidates, str], emit: Emit
    ) -> tuple[str, Hints]:
        """Choose the model of an external program's agent, and expect its output tokens.

        What follows the agent in its program is not known, unless a predictor has learned it.

        Args:
            request: The agent.
            chosen: Its program's model per candidates; a new choice is added.
            emit: Gets the choice.

        Raises:
            UnknownModel: A model is not configured.
        """
        is_undecided = request.model == AUTO
        candidates: Candidates = (request.model,)
        if is_undecided:
            candidates = self.list_candidates(request.candidates)
        self.require_models(f"Agent {request.agent!r}", set(candidates))
        started_s = self.clock()
        forecast = NO_FORECAST
        if self.predicts:
            stage = PLAIN_REQUEST if request.chat else request.agent
            is_scored = (
                is_undecided and candidates not in chosen and self._scores_decide(candidates)
            )
            prompt = read_request_prompt(request)
            question = ForecastQuery(AGENT_REQUEST, stage, prompt, candidates, is_scored)
            (forecast,) = await self.forecast([question], emit)
        agents = (request.agent,)
        if not is_undecided:
            model = request.model
        elif candidates in chosen:  # perhaps by another agent, while the predictors were asked
            model = chosen[candidates]
            self._keep(agents, model, emit)
        else:
            model = self.choose(agents, candidates, forecast, started_s, emit)
            chosen[candidates] = model
        # the random id of a chat says nothing of the agents to come
        name = None if request.chat else request.agent
        own = forecast.own_tokens.get(model)
        if own is None:
            own = self.estimates.get_output_tokens(model, None, name, request.tenant)
        total = forecast.total_tokens.get(model)
        return model, Hints(
            request.tenant,
            request.program,
            None,
            name,
            own,
            total,
            request.end_user,
            request.tier,
            request.session,
        )

    async def forecast(self, queries: Sequence[ForecastQuery], emit: Emit) -> Sequence[Forecast]:
        """Return what the predictor expects of each agent.

        A kind of prediction that the predictor lacks is logged and emitted.
        """
        assert self._predictor is not None, "asked only if there is a predictor"

        def describe_agents() -> list[Prospect]:
            prospects = []
            for query in queries:
                models = query.models
                counts = query.prompt.count_tokens(self._models[models[0]].tokenizer)
                place = query.workflow, query.stage, query.prompt.user
                prospects.append(Prospect(*place, *counts, models, query.scored))
            return prospects

        characters = sum(query.prompt.characters for query in queries)
        prospects = await run_off_loop(characters, describe_agents)
        forecasts = await self._predictor.forecast(prospects)
        for kind, why in forecasts.trouble.items():
            log.warning("no predicted %s: %s", kind, why)
            emit(Degraded(self.clock(), "", kind, why))
        return forecasts.each

    async def _forecast_agents(
        self,
        topology: Topology,
        request: MoaRequest,
        undecided: Mapping[str, Candidates],
        emit: Emit,
    ) -> Mapping[str, Forecast]:
        """Ask the predictor about every agent that a model serves.

        Of agents with the same candidates only the first is scored, since they share one choice.
        """
        if not self.predicts:
            return {}
        to_score = set(filter(self._scores_decide, undecided.values()))
        stages = number_stages(topology)
        workflow = name_workflow(topology)
        queries = {}
        for agent in topology.agents.values():
            if agent.votes:
                continue
            models = undecided.get(agent.id, (agent.model,))
            is_scored = agent.id in undecided and models in to_score
            to_score.discard(models)
            prompt = read_agent_prompt(agent, request.messages)
            queries[agent.id] = ForecastQuery(workflow, stages[agent.id], prompt, models, is_scored)
        forecasts = await self.forecast(list(queries.values()), emit)
        return dict(zip(queries, forecasts, strict=True))

    def list_candidates(self, names: Candidates, without: str = "") -> Candidates:
        """Return the models to choose from: `names`, or those of `auto` if there are none."""
        candidates = names or self._auto.models or tuple(self._models)
        self.require_models("The choice", set(candidates))
        return tuple([name for name in candidates if name != without])

    def _scores_decide(self, candidates: Candidates) -> bool:
        """Tell whether scores could change the choice, by what is in flight now."""
        unscored = [self._describe(model, NO_FORECAST) for model in candidates]
        return scores_decide(unscored, self._auto.settings)

    def choose(
        self,
        agents: tuple[str, ...],
        candidates: Candidates,
        forecast: Forecast,
        started_s: float,
        emit: Emit,
    ) -> str:
        """Return the model for `agents`, chosen by what is in flight now."""
        described = [self._describe(model, forecast) for model in candidates]
        settings = self._auto.settings
        choice = choose_model(described, settings)
        scores = {each.model: each.score for each in described if each.score is not None}
        reason = settings.policy, choice.why, scores, choice.waits, choice.unmeasured
        emit(ModelChosen(self.clock(), started_s, agents, choice.model, *reason))
        return choice.model

    def _keep(self, agents: tuple[str, ...], model: str, emit: Emit) -> None:
        """Report that the program keeps its model (Algorithm 1, line 26)."""
        now_s = self.clock()
        policy = self._auto.settings.policy
        emit(ModelChosen(now_s, now_s, agents, model, policy, "kept", {}, {}, ()))

    def _describe(self, model: str, forecast: Forecast) -> Candidate:
        figures = self._auto.figures.get(model, ModelFigures())
        token_s = figures.decode_s_per_token
        if token_s is None:
            token_s = self.estimates.get_token_s(model)
        return Candidate(
            model,
            forecast.scores.get(model),
            self.activity.sum_tokens(model),
            token_s,
            figures.max_batch,
            forecast.own_tokens.get(model),
        )
