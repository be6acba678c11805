"""Graphs as values: a topology of agents, and a conditional topology of steps."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal

from annotated_types import Interval

from shell_router.core.budget import UNLIMITED, Budget
from shell_router.core.exact_json import Values
from shell_router.early_exit.settings import EarlyExit
from shell_router.files.types import Count, Switch
from shell_router.routing.increments import SlotOrder
from shell_router.topology.prompting import PROPOSER, Prompt
from shell_router.topology.rules import END, Classifier, Rule

AUTO = "auto"
"""The model of an agent whose model is chosen for each request."""

VOTE = "vote"
"""Stands for the model's name where an agent votes."""


FanOut = Literal["turn", "request"]
"""How often the agents below the root run: once for each user message, or in every request."""

TEMPLATE_VARIABLES = "Variables of the model's chat template, such as `enable_thinking: false`."


@dataclass(frozen=True, slots=True)
class Agent:
    """A node of a graph. Topology files may set the fields that have a description.

    `precursors` stand in slot order. The model AUTO is chosen among `candidates`, or among the
    deployment's models if there are none. `given` are outputs that exist before the agent starts,
    each with the name of its author; they fill slots before those of precursors. An agent that
    `votes` asks no model: it forwards the output that most precursors agree with, whose answer
    has the most confidence, or that its last precursor, a judge, names. `fallbacks` replace the
    model, in order, if it fails before it has written anything.
    """

    id: str
    model: str
    precursors: tuple[str, ...] = ()
    prompt: Annotated[Prompt, "The agent's prompt."] = PROPOSER
    sampling: Annotated[Values, "SGLang's sampling parameters."] = field(default_factory=dict)
    on_failure: Annotated[
        Literal["fail", "drop"],
        "A failed agent fails the request, or its slot is left out; a failed root always fails it.",
    ] = "fail"
    timeout_s: Annotated[
        float,
        Interval(gt=0, le=86_400),
        "Seconds the agent may take from its start to its end.",
    ] = 600.0
    candidates: tuple[str, ...] = ()
    given: tuple[tuple[str, str], ...] = ()
    votes: str = ""
    drafts: Annotated[
        Switch,
        "Draft its output from its prompt, where its engine can; on for agents that read others.",
    ] = False
    chat_template_kwargs: Annotated[Values, TEMPLATE_VARIABLES] = field(default_factory=dict)
    max_thinking_tokens: Annotated[
        Count | None,
        "Tokens after which its thinking is ended; needs the model's `reasoning_parser`.",
    ] = None
    readers_get: Annotated[
        Literal["answer", "all"],
        "What other agents read and early exit compares: 'answer', or 'all', with its thinking.",
    ] = "answer"
    tools: Annotated[
        Switch | None,
        "Let it call the request's tools, also below the root; by default only the root may.",
    ] = None
    fallbacks: tuple[str, ...] = ()

    @property
    def model_name(self) -> str:
        """The model as people read it."""
        if self.votes:
            return f"vote by {self.votes}"
        return " or ".join(self.candidates) or self.model

    @property
    def voters(self) -> tuple[str, ...]:
        """The precursors whose outputs its vote may forward."""
        return self.precursors[:-1] if self.votes == "judge" else self.precursors


@dataclass(frozen=True, slots=True)
class Cluster:
    """Agents that are judged together; with `early_exit` the unfinished ones may be cut off."""

    id: str
    agents: tuple[str, ...]
    early_exit: EarlyExit | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """Whether and how successors are prefilled while their precursors decode.

    This is incremental prefill of Faster-MoA, section 4.3.
    """

    incremental: Annotated[Switch, "Prefill successors while precursors decode."] = True
    chunk_tokens: Annotated[
        Count | Literal["adaptive"],
        "New tokens per prefill-only update; with 'adaptive' an update goes out when it pays.",
    ] = "adaptive"
    slot_order: Annotated[
        SlotOrder,
        "'declared', or 'expected_finish' to put the precursor expected to end first in the first "
        "slot.",
    ] = "declared"


