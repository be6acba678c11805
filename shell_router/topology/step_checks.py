"""What the form of a file with steps cannot show: names that lead nowhere, rules that nobody asks, circles."""

from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from shell_router.topology.document import Path, Problem
from shell_router.topology.grammar import spelled, suggestion
from shell_router.topology.layered import Values
from shell_router.topology.rule_checks import rule_problems, rules_of
from shell_router.topology.rules import END, START
from shell_router.topology.step_syntax import MAX_STEPS

ONLY_WITH_STEPS = ("start", "classifiers")
NOT_WITH_STEPS = ("clusters", "early_exit", "prefill", "on_failure")
_OF_AN_AGENT = ("model", "precursors", "prompt", "sampling", "timeout_s")


def step_form_problems(file: Values) -> Iterator[Problem]:
    """Keys that do not go with the form of the graph, and a start."""
    if "steps" not in file:
        for key in ONLY_WITH_STEPS:
            if key in file:
                yield Problem((key,), f"'{key}' goes with 'steps'.", f"Remove '{key}', or describe steps.")
        return
    for key in NOT_WITH_STEPS:
        if key in file:
            remedy = "Write it in the topology that a step names, and remove it here."
            yield Problem((key,), f"'{key}' does not go with 'steps'.", remedy)
    if "on_failure" in file.get("defaults", {}):
        wrong = "A step that fails fails its request: 'on_failure' does not go with 'steps'."
        yield Problem(("defaults", "on_failure"), wrong, "Remove it.")
    if "start" not in file:
        yield Problem((), "It is not said which step is first.", "Add 'start', a step's id or rules.")
    if len(file["steps"]) > MAX_STEPS:
        yield Problem(("steps",), f"There are {len(file['steps'])} steps.", f"Write at most {MAX_STEPS}.")


def step_name_problems(
    file: Values, topologies: Collection[str], with_steps: Collection[str] = ()
) -> Iterator[Problem]:
    """Steps, topologies, classifiers and classes that do not exist, and rules that say what cannot be.

    Steps may name `topologies`, and none of those `with_steps`.
    """
    steps = file["steps"]
    for step, said in steps.items():
        at: Path = ("steps", step)
        if step in (START, END):
            yield Problem(at, f"A step is named '{step}', which has a meaning of its own.", "Rename it.")
        if "topology" in said:
            yield from _topology_problems(at, said, topologies, with_steps)
        else:
            yield from _agent_problems(at, said, file)
        yield from _precursor_problems(step, said.get("precursors", ()), steps)
    yield from rule_problems(file)


def step_graph_problems(file: Values) -> Iterator[Problem]:
    """Circles; else steps that nothing leads to, and outputs that are never there when they are read."""
    before = predecessors(file)
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        circle = error.args[1]
        drawn = " -> ".join(circle)
        remedy = "Remove one of these ways; for a second round write steps of its own."
        yield Problem(("steps", circle[0], "then"), f"Steps lead in a circle: {drawn}.", remedy)
        return
    reached = _reached(file)
    for step in file["steps"]:
        if step not in reached:
            wrong = f"Step '{step}' is unreachable: neither 'start' nor any step that can run leads to it."
            yield Problem(("steps", step), wrong, "Let a rule lead to it, or remove it.")
    earlier = _earlier(before)
    for step, said in file["steps"].items():
        for position, read in enumerate(said.get("precursors", ())):
            if read not in earlier[step]:
                wrong = f"Step '{step}' reads '{read}', which never runs before it."
                yield Problem(("steps", step, "precursors", position), wrong, "Name steps that lead to it.")


def predecessors(file: Values) -> dict[str, set[str]]:
    """Per step those with a rule that leads to it."""
    before: dict[str, set[str]] = {step: set() for step in file["steps"]}
    for place, _, rule in rules_of(file):
        if place != START and rule["go"] != END:
            before[rule["go"]].add(place)
    return before


def _reached(file: Values) -> set[str]:
    ways: dict[str, list[str]] = {}
    for place, _, rule in rules_of(file):
        ways.setdefault(place, []).append(rule["go"])
    reached: set[str] = set()
    frontier = [START]
    while frontier:
        for target in ways.get(frontier.pop(), ()):
            if target != END and target not in reached:
                reached.add(target)
                frontier.append(target)
    return reached


def _earlier(before: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Per step all that may have run before it."""
    found: dict[str, set[str]] = {}
    for step in TopologicalSorter(before).static_order():
        found[step] = before[step].union(*(found[one] for one in before[step]))
    return found


def _topology_problems(
    at: Path, said: Values, topologies: Collection[str], with_steps: Collection[str]
) -> Iterator[Problem]:
    name = said["topology"]
    for key in _OF_AN_AGENT:
        if key in said:
            wrong = f"{spelled(at)} asks the topology '{name}', and has '{key}', which only agents have."
            yield Problem((*at, key), wrong, f"Remove '{key}'; the topology's own file says how it is asked.")
    if name in with_steps:
        wrong = f"The topology '{name}' has steps itself."
        yield Problem((*at, "topology"), wrong, "Write its steps here, or name one without steps.")
    elif name not in topologies:
        yield Problem((*at, "topology"), f"Unknown topology '{name}'.", suggestion(name, sorted(topologies)))


def _agent_problems(at: Path, said: Values, file: Values) -> Iterator[Problem]:
    if "model" not in said and "model" not in file.get("defaults", {}):
        yield Problem(at, f"{spelled(at)} has neither a model nor a topology.", "Give it a 'model' or a 'topology'.")
    if "slot" in said.get("prompt", {}) and not said.get("precursors"):
        wrong = f"The prompt of {spelled(at)} has a slot, but no earlier step fills it."
        yield Problem((*at, "prompt", "slot"), wrong, "Add 'precursors', or remove 'slot'.")


def _precursor_problems(step: str, precursors: list[str], steps: Values) -> Iterator[Problem]:
    for position, precursor in enumerate(precursors):
        at = ("steps", step, "precursors", position)
        if precursor not in steps:
            wrong = f"Step '{step}' reads '{precursor}', which is not a step."
            yield Problem(at, wrong, suggestion(precursor, [other for other in steps if other != step]))
        elif precursor in precursors[:position]:
            yield Problem(at, f"Step '{step}' reads '{precursor}' twice.", "Name it once.")
