"""A topology whose agents name several models, made one whose agents have one each."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from shell_router.core.events import Event
from shell_router.core.model import ServedModel
from shell_router.core.prediction import Forecast, Prospect
from shell_router.execution.choosing import ModelChooser
from shell_router.execution.expectations import NOTHING_LEARNED, Learned, own_tokens
from shell_router.execution.pace import Pace
from shell_router.execution.prospects import KnownPrompt, known_of_agent, wanted_tokens
from shell_router.execution.requests import MoaRequest
from shell_router.topology import AUTO, Agent, Topology

LONG_TEXT = 4096
"""Characters; tokenizing more takes milliseconds, which the event loop must not lose."""

PLAIN_REQUEST = "plain request"
"""The workflow of requests that name a model, not a topology, so that they are alike whether it was chosen or not."""

Candidates = Mapping[str, tuple[str, ...]]
Emit = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Planned:
    """A topology with models chosen, and what predictors told of its agents."""

    topology: Topology
    learned: Learned = NOTHING_LEARNED

    def expected(self, pace: Pace, request: MoaRequest) -> Mapping[str, tuple[str, float]]:
        """Per agent its model and tokens, for the activity table."""
        own = own_tokens(self.topology, pace, self.learned)
        return {
            agent.id: (agent.model, known_or_most(own[agent.id], _sampling(self.topology, agent, request)))
            for agent in self.topology.agents.values()
        }


def known_or_most(expected: float | None, sampling: Mapping[str, object]) -> float:
    """Output tokens that are expected, or where nothing is, the most that may be written."""
    return float(wanted_tokens(sampling)) if expected is None else expected


async def plan(
    chooser: ModelChooser, models: Mapping[str, ServedModel], topology: Topology, request: MoaRequest, emit: Emit
) -> Planned:
    """Choose a model for every agent that names several; agents with the same candidates share one (the paper's
    assignment per program). `emit` is told each choice. Raises UnknownModel.

    Nothing happens between the choice and the return, so that no other request is chosen for by the same load.
    """
    open_to = {a.id: chooser.candidates(a.candidates) for a in topology.agents.values() if a.model == AUTO}
    if not open_to and not chooser.predicts:
        return Planned(topology)
    started_s = chooser.now_s()
    known = {agent.id: known_of_agent(agent, request.messages) for agent in topology.agents.values()}
    open_to = {
        agent: _fitting(_sampling(topology, topology.agents[agent], request), of, known[agent], models)
        for agent, of in open_to.items()
    }
    forecasts = await _forecasts(chooser, models, topology, known, open_to, emit)
    chosen: dict[str, str] = {}
    for candidates in dict.fromkeys(open_to.values()):
        agents = tuple(agent for agent, of in open_to.items() if of == candidates)
        model = chooser.choose(agents, candidates, forecasts.get(agents[0], Forecast()), started_s, emit)
        chosen |= dict.fromkeys(agents, model)
    return _planned(topology.with_models(chosen), forecasts)


def _planned(topology: Topology, forecasts: Mapping[str, Forecast]) -> Planned:
    agents = topology.agents.values()
    own = {agent.id: forecasts[agent.id].own_tokens.get(agent.model) for agent in agents if agent.id in forecasts}
    total = {agent.id: forecasts[agent.id].total_tokens.get(agent.model) for agent in agents if agent.id in forecasts}
    return Planned(topology, Learned(_known(own), _known(total)))


def _known(tokens: Mapping[str, float | None]) -> Mapping[str, float]:
    return {agent: expected for agent, expected in tokens.items() if expected is not None}


async def _forecasts(
    chooser: ModelChooser,
    models: Mapping[str, ServedModel],
    topology: Topology,
    known: Mapping[str, KnownPrompt],
    open_to: Candidates,
    emit: Emit,
) -> Mapping[str, Forecast]:
    if not chooser.predicts:
        return {}
    asked = [agent for agent in topology.agents.values() if set(open_to.get(agent.id, (agent.model,))) <= models.keys()]
    scored = {candidates for candidates in open_to.values() if chooser.scores_decide(candidates)}

    def prospects() -> list[Prospect]:
        return _prospects(asked, topology, known, open_to, models, scored)

    long = sum(known[agent.id].characters for agent in asked) > LONG_TEXT
    found = await chooser.forecasts(await asyncio.to_thread(prospects) if long else prospects(), emit)
    return {agent.id: forecast for agent, forecast in zip(asked, found, strict=True)}


def _prospects(
    asked: Sequence[Agent],
    topology: Topology,
    known: Mapping[str, KnownPrompt],
    open_to: Candidates,
    models: Mapping[str, ServedModel],
    scored: Collection[tuple[str, ...]],
) -> list[Prospect]:
    """Of those with the same candidates the first is scored, since they share one choice; if theirs are `scored`."""
    stages = stages_of(topology)
    told: set[tuple[str, ...]] = set()
    found = []
    for agent in asked:
        candidates = open_to.get(agent.id, (agent.model,))
        tokens = known[agent.id].tokens(models[candidates[0]].tokenizer)
        wants_score = agent.id in open_to and candidates in scored and candidates not in told
        told.add(candidates)
        found.append(
            Prospect(
                workflow_of(topology),
                stages[agent.id],
                known[agent.id].user,
                tokens.system,
                tokens.user,
                tokens.known,
                candidates,
                wants_score,
            )
        )
    return found


def workflow_of(topology: Topology) -> str:
    """The topology's name; all plain requests to a model, or to one of several, are of one workflow."""
    plain = len(topology.agents) == 1 and topology.root.id == topology.name
    return PLAIN_REQUEST if plain else topology.name


def stages_of(topology: Topology) -> Mapping[str, str]:
    """Per agent its stage in the workflow: the number of its layer, leaves 1."""
    return {agent: str(number) for number, layer in enumerate(topology.layers, start=1) for agent in layer}


def _sampling(topology: Topology, agent: Agent, request: MoaRequest) -> Mapping[str, object]:
    """The client's own sampling holds for the root."""
    return {**agent.sampling, **request.sampling} if agent.id == topology.root.id else agent.sampling


def _fitting(
    sampling: Mapping[str, object],
    candidates: tuple[str, ...],
    known: KnownPrompt,
    models: Mapping[str, ServedModel],
) -> tuple[str, ...]:
    """Those whose context takes what is known already; all, where none does: then the request is refused by name.

    A text has hardly more tokens than bytes, so that short ones need no tokenizing.
    """
    wanted = wanted_tokens(sampling)
    if 4 * known.characters + wanted <= min(models[name].context_length for name in candidates):
        return candidates
    fitting = tuple(
        name
        for name in candidates
        if known.tokens(models[name].tokenizer).known + wanted <= models[name].context_length
    )
    return fitting or candidates
