"""The model of one agent of somebody else's program."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shell_router.core.events import Event
from shell_router.core.model import ServedModel
from shell_router.core.prediction import Forecast, Prospect
from shell_router.execution.choosing import ModelChooser
from shell_router.execution.planning import known_or_most
from shell_router.execution.prospects import known_of_request
from shell_router.execution.requests import AgentRequest
from shell_router.topology import AUTO

Emit = Callable[[Event], None]

AGENT_REQUEST = "agent request"
"""The workflow of agents that somebody else's framework sends: which one it walks, nobody says."""


@dataclass(frozen=True, slots=True)
class PlannedAgent:
    """An agent's model, and the output tokens that are expected of it, as predictors told or as it wrote before, and
    of it and all that follow it in its program, as predictors told.
    """

    model: str
    own_tokens: float | None
    total_tokens: float | None

    def in_flight(self, sampling: Mapping[str, object]) -> tuple[str, float]:
        """Its model and tokens, for the activity table."""
        return self.model, known_or_most(self.own_tokens, sampling)


async def plan_agent(
    chooser: ModelChooser,
    models: Mapping[str, ServedModel],
    request: AgentRequest,
    emit: Emit,
    chosen_before: Callable[[], str | None],
) -> PlannedAgent:
    """Choose its model, if it names several; its program keeps the one of `chosen_before`. Raises UnknownModel."""
    auto = request.model == AUTO
    candidates = chooser.candidates(request.candidates) if auto else (request.model,)
    forecast, started_s = Forecast(), chooser.now_s()
    if chooser.predicts and models.keys() >= set(candidates):
        known = known_of_request(request)
        tokens = known.tokens(models[candidates[0]].tokenizer)
        scored = auto and chosen_before() is None and chooser.scores_decide(candidates)
        prospect = Prospect(
            AGENT_REQUEST, request.agent, known.user, tokens.system, tokens.user, tokens.known, candidates, scored
        )
        forecast = (await chooser.forecasts([prospect], emit))[0]
    if not auto:
        model = request.model
    elif before := chosen_before():  # or, while the predictors were asked, another agent of the program was first
        model = chooser.kept((request.agent,), before, emit)
    else:
        model = chooser.choose((request.agent,), candidates, forecast, started_s, emit)
    before_this = chooser.pace.output_tokens(model, None, request.agent)
    own = forecast.own_tokens.get(model, before_this)
    return PlannedAgent(model, own, forecast.total_tokens.get(model))
