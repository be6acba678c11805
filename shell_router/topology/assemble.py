"""Build a `Topology` or a `Conditional` from the plain values of a checked file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import Any, Literal

from shell_router.core.budget import Budget
from shell_router.core.exact_json import NewValues
from shell_router.early_exit.settings import EarlyExit
from shell_router.files.document import Path, Values
from shell_router.topology.graph import (
    AUTO,
    VOTE,
    Agent,
    Cluster,
    Conditional,
    Prefill,
    Step,
    Topology,
)
from shell_router.topology.prompting import AGGREGATOR, PROPOSER
from shell_router.topology.rules import END, START, Classifier, Rule, Subject, When

_MERGED = ("prompt", "sampling", "chat_template_kwargs")
"""Blocks of an agent that are merged key by key."""


def merge(base: Values, own: Values) -> NewValues:
    """Put an agent's `own` keys over those of `base`."""
    blocks = {key: {**base[key], **own[key]} for key in _MERGED if key in base and key in own}
    return {**base, **own, **blocks}


def write_out(form: Literal["tree", "all_to_all"], layered: Values) -> dict[str, NewValues]:
    """Write the agents of a short form as the full form's `agents` would hold them, leaves first.

    In a layer the agents take turns through `models`, so that a cluster of a 9-3-1 tree over three
    models holds each of them once; the root has the last, or `root_model`.
    """
    layers = agent_ids(layered["shape"])
    models: Sequence[str] = layered["models"]
    agents: dict[str, NewValues] = {}
    below: list[str] = []
    for depth, layer in enumerate(layers):
        role = _role_of(layered, depth, len(layers))
        width = len(below) // len(layer)
        for position, agent in enumerate(layer):
            block = {**role, "precursors": list(below)}
            if form == "tree":
                block["precursors"] = below[position * width : (position + 1) * width]
            if "vote" not in role and depth < len(layers) - 1:
                block["model"] = models[position % len(models)]
            elif "vote" not in role:
                block["model"] = layered.get("root_model", models[-1])
            agents[agent] = block
        below = layer
    return agents


def agent_ids(shape: Sequence[int]) -> list[list[str]]:
    """Name the agents per layer, leaves first: proposer-1, ..., aggregator-1, ..., root.

    With several layers of aggregators their names have the layer's number: aggregator2-1, ...,
    aggregator3-1.
    """
    several = len(shape) > 3
    layers = [[f"proposer-{n}" for n in range(1, shape[0] + 1)]]
    for depth, size in enumerate(shape[1:-1], start=2):
        stem = f"aggregator{depth}" if several else "aggregator"
        layers.append([f"{stem}-{n}" for n in range(1, size + 1)])
    return [*layers, ["root"]]


def _role_of(layered: Values, depth: int, layers: int) -> NewValues:
    """Return the keys that a layer's agents have. If aggregators vote, the root does not."""
    if depth == 0:
        return dict(layered.get("proposer", {}))
    aggregator = dict(layered.get("aggregator", {}))
    if depth < layers - 1:
        return aggregator
    aggregator.pop("vote", None)
    return merge(aggregator, layered.get("root", {}))


def agents_in(file: Values) -> Mapping[str, Values]:
    """Return the graph agent by agent, whichever form the file uses."""
    if "tree" in file:
        return write_out("tree", file["tree"])
    if "all_to_all" in file:
        return write_out("all_to_all", file["all_to_all"])
    agents: Mapping[str, Values] = file["agents"]
    return agents


def assemble(file: Values, *, name: str) -> Topology:
    """Build the topology that a checked file describes."""
    blocks = agents_in(file)
    precursors = {agent: block.get("precursors", ()) for agent, block in blocks.items()}
    order = list(TopologicalSorter(precursors).static_order())
    agents = {agent: build_agent(agent, blocks[agent], file) for agent in order}
    root = order[-1]
    agents[root] = replace(agents[root], on_failure="fail")  # without it there is no answer
    topology = Topology(
        name=name,
        agents=agents,
        prefill=Prefill(**file.get("prefill", {})),
        description=file.get("description", ""),
        fan_out=file.get("fan_out", "turn"),
        root_reserve_s=file.get("root_reserve_s", 0.0),
        budget=Budget(**file.get("budget", {})),
    )
    return replace(topology, clusters=tuple(_clusters(topology, file)))


def build_early_exit(value: Any, base: Any = False) -> EarlyExit | None:
    """Build the settings of an `early_exit` value over those of `base`, the topology's own value.

    Returns:
        None where it is off.

    Raises:
        ValueError: Settings contradict each other.
    """
    if value is False:
        return None
    inherited = base if isinstance(base, Mapping) else {}
    own = value if isinstance(value, Mapping) else {}
    return EarlyExit(**{**inherited, **own})


def build_agent(agent_id: str, own: Values, file: Values) -> Agent:
    """Build an agent from its own keys, over the defaults of its file."""
    defaults = file.get("defaults", {})
    if "on_failure" in file:
        defaults = {"on_failure": file["on_failure"], **defaults}
    keys = merge(defaults, own)
    precursors = tuple(keys.pop("precursors", ()))
    if "vote" in own:
        return Agent(
            agent_id,
            VOTE,
            precursors,
            on_failure=keys.get("on_failure", "fail"),
            votes=own["vote"],
        )
    keys["prompt"] = replace(AGGREGATOR if precursors else PROPOSER, **keys.get("prompt", {}))
    keys["drafts"] = keys.get("drafts", bool(precursors))
    keys["fallbacks"] = tuple(keys.get("fallbacks", ()))
    if not isinstance(keys["model"], str):
        keys["candidates"] = tuple(keys["model"])
        keys["model"] = AUTO
    return Agent(id=agent_id, precursors=precursors, **keys)


