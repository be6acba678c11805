"""What the form of a file with steps cannot show: names and rules that lead nowhere, cycles, unreachable steps."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from shell_router.topology.document import Path, Problem, Values
from shell_router.topology.forms import spelled, suggestion
from shell_router.topology.rules import END, START, pattern_error
from shell_router.topology.syntax import MAX_STEPS


def rules_of(file: Values) -> Iterator[tuple[str, Path, Values]]:
    """Every rule as the file's form allows: START or the step that is asked, where it stands, and what it says.

    A bare step id is a rule without a condition.
    """
    lists: list[tuple[str, Path]] = [(START, ("start",))]
    lists += [(step, ("steps", step, "then")) for step, said in file["steps"].items() if "then" in said]
    for place, at in lists:
        said = file["start"] if place == START else file["steps"][place]["then"]
        if isinstance(said, str):
            yield place, at, {"go": said}
        else:
            yield from ((place, (*at, position), rule) for position, rule in enumerate(said))


def rule_problems(file: Values) -> Iterator[Problem]:
    """Targets, classifiers and classes that do not exist; conditions that cannot be asked; rules never reached."""
    targets = [*file["steps"], END]
    always: dict[str, Path] = {}
    used: set[str] = set()
    for place, at, rule in rules_of(file):
        if place in always:
            wrong = f"{spelled(at)} is never reached: {spelled(always[place])} always holds."
            yield Problem(at, wrong, "Put the rule without 'when' last.")
        if rule["go"] not in targets or (place == START and rule["go"] == END):
            known = list(file["steps"]) if place == START else targets
            where = (*at, "go") if isinstance(at[-1], int) else at
            yield Problem(where, f"'{rule['go']}' is not a step.", suggestion(rule["go"], known))
        if "when" in rule:
            yield from _when_problems(rule["when"], (*at, "when"), at_start=place == START)
            yield from _class_problems(rule["when"], (*at, "when"), file.get("classifiers", {}))
            used.add(rule["when"].get("classifier", ""))
        else:
            always.setdefault(place, at)
    if START not in always:
        wrong = "A request may meet no rule of 'start'."
        yield Problem(("start",), wrong, "End it with a rule without 'when', such as {go: ...}.")
    for classifier in file.get("classifiers", {}):
        if classifier not in used:
            at_it = ("classifiers", classifier)
            yield Problem(at_it, f"No rule uses the classifier '{classifier}'.", "Remove it, or use it in a rule.")


def subject_of(when: Values, *, at_start: bool) -> str:
    """Which text a condition speaks of."""
    return str(when.get("of", "request" if at_start else "output"))


def _when_problems(when: Values, at: Path, *, at_start: bool) -> Iterator[Problem]:
    if not when.keys() - {"of"}:
        yield Problem(at, f"{spelled(at)} has no condition.", "Add one, or leave 'when' out.")
    elif "of" in when and not {"matches", "classifier"} & when.keys():
        yield Problem((*at, "of"), f"{spelled(at)} reads no text.", "Remove 'of', or add 'matches' or 'classifier'.")
    if at_start and ("confidence_below" in when or subject_of(when, at_start=True) == "output"):
        key = "of" if "of" in when else "confidence_below"
        yield Problem((*at, key), "At the start there is no output yet.", "Ask about the request.")
    if error := pattern_error(when.get("matches", "")):
        remedy = "Patterns are RE2's: no look-around, no back-references."
        yield Problem((*at, "matches"), f"{spelled((*at, 'matches'))} is not a regular expression: {error}.", remedy)


def _class_problems(when: Values, at: Path, classifiers: Values) -> Iterator[Problem]:
    name = when.get("classifier")
    if (name is None) != ("is" not in when):
        wrong = f"{spelled(at)} has only one of 'classifier' and 'is'."
        yield Problem(at, wrong, "Write both: which classifier, and which class.")
        return
    if name is None:
        return
    if name not in classifiers:
        yield Problem((*at, "classifier"), f"Unknown classifier '{name}'.", suggestion(name, list(classifiers)))
        return
    classes = list(classifiers[name]["examples"])
    named = when["is"] if isinstance(when["is"], list) else [when["is"]]
    for one in named:
        if one not in classes:
            wrong = f"The classifier '{name}' has no class '{one}'."
            yield Problem((*at, "is"), wrong, suggestion(one, classes))


ONLY_WITH_STEPS = ("start", "classifiers")
NOT_WITH_STEPS = ("clusters", "early_exit", "prefill", "on_failure")
_OF_AN_AGENT = ("model", "precursors", "prompt", "sampling", "timeout_s", "drafts")


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
        yield Problem((), "No step is named as the first.", "Add 'start', a step's id or rules.")
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
            yield Problem(at, f"A step is named '{step}', a reserved name.", "Rename it.")
        if "topology" in said:
            yield from _topology_problems(at, said, topologies, with_steps)
        else:
            yield from _agent_problems(at, said, file)
        yield from precursor_problems("step", step, said.get("precursors", ()), steps)
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


def precursor_problems(kind: str, one: str, precursors: Sequence[str], known: Collection[str]) -> Iterator[Problem]:
    """Precursors of an agent or a step that are itself, not there, or named twice."""
    for position, precursor in enumerate(precursors):
        at: Path = (f"{kind}s", one, "precursors", position)
        reads = f"{kind.capitalize()} '{one}' reads"
        if precursor == one:
            yield Problem(at, f"{reads} itself.", "Remove it from its own precursors.")
        elif precursor not in known:
            wrong = f"{reads} '{precursor}', which is not {'an agent' if kind == 'agent' else 'a step'}."
            yield Problem(at, wrong, suggestion(precursor, [other for other in known if other != one]))
        elif precursor in precursors[:position]:
            yield Problem(at, f"{reads} '{precursor}' twice.", "Name it once.")
