"""Which expert follows on which, and how often each is needed, as topologies say it (CoServe, sections 2.1 and 4.3).

An expert is what an agent's `model` names: a model's alias, or `alias:adapter`. An agent that chooses among several
stands for all of them: each may follow on what it reads, and each is needed by an equal share of its requests.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shell_router.errors import ConfigError
from shell_router.expert_pools.ways import Asked, Chances, require_places, ways
from shell_router.topology import AUTO, Agent, Conditional, Graph, Topology
from shell_router.topology.rules import END, START


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """What an `Expert` has beside its weights: see there."""

    after: frozenset[str]
    usage: float


def expert_uses(
    graphs: Mapping[str, Graph],
    asked: Sequence[Asked],
    models: Sequence[str],
    chances: Chances | None = None,
) -> Mapping[str, ExpertUse]:
    """Per expert of `graphs`, by name, the experts that lead to it and the probability that a request needs it.

    `asked` is a sample of requests, or one entry for each topology with its share as weight. Where a rule reads what no
    request tells (an output, how sure it is, a classifier), `chances` must say how often each way is taken. `models`
    are those that `auto` stands for. Raises ConfigError.
    """
    after, usage = predecessors(graphs.values(), models), usages(graphs, asked, models, chances or {})
    return {expert: ExpertUse(after[expert], usage[expert]) for expert in after}


def predecessors(graphs: Iterable[Graph], models: Sequence[str]) -> Mapping[str, frozenset[str]]:
    """Per expert those whose output leads to it; none where it may be the first of some request.

    An expert that only follows can wait outside of memory until one of those before it has been loaded (section 4.3);
    one that may also come first cannot.
    """
    before: dict[str, set[str]] = {}
    first: set[str] = set()
    for graph in graphs:
        for agent in graph.agents.values():
            read = {expert for one in graph.waits_for[agent.id] for expert in experts_of(graph.agents[one], models)}
            for expert in experts_of(agent, models):
                before.setdefault(expert, set()).update(read)
            if agent.id in graph.beginning:
                first.update(experts_of(agent, models))
    return {expert: frozenset() if expert in first else frozenset(read - {expert}) for expert, read in before.items()}


def usages(
    graphs: Mapping[str, Graph], asked: Sequence[Asked], models: Sequence[str], chances: Chances
) -> Mapping[str, float]:
    """Per expert the probability that a request needs it, over `asked`. Raises ConfigError."""
    experts = dict.fromkeys(
        expert for graph in graphs.values() for agent in graph.agents.values() for expert in experts_of(agent, models)
    )
    require_places(graphs, chances)
    total = sum(one.weight for one in asked)
    if total <= 0:
        raise ConfigError("Nothing is known of the requests.", remedy="Give a sample, or a weight for each topology.")
    needed = dict.fromkeys(experts, 0.0)
    for one in asked:
        if one.topology not in graphs:
            known = ", ".join(graphs) or "none"
            raise ConfigError(f"The sample names the topology {one.topology!r}.", remedy=f"Known: {known}.")
        for expert, chance in _needed(graphs[one.topology], one, models, chances).items():
            needed[expert] += chance * one.weight
    return {expert: min(1.0, chance / total) for expert, chance in needed.items()}


def experts_of(agent: Agent, models: Sequence[str]) -> tuple[str, ...]:
    """The experts that the agent may be answered by. Raises ConfigError where `auto` stands for none."""
    if agent.model != AUTO:
        return (agent.model,)
    found = agent.candidates or tuple(models)
    if not found:
        raise ConfigError(f"Agent {agent.id!r} chooses by auto.", remedy="Name the models that it stands for.")
    return found


def _needed(graph: Graph, asked: Asked, models: Sequence[str], chances: Chances) -> Mapping[str, float]:
    """Per expert the probability that this request needs it."""
    if isinstance(graph, Topology):
        return _shares(graph, models)
    shares = {step.id: _shares(step.topology, models) for step in graph.steps.values()}
    experts = dict.fromkeys(expert for share in shares.values() for expert in share)
    ahead = _ahead(graph, asked, chances)
    return {expert: 1.0 - _spared(expert, ahead, shares) for expert in experts}


def _ahead(graph: Conditional, asked: Asked, chances: Chances) -> dict[str, Mapping[str, float]]:
    """What may follow on the start and on each step that the request may come to, in their order."""
    ahead = {START: ways(graph, START, asked, chances)}
    for step in graph.steps:
        if any(targets.get(step) for targets in ahead.values()):
            ahead[step] = ways(graph, step, asked, chances)
    return ahead


def _spared(expert: str, ahead: Mapping[str, Mapping[str, float]], shares: Mapping[str, Mapping[str, float]]) -> float:
    """The probability that no step needs the expert, from the last steps back to the start."""
    spared = {END: 1.0}
    for place in reversed(list(ahead)):
        own = 1.0 - shares[place].get(expert, 0.0) if place != START else 1.0
        spared[place] = own * sum(chance * spared[target] for target, chance in ahead[place].items() if chance)
    return spared[START]


def _shares(topology: Topology, models: Sequence[str]) -> Mapping[str, float]:
    """Per expert the probability that one run needs it; agents with the same candidates share one choice."""
    spared: dict[str, float] = {}
    for candidates in {experts_of(agent, models) for agent in topology.agents.values()}:
        for expert in candidates:
            spared[expert] = spared.get(expert, 1.0) * (1.0 - 1.0 / len(candidates))
    return {expert: 1.0 - chance for expert, chance in spared.items()}