@dataclass(frozen=True)
class Topology:
    """A checked graph without cycles, with one root that every agent reaches.

    `agents` is in topological order, precursors first; the root is last. An agent is in at most one
    cluster. `root_reserve_s` is 0 where no time is kept for the root. `budget` is for each request.
    """

    name: str
    agents: Mapping[str, Agent]
    clusters: tuple[Cluster, ...] = ()
    prefill: Prefill = Prefill()
    description: str = ""
    fan_out: FanOut = "turn"
    root_reserve_s: float = 0.0
    budget: Budget = UNLIMITED

    @property
    def keeps_proposals(self) -> bool:
        """Whether its root goes on with what the other agents gave to the turn's first request."""
        return self.fan_out == "turn" and len(self.agents) > 1 and not self.root.votes

    @cached_property
    def root(self) -> Agent:
        """The one agent without successors; its output is the answer."""
        return list(self.agents.values())[-1]

    @cached_property
    def callers(self) -> frozenset[str]:
        """The agents below the root that may call tools."""
        agents = self.agents.values()
        return frozenset(agent.id for agent in agents if agent.tools and agent.id != self.root.id)

    def may_call(self, agent: Agent) -> bool:
        """Return whether the agent may call the request's tools."""
        if agent.id == self.root.id:
            return not agent.votes and agent.tools is not False
        return agent.id in self.callers

    @cached_property
    def asked_first(self) -> frozenset[str]:
        """The agents that must have ended before any other starts."""
        return frozenset(
            cluster.agents[0]
            for cluster in self.clusters
            if cluster.early_exit is not None and cluster.early_exit.ask_first
        )

    @cached_property
    def answering(self) -> frozenset[str]:
        """The agents whose streams are the answer: the root."""
        return frozenset({self.root.id})

    @cached_property
    def models(self) -> frozenset[str]:
        """The models that its agents name; AUTO may be among them."""
        callers = [agent for agent in self.agents.values() if not agent.votes]
        return frozenset(model for agent in callers for model in (agent.model, *agent.fallbacks))

    @cached_property
    def voters(self) -> Mapping[str, bool]:
        """The agents that votes read, and whether their outputs may become the answer."""
        voters: dict[str, bool] = {}
        for agent in reversed(tuple(self.agents.values())):
            if agent.votes:
                answers = agent.id == self.root.id or voters.get(agent.id, False)
                for precursor in agent.voters:
                    voters[precursor] = answers or voters.get(precursor, False)
        return voters

    @cached_property
    def waits_for(self) -> Mapping[str, tuple[str, ...]]:
        """The agents that must end before an agent's prompt is complete, by agent."""
        return {agent.id: agent.precursors for agent in self.agents.values()}

    @property
    def parts(self) -> "tuple[Topology, ...]":
        """The graphs that run as a whole: the topology itself."""
        return (self,)

    @cached_property
    def most_agents(self) -> int:
        """The number of agents that may run at a time."""
        return len(self.agents)

    @cached_property
    def successors(self) -> Mapping[str, tuple[str, ...]]:
        """The agents whose prompts hold an agent's output, by agent."""
        readers: dict[str, list[str]] = {agent: [] for agent in self.agents}
        for agent in self.agents.values():
            for precursor in agent.precursors:
                readers[precursor].append(agent.id)
        return {agent: tuple(several) for agent, several in readers.items()}

    @cached_property
    def cluster_of(self) -> Mapping[str, Cluster]:
        """The cluster of each agent that has one."""
        return {agent: cluster for cluster in self.clusters for agent in cluster.agents}

    def readers_of(self, cluster: Cluster) -> tuple[str, ...]:
        """Return the agents that read all of the cluster and nothing else."""
        members = set(cluster.agents)
        return tuple(
            agent.id
            for agent in self.agents.values()
            if set(agent.precursors) == members and not agent.given
        )

    @cached_property
    def embeds(self) -> bool:
        """Whether an early exit has to embed outputs."""
        return any(
            cluster.early_exit is not None and cluster.early_exit.needs.embeds
            for cluster in self.clusters
        )

    @cached_property
    def layers(self) -> tuple[tuple[str, ...], ...]:
        """The agents by longest distance from a leaf, leaves first."""
        depth: dict[str, int] = {}
        for agent in self.agents.values():
            depth[agent.id] = 1 + max((depth[p] for p in agent.precursors), default=-1)
        layers: list[list[str]] = [[] for _ in range(1 + max(depth.values()))]
        for agent_id, level in depth.items():
            layers[level].append(agent_id)
        return tuple(tuple(layer) for layer in layers)

    def with_models(self, chosen: Mapping[str, str]) -> "Topology":
        """Return the graph with the models that were chosen for agents."""
        if not chosen:
            return self
        decided = {
            agent: replace(self.agents[agent], model=model, candidates=())
            for agent, model in chosen.items()
        }
        return replace(self, agents={**self.agents, **decided})

    def inside(self, step: str) -> "Topology":
        """Return the graph with agents and clusters named `step/...`, unique in a request."""

        def rename(ids: Iterable[str]) -> tuple[str, ...]:
            return tuple(f"{step}/{each}" for each in ids)

        moved = [
            replace(agent, id=f"{step}/{agent.id}", precursors=rename(agent.precursors))
            for agent in self.agents.values()
        ]
        clusters = tuple(
            replace(cluster, id=f"{step}/{cluster.id}", agents=rename(cluster.agents))
            for cluster in self.clusters
        )
        return replace(self, agents={agent.id: agent for agent in moved}, clusters=clusters)

    def find_needed(self, gone: Collection[str]) -> frozenset[str]:
        """Return the agents whose output can still reach the root once `gone` have ended."""
        needed: set[str] = set()
        frontier = [self.root.id]
        while frontier:
            agent = frontier.pop()
            if agent not in needed and agent not in gone:
                needed.add(agent)
                frontier.extend(self.agents[agent].precursors)
        return frozenset(needed)


