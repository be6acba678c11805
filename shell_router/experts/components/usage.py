"""Which component follows on which, and how often each is needed (CoServe, sections 2.1, 4.3 and 4.5).

Read from rules, from a sample of chains, or from topologies. For topologies a component is what an agent's `model`
names: a model's alias, or `alias:adapter`. An agent that chooses among several stands for all of them: each may follow
on what it reads, and each is needed by an equal share of its requests.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import orjson

from shell_router.errors import ConfigError, DataError, require
from shell_router.topology import AUTO, Agent, Conditional, Graph, Topology
from shell_router.topology.forms import Number
from shell_router.topology.rules import END, START, Facts, Rule, Transition, When, choose


@dataclass(frozen=True, slots=True)
class ChainRule:
    """Requests of this `chain` of components are so large a `share` of all; shares count relative to their sum."""

    chain: Annotated[tuple[str, ...], "Components in order."]
    share: Annotated[float, Number("Share of requests, relative to the sum.", above=0)]

    def __post_init__(self) -> None:
        check_chain(self.chain)


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one component: the probability that a request needs it, and the components that it follows on."""

    probability: float
    after: frozenset[str]


def check_chain(chain: Sequence[str]) -> None:
    """Raises ConfigError for a chain that no request could have."""
    require(bool(chain), "A chain names no component.", "Name the first component at least.")
    distinct = len(set(chain)) == len(chain)
    require(distinct, f"A chain names a component twice: {', '.join(chain)}.", "Name each component once.")


def rules_of(chains: Iterable[Sequence[str]]) -> list[ChainRule]:
    """A sample's chains as rules: each as often as it was seen."""
    return [ChainRule(chain, times) for chain, times in Counter(map(tuple, chains)).items()]


def usage_of(rules: Iterable[ChainRule]) -> Mapping[str, Usage]:
    """Of all components that rules name. One that any chain begins with follows on none."""
    rules = list(rules)
    whole = sum(rule.share for rule in rules)
    shares: dict[str, float] = defaultdict(float)
    after: dict[str, set[str]] = defaultdict(set)
    for rule in rules:
        for place, component in enumerate(rule.chain):
            shares[component] += rule.share / whole
            after[component].update(rule.chain[place - 1 : place])
    first = {rule.chain[0] for rule in rules}
    return {
        component: Usage(min(1.0, share), frozenset() if component in first else frozenset(after[component]))
        for component, share in shares.items()
    }


Chances = Mapping[tuple[str, str], Mapping[str, float]]
"""Per topology and step, or "start", how often each step, or "end", follows; each sums up to 1."""

_CLOSE = 1e-6


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """A request as far as it is known, standing for `weight` of them; None stands for unknown labels or question."""

    topology: str
    labels: Mapping[str, str] | None = field(default_factory=dict)
    question: str | None = None
    weight: float = 1.0


def read_sample(text: str, *, source: str) -> list[SampledRequest]:
    """A request per line of JSON: `model`, the topology's name, and as far as rules read them `metadata`, `question`.

    Raises DataError, which begins with `source:line:`.
    """
    lines = enumerate(text.split("\n"), start=1)  # `splitlines` would also split at what JSON's texts may hold
    return [_sampled(line, f"{source}:{number}") for number, line in lines if line.strip()]


def _ways(topology: Conditional, place: str, request: SampledRequest, chances: Chances) -> Mapping[str, float]:
    """How probably each target follows on `place`, a step or the start. Raises ConfigError where that is not known."""
    rules = topology.start if place == START else topology.steps[place].then
    given = chances.get((topology.name, place))
    if given is not None:
        _check_chances(given, rules, f"{topology.name}/{place}")
        return given
    if all(rule.go == rules[0].go for rule in rules):
        return {rules[0].go: 1.0}
    possible = [rule for rule in rules if not _known_not_to_hold(rule.when, request)]
    if possible[0].when is None or _is_known(possible[0].when, request):
        return {possible[0].go: 1.0}
    raise ConfigError(
        f"{topology.name}: how often {place!r} leads to {possible[0].go!r} is not known: {possible[0].when}.",
        remedy=f"Give the chances of what follows on {topology.name}/{place}.",
    )


def _known_not_to_hold(when: When | None, request: SampledRequest) -> bool:
    """Whether what is known of the request is enough to rule it out."""
    if when is None:
        return False
    labels = {} if request.labels is None else when.labels
    part = When(labels=labels, matches=when.matches if _reads_question(when, request) else "")
    facts = Facts(request.labels or {}, request.question or "")
    found = choose((Rule("holds", part), Rule("not")), facts) if part.labels or part.matches else None
    return isinstance(found, Transition) and found.go == "not"


def _is_known(when: When, request: SampledRequest) -> bool:
    """Whether all that the rule reads is known."""
    if when.confidence_below is not None or when.classifier or when.scores_below:
        return False
    if when.labels and request.labels is None:
        return False
    return not when.matches or _reads_question(when, request)


def _reads_question(when: When, request: SampledRequest) -> bool:
    return bool(when.matches) and when.of == "request" and request.question is not None


def _check_chances(given: Mapping[str, float], rules: Sequence[Rule], where: str) -> None:
    targets = {rule.go for rule in rules}
    unknown = ", ".join(sorted(given.keys() - targets))
    require(not unknown, f"The chances of {where} name {unknown}.", f"It leads to {', '.join(sorted(targets))}.")
    sums_up = all(0 <= chance <= 1 for chance in given.values()) and abs(sum(given.values()) - 1) <= _CLOSE
    require(sums_up, f"The chances of {where} are {dict(given)}.", "Give shares that sum up to 1.")


