"""From the plain values of a checked file to a `Topology` or a `Conditional`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import Any, Literal

from shell_router.early_exit.settings import EarlyExit
from shell_router.topology.document import Path, Values
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


def merged(base: Values, own: Values) -> dict[str, Any]:
    """`own` over `base`; blocks of an agent are merged key by key."""
    merging = ("prompt", "sampling", "chat_template_kwargs")
    blocks = {key: {**base[key], **own[key]} for key in merging if key in base and key in own}
    return {**base, **own, **blocks}


def write_out(form: Literal["tree", "all_to_all"], layered: Values) -> dict[str, dict[str, Any]]:
    """Agents of a checked short form, as the full form's `agents` would hold them, leaves first.

    In a layer the agents take turns through `models`, so that a cluster of a 9-3-1 tree over three
    models holds each of them once; the root has the last, or `root_model`.
    """
    layers = agent_ids(layered["shape"])
    agents: dict[str, dict[str, Any]] = {}
    for depth, layer in enumerate(layers):
        below = layers[depth - 1] if depth else []
        if form == "tree":
            width = len(below) // len(layer)
        else:
            width = 0
        role = _role(layered, depth, len(layers))
        for position, agent in enumerate(layer):
            if width:
                mine = below[position * width : (position + 1) * width]
            else:
                mine = below
            models: Sequence[str] = layered["models"]
            if depth < len(layers) - 1:
                model = models[position % len(models)]
            else:
                model = layered.get("root_model", models[-1])
            asked = {} if "vote" in role else {"model": model}
            agents[agent] = {**role, **asked, "precursors": list(mine)}
    return agents


def agent_ids(shape: Sequence[int]) -> list[list[str]]:
    """Ids per layer, leaves first: proposer-1, ..., aggregator-1, ..., root.

    With several layers of aggregators the layer's number joins in: aggregator2-1, ...,
    aggregator3-1.
    """
    several = len(shape) > 3
    layers = [[f"proposer-{n}" for n in range(1, shape[0] + 1)]]
    for depth, size in enumerate(shape[1:-1], start=2):
        if several:
            stem = f"aggregator{depth}"
        else:
            stem = "aggregator"
        layers.append([f"{stem}-{n}" for n in range(1, size + 1)])
    return [*layers, ["root"]]


def _role(layered: Values, depth: int, layers: int) -> dict[str, Any]:
    """What an agent of this layer is given. That aggregators vote does not make the root vote."""
    if depth == 0:
        return dict(layered.get("proposer", {}))
    aggregator = dict(layered.get("aggregator", {}))
    if depth < layers - 1:
        return aggregator
    aggregator.pop("vote", None)
    return merged(aggregator, layered.get("root", {}))


_ON = (True, "on")
_OFF = (False, "off")


def agents_in(file: Values) -> Mapping[str, Values]:
    """The graph agent by agent, whichever form the file uses."""
    if "tree" in file:
        return write_out("tree", file["tree"])
    if "all_to_all" in file:
        return write_out("all_to_all", file["all_to_all"])
    return {agent: dict(said) for agent, said in file["agents"].items()}


def assemble(file: Values, *, name: str) -> Topology:
    """Build the topology that a checked file describes; `name` is used when the file gives none."""
    said = agents_in(file)
    order = list(
        TopologicalSorter(
            {agent: said[agent].get("precursors", ()) for agent in said}
        ).static_order()
    )
    agents = {agent: agent_of(agent, said[agent], file) for agent in order}
    agents[order[-1]] = replace(
        agents[order[-1]], on_failure="fail"
    )  # without the root there is no answer
    bare = Topology(name=file.get("name", name), agents=agents)
    prefill = dict(file.get("prefill", {}))
    return replace(
        bare,
        clusters=tuple(_clusters(bare, file)),
        prefill=Prefill(prefill.pop("incremental", True) in _ON, **prefill),
        description=file.get("description", ""),
    )


def early_exit_in(said: Any, base: Any = False) -> EarlyExit | None:
    """An `early_exit` value: None for off, else settings over those of `base`, the topology's own
    value.

    Raises ValueError for settings that contradict each other.
    """
    if said in _OFF:
        return None
    own = said if isinstance(said, Mapping) else {}
    inherited = base if isinstance(base, Mapping) else {}
    settings = {**inherited, **own}
    switches = {
        key: settings[key] in _ON
        for key in ("skip_aggregation", "self_similarity")
        if key in settings
    }
    return EarlyExit(**{**settings, **switches})


def agent_of(agent_id: str, own: Values, file: Values) -> Agent:
    """One agent of a checked file, what it does not say itself taken from the rest of the file."""
    if "on_failure" in file:
        topology_wide = {"on_failure": file["on_failure"]}
    else:
        topology_wide = {}
    said = merged(merged(topology_wide, file.get("defaults", {})), own)
    precursors = tuple(said.pop("precursors", ()))
    if "vote" in own:
        return Agent(
            agent_id, VOTE, precursors, on_failure=said.get("on_failure", "fail"), votes=True
        )
    prompt = replace(AGGREGATOR if precursors else PROPOSER, **said.pop("prompt", {}))
    drafts = said.pop("drafts", bool(precursors)) in _ON
    models = said.pop("model")
    fallbacks = tuple(said.pop("fallbacks", ()))
    named = (
        ({"model": models})
        if (isinstance(models, str))
        else ({"model": AUTO, "candidates": tuple(models)})
    )
    return Agent(
        id=agent_id,
        precursors=precursors,
        prompt=prompt,
        drafts=drafts,
        fallbacks=fallbacks,
        **named,
        **said,
    )


def _clusters(topology: Topology, file: Values) -> Iterator[Cluster]:
    """Those that the file names, else agents with the same successors, or all of a layer.

    The latter are two or more: a single output cannot be compared.
    """
    base = file.get("early_exit", False)
    for cluster, block in file.get("clusters", {}).items():
        yield Cluster(
            cluster, tuple(block["agents"]), early_exit_in(block.get("early_exit", base), base)
        )
    if "clusters" in file:
        return
    early_exit = early_exit_in(base)
    groups: dict[object, list[str]] = {}
    layers = {agent: depth for depth, layer in enumerate(topology.layers) for agent in layer}
    by_layer = early_exit is not None and early_exit.scope == "layer"
    for agent, after in topology.successors.items():
        if after:
            groups.setdefault(layers[agent] if by_layer else frozenset(after), []).append(agent)
    for number, group in enumerate((group for group in groups.values() if len(group) > 1), start=1):
        yield Cluster(f"cluster-{number}", tuple(group), early_exit)


def rules_of(file: Values) -> Iterator[tuple[str, Path, Values]]:
    """Every rule: START or the step that is asked, where it stands, and what it says.

    A bare step id is a rule without a condition.
    """
    said: dict[str, tuple[Path, Any]] = {START: (("start",), file.get("start", []))}
    said |= {
        step: (("steps", step, "then"), one.get("then", []))
        for step, one in file.get("steps", {}).items()
    }
    for place, (at, rules) in said.items():
        if isinstance(rules, str):
            yield place, at, {"go": rules}
        else:
            yield from ((place, (*at, position), rule) for position, rule in enumerate(rules))


def predecessors(file: Values) -> dict[str, set[str]]:
    """Per step those with a rule that leads to it."""
    before: dict[str, set[str]] = {step: set() for step in file["steps"]}
    for place, _, rule in rules_of(file):
        if place != START and rule["go"] != END:
            before[rule["go"]].add(place)
    return before


def subject_of(when: Values, *, at_start: bool) -> Subject:
    """Which text a condition speaks of."""
    subject: Subject = when.get("of", "request" if at_start else "output")
    return subject


def assemble_steps(file: Values, *, name: str, topologies: Mapping[str, Topology]) -> Conditional:
    """Build what a checked file describes; `topologies` hold those that its steps name."""
    own = file.get("name", name)
    order = TopologicalSorter(predecessors(file)).static_order()
    return Conditional(
        name=own,
        start=_rules(file["start"], at_start=True),
        steps={step: _step(step, own, file, topologies) for step in order},
        classifiers={
            one: Classifier(
                one, {label: tuple(texts) for label, texts in said.pop("examples").items()}, **said
            )
            for one, said in (
                (one, dict(said)) for one, said in file.get("classifiers", {}).items()
            )
        },
        description=file.get("description", ""),
    )


def _step(step: str, own: str, file: Values, topologies: Mapping[str, Topology]) -> Step:
    said = dict(file["steps"][step])
    then = _rules(said.pop("then", END), at_start=False)
    if "topology" in said:
        return Step(step, topologies[said["topology"]].inside(step), then)
    agent = agent_of(step, said, file)
    alone = Topology(f"{own}/{step}", {step: replace(agent, precursors=())})
    return Step(step, alone, then, agent.precursors)


def _rules(said: Any, *, at_start: bool) -> tuple[Rule, ...]:
    """With a last one that always holds: what no rule takes ends the request."""
    if isinstance(said, str):
        return (Rule(said),)
    rules = tuple(
        Rule(one["go"], _when(one["when"], at_start) if "when" in one else None) for one in said
    )
    if rules[-1].when is None:
        return rules
    return (*rules, Rule(END))


def _when(said: Values, at_start: bool) -> When:
    return When(
        labels={key: _several(values) for key, values in said.get("label", {}).items()},
        matches=said.get("matches", ""),
        classifier=said.get("classifier", ""),
        classes=_several(said.get("is", [])),
        confidence_below=said.get("confidence_below"),
        scores_below=said.get("score_below", {}),
        of=subject_of(said, at_start=at_start),
    )


def _several(said: Any) -> tuple[str, ...]:
    if isinstance(said, str):
        return (said,)
    return tuple(said)