@dataclass(frozen=True)
class Step:
    """An agent, as a topology of one, or a whole topology, with agents named `step/...`.

    `reads` are earlier steps whose outputs stand in the agent's prompt, if they ran; if none did,
    its prompt is `unread_prompt`. `then` says which step follows; its last rule always holds, but
    for a rule for failure. If the request ends here, the earlier step `answer` gives the answer.
    """

    id: str
    topology: Topology
    then: tuple[Rule, ...] = (Rule(END),)
    reads: tuple[str, ...] = ()
    unread_prompt: Prompt = PROPOSER
    answer: str = ""

    @property
    def root(self) -> str:
        """The agent whose output is the step's."""
        return self.topology.root.id

    @property
    def leads_to(self) -> tuple[str, ...]:
        """The steps that may follow, END included, each once."""
        return tuple(dict.fromkeys(rule.go for rule in self.then))

    @property
    def is_last(self) -> bool:
        """Whether nothing can follow, and its own output is the answer."""
        return self.leads_to == (END,) and not self.answer

    @property
    def reads_confidence(self) -> bool:
        """Whether a rule asks how sure its output is."""
        return any(
            rule.when is not None and rule.when.confidence_below is not None for rule in self.then
        )


@dataclass(frozen=True)
class Conditional:
    """Steps that rules choose, one after the other, without cycles.

    `steps` are in topological order, and some request may reach each. `start` chooses the first
    step; its last rule always holds.
    """

    name: str
    start: tuple[Rule, ...]
    steps: Mapping[str, Step]
    classifiers: Mapping[str, Classifier] = field(default_factory=dict)
    description: str = ""
    fan_out: FanOut = "turn"
    budget: Budget = UNLIMITED

    @property
    def keeps_proposals(self) -> bool:
        """Whether the last step goes on with what earlier steps gave to a turn's first request."""
        return self.fan_out == "turn"

    @property
    def parts(self) -> tuple[Topology, ...]:
        """The graphs that run as a whole, one per step."""
        return tuple(step.topology for step in self.steps.values())

    @cached_property
    def most_agents(self) -> int:
        """The number of agents that may run at a time: those of the largest step."""
        return max(len(part.agents) for part in self.parts)

    @cached_property
    def agents(self) -> Mapping[str, Agent]:
        """The agents of all steps."""
        return {agent.id: agent for part in self.parts for agent in part.agents.values()}

    @cached_property
    def answering(self) -> frozenset[str]:
        """The agents whose streams are the answer: the roots of steps that are always the last."""
        return frozenset(step.root for step in self.steps.values() if step.is_last)

    @cached_property
    def may_answer(self) -> frozenset[str]:
        """The steps whose output may be the answer."""
        ends = [step for step in self.steps.values() if END in step.leads_to]
        return frozenset(step.answer or step.id for step in ends)

    @cached_property
    def preceded_by(self) -> Mapping[str, tuple[str, ...]]:
        """The steps that may lead to a step directly, by step."""
        before: dict[str, list[str]] = {step: [] for step in self.steps}
        for step in self.steps.values():
            for target in step.leads_to:
                if target != END:
                    before[target].append(step.id)
        return {step: tuple(several) for step, several in before.items()}

    @cached_property
    def waits_for(self) -> Mapping[str, tuple[str, ...]]:
        """The agents that must end before an agent's prompt is complete, by agent.

        They are its precursors, or the roots of the steps that lead to its step.
        """
        return {
            agent.id: agent.precursors
            or tuple(self.steps[before].root for before in self.preceded_by[step.id])
            for step in self.steps.values()
            for agent in step.topology.agents.values()
        }

    @cached_property
    def scored_models(self) -> tuple[str, ...]:
        """The models whose predicted scores some rule reads."""
        rules = [*self.start, *(rule for step in self.steps.values() for rule in step.then)]
        return tuple(
            dict.fromkeys(model for rule in rules if rule.when for model in rule.when.scores_below)
        )

    @property
    def embeds(self) -> bool:
        """Whether a classifier or an early exit has to embed texts."""
        return bool(self.classifiers) or any(part.embeds for part in self.parts)


Graph = Topology | Conditional
"""A graph that requests may name."""