def _sampled(line: str, where: str) -> SampledRequest:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: The line is not JSON: {error}.", remedy="Write one object per line.") from error
    if not isinstance(found, dict) or not isinstance(found.get("model"), str):
        raise DataError(f"{where}: The line names no topology.", remedy='Write an object with a "model".')
    labels, question = found.get("metadata", {}), found.get("question")
    if not isinstance(labels, dict) or not all(isinstance(one, str) for one in labels.values()):
        raise DataError(f"{where}: metadata is not an object of texts.", remedy="Write labels and their values.")
    if question is not None and not isinstance(question, str):
        raise DataError(f"{where}: question is not a text.", remedy="Write the text of the last user message.")
    return SampledRequest(found["model"], labels, question)


def component_uses(
    graphs: Mapping[str, Graph],
    sample: Sequence[SampledRequest],
    models: Sequence[str],
    chances: Chances | None = None,
) -> Mapping[str, Usage]:
    """Per component of `graphs`, by name, the components that lead to it and the probability that a request needs it.

    `sample` has requests, or one entry for each topology with its share as weight. Where a rule reads what no
    request says (an output, its confidence, a classifier), `chances` must say how often each way is taken. `models`
    are those that `auto` stands for. Raises ConfigError.
    """
    after, usage = predecessors(graphs.values(), models), usages(graphs, sample, models, chances or {})
    return {component: Usage(usage[component], after[component]) for component in after}


def predecessors(graphs: Iterable[Graph], models: Sequence[str]) -> Mapping[str, frozenset[str]]:
    """Per component those whose output leads to it; none where it may be the first of some request.

    A component that only follows can wait outside of memory until one of those before it has been loaded (section 4.3);
    one that may also come first cannot.
    """
    before: dict[str, set[str]] = {}
    first: set[str] = set()
    for graph in graphs:
        for agent in graph.agents.values():
            components = components_of(agent, models)
            if agent.id in graph.beginning:
                first.update(components)
            for component in components:
                read = before.setdefault(component, set())
                for one in graph.waits_for[agent.id]:
                    read.update(components_of(graph.agents[one], models))
    return {name: frozenset() if name in first else frozenset(read - {name}) for name, read in before.items()}


def usages(
    graphs: Mapping[str, Graph], sample: Sequence[SampledRequest], models: Sequence[str], chances: Chances
) -> Mapping[str, float]:
    """Per component the probability that a request needs it, over `sample`. Raises ConfigError."""
    conditional = [graph for graph in graphs.values() if isinstance(graph, Conditional)]
    places = [(graph.name, place) for graph in conditional for place in (START, *graph.steps)]
    for topology, place in chances:
        require(
            (topology, place) in places,
            f"There are chances of what follows on {topology}/{place}, which is nowhere.",
            f"Known: {', '.join(map('/'.join, places)) or 'none'}.",
        )
    total = sum(one.weight for one in sample)
    require(total > 0, "Nothing is known of the requests.", "Give a sample, or a weight for each topology.")
    agents = (agent for graph in graphs.values() for agent in graph.agents.values())
    needed = dict.fromkeys((component for agent in agents for component in components_of(agent, models)), 0.0)
    known = f"Known: {', '.join(graphs) or 'none'}."
    for one in sample:
        require(one.topology in graphs, f"The sample names the topology {one.topology!r}.", known)
        for component, chance in _needed(graphs[one.topology], one, models, chances).items():
            needed[component] += chance * one.weight
    return {component: min(1.0, chance / total) for component, chance in needed.items()}


def components_of(agent: Agent, models: Sequence[str]) -> tuple[str, ...]:
    """The components that the agent may be answered by. Raises ConfigError where `auto` stands for none."""
    if agent.model != AUTO:
        return () if agent.votes else (agent.model,)
    found = agent.candidates or tuple(models)
    require(bool(found), f"Agent {agent.id!r} chooses by auto.", "Name the models that it stands for.")
    return found


def _needed(graph: Graph, request: SampledRequest, models: Sequence[str], chances: Chances) -> Mapping[str, float]:
    """Per component the probability that this request needs it: worked out from the last steps back to the start."""
    if isinstance(graph, Topology):
        return _shares(graph, models)
    ahead = {START: _ways(graph, START, request, chances)}
    for step in graph.steps:
        if any(targets.get(step) for targets in ahead.values()):  # the request may come to it
            ahead[step] = _ways(graph, step, request, chances)
    shares = {step.id: _shares(step.topology, models) for step in graph.steps.values()}

    def needed(component: str) -> float:
        spared = {END: 1.0}
        for place in reversed(list(ahead)):
            own = 1.0 - shares[place].get(component, 0.0) if place != START else 1.0
            spared[place] = own * sum(chance * spared[target] for target, chance in ahead[place].items() if chance)
        return 1.0 - spared[START]

    return {component: needed(component) for share in shares.values() for component in share}


def _shares(topology: Topology, models: Sequence[str]) -> Mapping[str, float]:
    """Per component the probability that one run needs it; agents with the same candidates share one choice."""
    spared: dict[str, float] = {}
    for candidates in {components_of(agent, models) for agent in topology.agents.values()}:
        for component in candidates:
            spared[component] = spared.get(component, 1.0) * (1.0 - 1.0 / len(candidates))
    return {component: 1.0 - chance for component, chance in spared.items()}
