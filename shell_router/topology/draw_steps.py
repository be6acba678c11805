"""A topology with steps as text for the terminal, and as a Mermaid flowchart."""

from collections.abc import Iterator, Sequence

from shell_router.topology.conditional import Conditional, Step
from shell_router.topology.draw import count, escaped
from shell_router.topology.rules import END, START, Rule


def draw_steps_terminal(topology: Conditional) -> str:
    """The steps in order, each with what it asks and its rules; then the classifiers."""
    sizes = f"{count(len(topology.steps), 'step')}, {count(len(topology.agents), 'agent')}"
    head = [f"{topology.name}: {sizes}"]
    head += [topology.description] if topology.description else []
    lines = [*head, "", START, *_branches(topology.start)]
    for step in topology.steps.values():
        lines += [_asked(step), *_branches(step.then)]
    return "\n".join([*lines, *_classifier_lines(topology)]) + "\n"


def draw_steps_mermaid(topology: Conditional) -> str:
    """The steps as a Mermaid flowchart, each rule on its way."""
    names = {START: "start", END: "done"} | {step: f"s{number}" for number, step in enumerate(topology.steps)}
    lines = ["flowchart LR", "    start((start))", "    done((end))"]
    lines += [
        f'    {names[step.id]}["{escaped(step.id)}<br/>{escaped(_what(step))}"]' for step in topology.steps.values()
    ]
    places = {START: topology.start} | {step.id: step.then for step in topology.steps.values()}
    for place, rules in places.items():
        lines += [f'    {names[place]} -- "{escaped(told)}" --> {names[rule.go]}' for told, rule in _told(rules)]
    return "\n".join(lines) + "\n"


def _branches(rules: Sequence[Rule]) -> Iterator[str]:
    for number, (told, rule) in enumerate(_told(rules), start=1):
        yield f"{'└─' if number == len(rules) else '├─'} {told} -> {rule.go}"


def _told(rules: Sequence[Rule]) -> Iterator[tuple[str, Rule]]:
    unconditional = "otherwise" if len(rules) > 1 else "always"
    return ((unconditional if rule.when is None else str(rule.when), rule) for rule in rules)


def _asked(step: Step) -> str:
    reads = f", reads {', '.join(step.reads)}" if step.reads else ""
    return f"{step.id} [{_what(step)}]{reads}"


def _what(step: Step) -> str:
    """The model of an agent, or the topology and its size."""
    agents = step.topology.agents
    if len(agents) == 1 and step.root == step.id:
        return agents[step.id].model_name
    return f"{step.topology.name}: {count(len(agents), 'agent')}"


def _classifier_lines(topology: Conditional) -> Iterator[str]:
    for one in topology.classifiers.values():
        examples = ", ".join(f"{label} ({count(len(texts), 'example')})" for label, texts in one.examples.items())
        yield f"Classifier {one.id}: {examples}"