def _clusters(topology: Topology, file: Values) -> Iterator[Cluster]:
    """Yield the clusters that the file names, else groups that have their successors in common.

    With scope `layer` a group is a layer. A group has two agents or more: a single output cannot be
    compared.
    """
    base = file.get("early_exit", False)
    if "clusters" in file:
        for cluster, block in file["clusters"].items():
            early_exit = build_early_exit(block.get("early_exit", base), base)
            yield Cluster(cluster, tuple(block["agents"]), early_exit)
        return
    early_exit = build_early_exit(base)
    layers = {agent: depth for depth, layer in enumerate(topology.layers) for agent in layer}
    by_layer = early_exit is not None and early_exit.scope == "layer"
    groups: dict[object, list[str]] = {}
    for agent, successors in topology.successors.items():
        if successors:
            group = layers[agent] if by_layer else frozenset(successors)
            groups.setdefault(group, []).append(agent)
    comparable = [agents for agents in groups.values() if len(agents) > 1]
    for number, agents in enumerate(comparable, start=1):
        yield Cluster(f"cluster-{number}", tuple(agents), early_exit)


def rules_of(file: Values) -> Iterator[tuple[str, Path, Values]]:
    """Yield every rule: the step after which it is read, or START; its place; and its keys.

    A bare step id is a rule without a condition; `on_failure` is a rule, too.
    """
    places: dict[str, Path] = {START: ("start",)}
    rules: NewValues = {START: file.get("start", [])}
    for step, block in file.get("steps", {}).items():
        if "on_failure" in block:
            at = ("steps", step, "on_failure")
            yield step, at, {"go": block["on_failure"], "when": {"failed": True}}
        places[step] = ("steps", step, "then")
        rules[step] = block.get("then", [])
    for step, place in places.items():
        if isinstance(rules[step], str):
            yield step, place, {"go": rules[step]}
        else:
            yield from ((step, (*place, n), rule) for n, rule in enumerate(rules[step]))


def predecessors(file: Values) -> dict[str, set[str]]:
    """Collect per step the steps with a rule that leads to it."""
    before: dict[str, set[str]] = {step: set() for step in file["steps"]}
    for step, _, rule in rules_of(file):
        if step != START and rule["go"] != END:
            before[rule["go"]].add(step)
    return before


def subject_of(when: Values, *, at_start: bool) -> Subject:
    """Return the text that a condition reads."""
    subject: Subject = when.get("of", "request" if at_start else "output")
    return subject


def assemble_steps(file: Values, *, name: str, topologies: Mapping[str, Topology]) -> Conditional:
    """Build what a checked file describes; `topologies` hold those that its steps name."""
    order = TopologicalSorter(predecessors(file)).static_order()
    classifiers = file.get("classifiers", {})
    return Conditional(
        name=name,
        start=_build_rules(file["start"], at_start=True),
        steps={step: _build_step(step, name, file, topologies) for step in order},
        classifiers={each: _build_classifier(each, block) for each, block in classifiers.items()},
        description=file.get("description", ""),
        fan_out=file.get("fan_out", "turn"),
        budget=Budget(**file.get("budget", {})),
    )


def _build_classifier(name: str, block: Values) -> Classifier:
    examples = {label: tuple(texts) for label, texts in block["examples"].items()}
    return Classifier(**{**block, "id": name, "examples": examples})


def _build_step(step: str, name: str, file: Values, topologies: Mapping[str, Topology]) -> Step:
    block = dict(file["steps"][step])
    then = _build_rules(block.pop("then", END), at_start=False)
    if "on_failure" in block:
        then = (*then, Rule(block.pop("on_failure"), When(failed=True)))
    answer = block.pop("answer", "")
    if "topology" in block:
        inner = replace(
            topologies[block["topology"]].inside(step), fan_out=file.get("fan_out", "turn")
        )
        return Step(step, inner, then, answer=answer)
    agent = build_agent(step, block, file)
    alone = Topology(f"{name}/{step}", {step: replace(agent, precursors=())})
    unread_prompt = build_agent(step, {**block, "precursors": ()}, file).prompt
    return Step(step, alone, then, agent.precursors, unread_prompt, answer)


def _build_rules(value: Any, *, at_start: bool) -> tuple[Rule, ...]:
    """Build the rules, with a last one that always holds: if no rule does, the request ends."""
    if isinstance(value, str):
        return (Rule(value),)
    rules = tuple(_build_rule(block, at_start) for block in value)
    return rules if rules[-1].when is None else (*rules, Rule(END))


def _build_rule(block: Values, at_start: bool) -> Rule:
    if "when" not in block:
        return Rule(block["go"])
    when = block["when"]
    condition = When(
        labels={key: _several(values) for key, values in when.get("label", {}).items()},
        matches=when.get("matches", ""),
        classifier=when.get("classifier", ""),
        classes=_several(when.get("is", [])),
        confidence_below=when.get("confidence_below"),
        scores_below=when.get("score_below", {}),
        of=subject_of(when, at_start=at_start),
    )
    return Rule(block["go"], condition)


def _several(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
