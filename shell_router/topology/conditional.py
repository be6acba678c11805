"""A topology whose steps run one after the other, each chosen by what the request or the step before says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shell_router.topology.graph import Agent, Topology
from shell_router.topology.rules import END, Classifier, Rule


@dataclass(frozen=True)
class Step:
    """One expert: an agent, which is a topology of one, or a whole topology, with agents named `step/...`.

    `reads` are earlier steps whose outputs stand in the agent's prompt, as far as they ran. `then` says what follows;
    its last rule always holds.
    """

    id: str
    topology: Topology
    then: tuple[Rule, ...] = (Rule(END),)
    reads: tuple[str, ...] = ()

    @property
    def root(self) -> str:
        """The agent whose output is the step's."""
        return self.topology.root.id

    @property
    def leads_to(self) -> tuple[str, ...]:
        """What may follow, END included, each once."""
        return tuple(dict.fromkeys(rule.go for rule in self.then))

    @property
    def is_last(self) -> bool:
        """Whether nothing can follow."""
        return self.leads_to == (END,)

    @property
    def may_be_last(self) -> bool:
        """Whether its output may be the answer."""
        return END in self.leads_to

    @property
    def reads_confidence(self) -> bool:
        """Whether a rule asks how sure its output is."""
        return any(rule.when is not None and rule.when.confidence_below is not None for rule in self.then)


@dataclass(frozen=True)
class Conditional:
    """Steps without circles, all of which some request may reach, in an order in which each stands after those that
    lead to it. `start` chooses the first; its last rule always holds.
    """

    name: str
    start: tuple[Rule, ...]
    steps: Mapping[str, Step]
    classifiers: Mapping[str, Classifier] = field(default_factory=dict)
    description: str = ""

    @property
    def parts(self) -> tuple[Topology, ...]:
        """The graphs that are run as a whole: one per step."""
        return tuple(step.topology for step in self.steps.values())

    @cached_property
    def agents(self) -> Mapping[str, Agent]:
        """The agents of all steps."""
        return {agent.id: agent for part in self.parts for agent in part.agents.values()}

    @cached_property
    def answering(self) -> frozenset[str]:
        """Agents whose tokens are the answer as they come: the roots of steps that nothing can follow."""
        return frozenset(step.root for step in self.steps.values() if step.is_last)

    @cached_property
    def beginning(self) -> frozenset[str]:
        """Agents that may be the first of a request: those of steps that the start leads to which wait for nobody."""
        return frozenset().union(*(self.steps[rule.go].topology.beginning for rule in self.start))

    @cached_property
    def preceded_by(self) -> Mapping[str, tuple[str, ...]]:
        """Per step those that may lead to it directly."""
        found: dict[str, list[str]] = {step: [] for step in self.steps}
        for step in self.steps.values():
            for target in step.leads_to:
                if target != END:
                    found[target].append(step.id)
        return {step: tuple(before) for step, before in found.items()}

    @cached_property
    def waits_for(self) -> Mapping[str, tuple[str, ...]]:
        """Per agent those that end before its prompt is complete: precursors, or roots of steps that lead to its."""
        return {
            agent.id: agent.precursors or tuple(self.steps[before].root for before in self.preceded_by[step.id])
            for step in self.steps.values()
            for agent in step.topology.agents.values()
        }

    @cached_property
    def scored_models(self) -> tuple[str, ...]:
        """Models whose chances of being right some rule asks for."""
        rules = [*self.start, *(rule for step in self.steps.values() for rule in step.then)]
        return tuple(dict.fromkeys(model for rule in rules if rule.when for model in rule.when.scores_below))

    @property
    def embeds(self) -> bool:
        """Whether a classifier or an early exit has to embed texts."""
        return bool(self.classifiers) or any(part.embeds for part in self.parts)


Graph = Topology | Conditional
"""What requests may name."""
