"""From the plain values of a checked file with steps to a `Conditional`."""

from collections.abc import Mapping
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import Any

from shell_router.topology.assemble import agent_of
from shell_router.topology.conditional import Conditional, Step
from shell_router.topology.graph import Topology
from shell_router.topology.layered import Values
from shell_router.topology.rule_checks import subject_of
from shell_router.topology.rules import END, Classifier, Rule, Subject, When
from shell_router.topology.step_checks import predecessors


def assemble_steps(file: Values, *, name: str, topologies: Mapping[str, Topology]) -> Conditional:
    """Build what a checked file describes; `topologies` hold those that its steps name."""
    own = file.get("name", name)
    order = TopologicalSorter(predecessors(file)).static_order()
    return Conditional(
        name=own,
        start=_rules(file["start"], at_start=True),
        steps={step: _step(step, own, file, topologies) for step in order},
        classifiers={one: _classifier(one, said) for one, said in file.get("classifiers", {}).items()},
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
    rules = tuple(Rule(one["go"], _when(one["when"], at_start) if "when" in one else None) for one in said)
    return rules if rules[-1].when is None else (*rules, Rule(END))


def _when(said: Values, at_start: bool) -> When:
    of: Subject = "request" if subject_of(said, at_start=at_start) == "request" else "output"
    return When(
        labels={key: _several(values) for key, values in said.get("label", {}).items()},
        matches=said.get("matches", ""),
        classifier=said.get("classifier", ""),
        classes=_several(said.get("is", [])),
        confidence_below=said.get("confidence_below"),
        scores_below=said.get("score_below", {}),
        of=of,
    )


def _classifier(name: str, said: Values) -> Classifier:
    examples = {label: tuple(texts) for label, texts in said["examples"].items()}
    return Classifier(name, examples, said.get("min_similarity", -1.0))


def _several(said: Any) -> tuple[str, ...]:
    return (said,) if isinstance(said, str) else tuple(said)
