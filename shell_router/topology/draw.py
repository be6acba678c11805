"""Topologies as text for the terminal."""

from collections.abc import Iterator, Sequence

from shell_router.early_exit.settings import EarlyExit
from shell_router.topology.graph import Conditional, Graph, Topology
from shell_router.topology.rules import START, Rule

_ABOVE = "↑ above"


def draw(graph: Graph) -> str:
    """Draw a topology: its size and description, and then the graph."""
    lines = [f"{graph.name}: {_size(graph)}"]
    if graph.description:
        lines.append(graph.description)
    drawn = _draw_steps(graph) if isinstance(graph, Conditional) else _draw_agents(graph)
    return "\n".join([*lines, "", *drawn, ""])


def _size(graph: Graph) -> str:
    agents = count(len(graph.agents), "agent")
    if isinstance(graph, Conditional):
        return f"{count(len(graph.steps), 'step')}, {agents}"
    return f"{agents} in {count(len(graph.layers), 'layer')}"


def _draw_agents(topology: Topology) -> Iterator[str]:
    """Draw the graph as a tree from the root down, then clusters and prefill.

    An agent that several successors read is drawn once, and elsewhere marked as standing above. The
    same holds for all precursors of an agent, if another has the same.
    """
    yield from _draw_tree(topology)
    yield ""
    width = max((len(cluster.id) for cluster in topology.clusters), default=0)
    yield "Clusters:" if topology.clusters else "Clusters: none"
    for cluster in topology.clusters:
        agents = cluster.agents
        names = ", ".join(agents)
        if len(agents) > 4:
            names = f"{agents[0]} ... {agents[-1]}, {len(agents)} agents"
        yield f"  {cluster.id:<{width}}  {_exit_text(cluster.early_exit)}; {names}"
    yield _prefill_line(topology)


def _draw_tree(topology: Topology) -> Iterator[str]:
    drawn: set[str] = set()
    first_reader: dict[tuple[str, ...], str] = {}
    stack: list[tuple[str, str, str]] = [("", "", topology.root.id)]
    while stack:
        indent, branch, agent_id = stack.pop()
        mark = f"  {_ABOVE}" if agent_id in drawn else ""
        yield f"{indent}{branch}{_label(topology, agent_id)}{mark}"
        if mark:
            continue
        drawn.add(agent_id)
        precursors = topology.agents[agent_id].precursors
        inner = indent + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        if len(precursors) > 1 and precursors in first_reader:
            yield (
                f"{inner}└─ the {len(precursors)} precursors of {first_reader[precursors]}  "
                f"{_ABOVE}"
            )
            continue
        first_reader[precursors] = agent_id
        last = len(precursors) - 1
        stack += reversed(
            [(inner, "└─ " if n == last else "├─ ", agent) for n, agent in enumerate(precursors)]
        )


def _label(topology: Topology, agent_id: str) -> str:
    cluster = topology.cluster_of.get(agent_id)
    place = f"  ({cluster.id})" if cluster else ""
    return f"{agent_id} [{topology.agents[agent_id].model_name}]{place}"


def _exit_text(early_exit: EarlyExit | None) -> str:
    if early_exit is None:
        return "no early exit"
    if early_exit.policy == "quorum":
        return f"cut off {early_exit.grace_s:g} s after {count(early_exit.min_completed, 'output')}"
    bound = f">= {early_exit.threshold:g}"
    if early_exit.max_changed_percent is not None:
        bound = f"that changes {early_exit.max_changed_percent:g} % of answers"
    if early_exit.policy == "in_flight":
        agreed = count(early_exit.min_completed, "equal answer")
        text = f"early exit in flight at support {bound}, from {agreed} on"
        if early_exit.skip_aggregation:
            text += ", aggregation skipped"
        return text
    start = f"from {count(early_exit.min_completed, 'output')} on"
    if early_exit.policy == "first_answer":
        start = "asked first" if early_exit.ask_first else "started together"
    text = f"early exit {early_exit.policy}"
    if early_exit.needs.has_threshold:
        text += f" {bound}"
    if early_exit.needs.reads_tau:
        text += f", tau {early_exit.tau:g}"
    return f"{text}, {start}"


def _prefill_line(topology: Topology) -> str:
    prefill = topology.prefill
    if not prefill.incremental:
        return "Prefill: when all precursors have ended"
    size = "adaptive chunks"
    if prefill.chunk_tokens != "adaptive":
        size = f"chunks of {count(prefill.chunk_tokens, 'token')}"
    order = "as declared" if prefill.slot_order == "declared" else "by expected finish"
    return f"Prefill: incremental, {size}, slots {order}"


def count(number: int, noun: str) -> str:
    """Write `1 agent`, `2 agents`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _draw_steps(topology: Conditional) -> Iterator[str]:
    """Draw the steps in order, each with its model or topology and its rules; then classifiers."""
    yield START
    yield from _rule_branches(topology.start)
    for step in topology.steps.values():
        reads = f", reads {', '.join(step.reads)}" if step.reads else ""
        agents = step.topology.agents
        target = f"{step.topology.name}: {count(len(agents), 'agent')}"
        if len(agents) == 1 and step.root == step.id:
            target = agents[step.id].model_name
        answer = f", answers with {step.answer}" if step.answer else ""
        yield f"{step.id} [{target}]{reads}{answer}"
        yield from _rule_branches(step.then)
    for classifier in topology.classifiers.values():
        examples = ", ".join(
            f"{label} ({count(len(texts), 'example')})"
            for label, texts in classifier.examples.items()
        )
        yield f"Classifier {classifier.id}: {examples}"


def _rule_branches(rules: Sequence[Rule]) -> Iterator[str]:
    unconditional = "otherwise" if len(rules) > 1 else "always"
    for number, rule in enumerate(rules, start=1):
        yield f"{'└─' if number == len(rules) else '├─'} {rule.when or unconditional} -> {rule.go}"
