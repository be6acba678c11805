"""Checks that types cannot make: keys that contradict each other, names that lead nowhere, graphs
that cannot run.

The checks run in stages, each on what the stage before has accepted, so that one slip is reported
once.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from shell_router.files.document import Path, Problem, Values, spell
from shell_router.files.read import show, suggest
from shell_router.topology.assemble import (
    agents_in,
    build_early_exit,
    predecessors,
    rules_of,
    subject_of,
)
from shell_router.topology.graph import AUTO
from shell_router.topology.keys import GRAPH_FORMS, MAX_AGENTS, MAX_STEPS, OF_STEPS
from shell_router.topology.rules import END, START, pattern_error

LAYERED = ("tree", "all_to_all")
ROLES = ("proposer", "aggregator", "root")

# --- stage 1: keys


def form_problems(file: Values) -> Iterator[Problem]:
    """Exactly one description of the graph, layers that fit together, and keys that go together."""
    forms = [form for form in GRAPH_FORMS if form in file]
    choices = ", ".join(f"'{form}'" for form in GRAPH_FORMS)
    if not forms:
        yield Problem((), "No graph is described.", f"Add one of {choices}.")
    for extra in forms[1:]:
        remedy = f"Keep one of {choices}."
        yield Problem(
            (extra,), f"The graph is described twice, by '{forms[0]}' and by '{extra}'.", remedy
        )
    if len(forms) != 1:
        return
    for form in LAYERED:
        if form in file:
            yield from _layer_problems(form, file[form])
    for at, block in _blocks(file):
        yield from _clashes(at, block)
    yield from _exit_problems(file)
    if "steps" in file:
        yield from _step_form_problems(file)


CLASHES = (
    (
        "vote",
        ("model", "fallbacks", *OF_STEPS),
        "{at} votes, so that it asks no model: it has no '{key}'.",
        "Remove '{key}', or 'vote'.",
    ),
    (
        "topology",
        ("model", "precursors", *OF_STEPS),
        "{at} asks a topology, and has '{key}', which only agents have.",
        "Remove '{key}'; the topology's own file says how it is asked.",
    ),
    (
        "steps",
        ("clusters", "early_exit", "prefill", "on_failure"),
        "'{key}' does not go with 'steps'.",
        "Write it in the topology that a step names, and remove it here.",
    ),
    *(
        (
            form,
            ("start", "classifiers"),
            "'{key}' goes with 'steps'.",
            "Remove '{key}', or describe steps.",
        )
        for form in GRAPH_FORMS
        if form != "steps"
    ),
)
"""Keys, the keys that do not go with them, and the message and the remedy."""


def _clashes(at: Path, block: Values) -> Iterator[Problem]:
    name = spell(at)
    for sign, others, wrong, remedy in CLASHES:
        clashing = [key for key in others if key in block] if sign in block else []
        for key in clashing:
            yield Problem((*at, key), wrong.format(at=name, key=key), remedy.format(key=key))
    if block.get("readers_get") == "all" and "max_thinking_tokens" in block:
        wrong = f"{name} has max_thinking_tokens, and its readers get all that it writes."
        remedy = "Leave max_thinking_tokens or readers_get out."
        yield Problem((*at, "max_thinking_tokens"), wrong, remedy)


def _blocks(file: Values) -> Iterator[tuple[Path, Values]]:
    """Yield the file and the blocks that hold keys of agents, each with its place."""
    yield (), file
    yield ("defaults",), file.get("defaults", {})
    for form in LAYERED:
        yield from (((form, role), file.get(form, {}).get(role, {})) for role in ROLES)
    yield from ((at, block) for _, at, block in _nodes(file))


def _nodes(file: Values) -> Iterator[tuple[str, Path, Values]]:
    """Yield agents and steps of the full forms: the name in messages, the place, and the keys."""
    for form, noun in (("agents", "Agent"), ("steps", "Step")):
        blocks = file.get(form, {})
        yield from ((f"{noun} '{name}'", (form, name), blocks[name]) for name in blocks)


def _layer_problems(form: str, layered: Values) -> Iterator[Problem]:
    shape = layered["shape"]
    at = (form, "shape")
    if sum(shape) > MAX_AGENTS:
        yield Problem(
            at, f"The layers hold {sum(shape)} agents.", f"Write at most {MAX_AGENTS} in all."
        )
    if shape[-1] != 1:
        yield Problem(
            at,
            f"The last layer of shape {shape} is not 1.",
            f"Write {[*shape, 1]}, or end it with 1.",
        )
    for below, layer in pairwise(shape) if form == "tree" else ():
        if below % layer:
            yield Problem(
                at,
                f"In a tree {below} agents cannot be shared out evenly among {layer} successors.",
                f"Make {below} a multiple of {layer}, or use the full form, 'agents'.",
            )
    if "root_model" in layered and "vote" in layered.get("root", {}):
        yield Problem(
            (form, "root_model"),
            "The root votes, so that it asks no model.",
            "Remove one of the two.",
        )
    if "slot" in layered.get("proposer", {}).get("prompt", {}):
        yield _idle_slot("a proposer", (form, "proposer"))


def _idle_slot(who: str, at: Path) -> Problem:
    wrong = f"The prompt of {who} has a slot, but no precursor to fill it."
    return Problem((*at, "prompt", "slot"), wrong, "Add 'precursors', or remove 'slot'.")


def _exit_problems(file: Values) -> Iterator[Problem]:
    base = file.get("early_exit", False)
    clusters = file.get("clusters", {})
    values: dict[Path, Any] = {("early_exit",): base}
    for cluster, block in clusters.items():
        values["clusters", cluster, "early_exit"] = block.get("early_exit", False)
    for at, value in values.items():
        try:
            early_exit = build_early_exit(value, base)
        except ValueError as error:
            yield Problem(at, f"early_exit: {error}.", "Change one of them.")
        else:
            if early_exit is not None and early_exit.scope == "layer" and clusters:
                wrong = "early_exit: 'clusters' says which agents are judged together."
                yield Problem(at, wrong, "Remove 'scope', or 'clusters'.")


def _step_form_problems(file: Values) -> Iterator[Problem]:
    if "on_failure" in file.get("defaults", {}):
        wrong = "A step that fails fails its request: 'on_failure' does not go with 'steps'."
        yield Problem(("defaults", "on_failure"), wrong, "Remove it.")
    if "start" not in file:
        yield Problem((), "No step is named as the first.", "Add 'start', a step's id or rules.")
    if len(file["steps"]) > MAX_STEPS:
        yield Problem(
            ("steps",), f"There are {len(file['steps'])} steps.", f"Write at most {MAX_STEPS}."
        )


# --- stage 2: names


def name_problems(
    file: Values,
    models: Collection[str] | None,
    topologies: Collection[str] = (),
    with_steps: Collection[str] = (),
) -> Iterator[Problem]:
    """Models, precursors, members, steps, topologies and classes that do not exist or may not stand
    where they do.

    `models` are None where they are not known. Steps may name `topologies`, and none of those
    `with_steps`.
    """
    yield from _model_problems(file, models)
    for who, at, said in _nodes(file):
        yield from _precursor_problems(who, at, said.get("precursors", ()), file[str(at[0])])
        if "slot" in said.get("prompt", {}) and not said.get("precursors"):
            yield _idle_slot(who, at)
        name = said.get("topology")
        if name in with_steps:
            wrong = f"The topology '{name}' has steps itself."
            yield Problem(
                (*at, "topology"), wrong, "Write its steps here, or name one without steps."
            )
        elif name is not None and name not in topologies:
            yield Problem(
                (*at, "topology"),
                f"Unknown topology '{name}'.",
                suggest(name, sorted(topologies)),
            )
    if "steps" in file:
        yield from _rule_problems(file)
    else:
        agents = agents_in(file)
        yield from _member_problems(file, agents)
        yield from _vote_problems(file, agents)


def _model_problems(file: Values, models: Collection[str] | None) -> Iterator[Problem]:
    default = file.get("defaults", {}).get("model")
    for who, at, said in _nodes(file):
        if default is None and not {"model", "vote", "topology"} & said.keys():
            if at[0] == "steps":
                kinds = "neither a model nor a topology"
            else:
                kinds = "no model"
            yield Problem(at, f"{who} has {kinds}.", "Give it a 'model', or one to 'defaults'.")
    for at, model, may_be_auto in _models_named(file):
        if model == AUTO and not may_be_auto:
            yield Problem(
                at,
                "'auto' stands for several models itself.",
                "Write it alone as 'model', or name models.",
            )
        elif model != AUTO and models is not None and model not in models:
            yield Problem(at, f"Unknown model {show(model)}.", suggest(model, sorted(models)))


def _models_named(file: Values) -> Iterator[tuple[Path, str, bool]]:
    """Every model that the file names, with its place, and whether `auto` may stand there."""
    for at, said in _blocks(file):
        named = said.get("model", [])
        if isinstance(named, str):
            yield (*at, "model"), named, True
        for key, several in (("model", named), ("fallbacks", said.get("fallbacks", ()))):
            if not isinstance(several, str):
                yield from (
                    ((*at, key, position), model, False) for position, model in enumerate(several)
                )
    for form in LAYERED:
        layered = file.get(form, {})
        yield from (
            ((form, "models", position), one, True)
            for position, one in enumerate(layered.get("models", ()))
        )
        if "root_model" in layered:
            yield (form, "root_model"), layered["root_model"], True
    for _, at, rule in rules_of(file):
        yield from (
            ((*at, "when", "score_below", one), one, False)
            for one in rule.get("when", {}).get("score_below", ())
        )


def _precursor_problems(
    who: str, at: Path, precursors: Iterable[str], known: Collection[str]
) -> Iterator[Problem]:
    for position, precursor in enumerate(precursors):
        place = (*at, "precursors", position)
        if precursor == at[-1]:
            yield Problem(place, f"{who} reads itself.", "Remove it from its own precursors.")
        elif precursor not in known:
            if at[0] == "agents":
                noun = "an agent"
            else:
                noun = "a step"
            wrong = f"{who} reads '{precursor}', which is not {noun}."
            yield Problem(
                place, wrong, suggest(precursor, [other for other in known if other != at[-1]])
            )


def _vote_problems(file: Values, agents: Mapping[str, Values]) -> Iterator[Problem]:
    for agent, said in agents.items():
        if "vote" in said and len(said.get("precursors", ())) < 2:
            form = next(one for one in GRAPH_FORMS if one in file)
            place: Path = (form, agent, "vote") if form == "agents" else (form, "shape")
            wrong = f"Agent '{agent}' votes, but reads fewer than two agents."
            yield Problem(place, wrong, "Give it at least two precursors, or a model.")


def _member_problems(file: Values, agents: Collection[str]) -> Iterator[Problem]:
    home: dict[str, str] = {}
    for cluster, said in file.get("clusters", {}).items():
        for position, agent in enumerate(said["agents"]):
            at = ("clusters", cluster, "agents", position)
            if agent not in agents:
                wrong = f"Cluster '{cluster}' holds '{agent}', which is not an agent."
                yield Problem(at, wrong, suggest(agent, list(agents)))
            elif agent in home:
                twice = f"Agent '{agent}' is in cluster '{home[agent]}' and again in '{cluster}'."
                yield Problem(at, twice, "Keep it in one cluster, once.")
            else:
                home[agent] = cluster


def _rule_problems(file: Values) -> Iterator[Problem]:
    """Targets and classifiers that do not exist; conditions that cannot be asked; rules never
    reached.
    """
    targets = [*file["steps"], END]
    classifiers = file.get("classifiers", {})
    always: dict[str, Path] = {}
    used: set[str] = set()
    for step in {START, END} & file["steps"].keys():
        yield Problem(("steps", step), f"A step is named '{step}', a reserved name.", "Rename it.")
    for place, at, rule in rules_of(file):
        if place in always:
            wrong = f"{spell(at)} is never reached: {spell(always[place])} always holds."
            yield Problem(at, wrong, "Put the rule without 'when' last.")
        if rule["go"] not in targets or (place == START and rule["go"] == END):
            if place == START:
                known = list(file["steps"])
            else:
                known = targets
            if isinstance(at[-1], int):
                where = (*at, "go")
            else:
                where = at
            yield Problem(where, f"'{rule['go']}' is not a step.", suggest(rule["go"], known))
        if "when" in rule:
            yield from _when_problems(rule["when"], (*at, "when"), at_start=place == START)
            yield from _class_problems(rule["when"], (*at, "when"), classifiers)
            used.add(rule["when"].get("classifier", ""))
        else:
            always.setdefault(place, at)
    if START not in always:
        wrong = "A request may meet no rule of 'start'."
        yield Problem(("start",), wrong, "End it with a rule without 'when', such as {go: ...}.")
    for one in classifiers.keys() - used:
        yield Problem(
            ("classifiers", one),
            f"No rule uses the classifier '{one}'.",
            "Remove it, or use it in a rule.",
        )


def _when_problems(when: Values, at: Path, *, at_start: bool) -> Iterator[Problem]:
    if not when.keys() - {"of"}:
        yield Problem(at, f"{spell(at)} has no condition.", "Add one, or leave 'when' out.")
    elif "of" in when and not {"matches", "classifier"} & when.keys():
        yield Problem(
            (*at, "of"),
            f"{spell(at)} reads no text.",
            "Remove 'of', or add 'matches' or 'classifier'.",
        )
    if at_start and ("confidence_below" in when or subject_of(when, at_start=True) == "output"):
        key = "of" if "of" in when else "confidence_below"
        yield Problem((*at, key), "At the start there is no output yet.", "Ask about the request.")
    if error := pattern_error(when.get("matches", "")):
        remedy = "Patterns are RE2's: no look-around, no back-references, at most 1 MiB compiled."
        yield Problem(
            (*at, "matches"),
            f"{spell((*at, 'matches'))} is not a regular expression: {error}.",
            remedy,
        )


def _class_problems(when: Values, at: Path, classifiers: Values) -> Iterator[Problem]:
    name = when.get("classifier")
    named = when.get("is", [])
    if (name is None) != ("is" not in when):
        wrong = f"{spell(at)} has only one of 'classifier' and 'is'."
        yield Problem(at, wrong, "Write both: which classifier, and which class.")
    elif name is not None and name not in classifiers:
        yield Problem(
            (*at, "classifier"),
            f"Unknown classifier '{name}'.",
            suggest(name, list(classifiers)),
        )
    elif name is not None:
        classes = list(classifiers[name]["examples"])
        for one in named if isinstance(named, list) else [named]:
            if one not in classes:
                wrong = f"The classifier '{name}' has no class '{one}'."
                yield Problem((*at, "is"), wrong, suggest(one, classes))


# --- stage 3: the graph


def graph_problems(file: Values) -> Iterator[Problem]:
    """Of agents: cycles; else several roots, agents that nothing connects, and a root that may be
    cut off or dropped.

    Of steps: cycles; else steps that nothing leads to, and outputs that are never there when they
    are read.
    """
    if "steps" in file:
        before: Mapping[str, Collection[str]] = predecessors(file)
    else:
        before = {agent: said.get("precursors", ()) for agent, said in agents_in(file).items()}
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError as error:
        yield _cycle(error.args[1], is_of_steps="steps" in file)
        return
    yield from (
        _order_problems(file, before, order) if "steps" in file else _root_problems(file, before)
    )


def _cycle(circle: list[str], *, is_of_steps: bool) -> Problem:
    drawn = " -> ".join(circle)
    if is_of_steps:
        remedy = "Remove one of these ways; for a second round write steps of its own."
        return Problem(("steps", circle[0], "then"), f"Steps lead in a circle: {drawn}.", remedy)
    remedy = f"Remove one of these links, say '{circle[0]}' from the precursors of '{circle[1]}'."
    return Problem(
        ("agents", circle[1], "precursors"), f"Outputs run in a circle: {drawn}.", remedy
    )


def _order_problems(
    file: Values, before: Mapping[str, Collection[str]], order: list[str]
) -> Iterator[Problem]:
    first = {rule["go"] for place, _, rule in rules_of(file) if place == START}
    reached: set[str] = set()
    earlier: dict[str, set[str]] = {}
    for step in order:
        earlier[step] = set(before[step]).union(*(earlier[one] for one in before[step]))
        if step in first or not reached.isdisjoint(before[step]):
            reached.add(step)
    for step, said in file["steps"].items():
        if step not in reached:
            wrong = (
                f"Step '{step}' is unreachable: neither 'start' nor any step that can run "
                "leads to it."
            )
            yield Problem(("steps", step), wrong, "Let a rule lead to it, or remove it.")
        for position, read in enumerate(said.get("precursors", ())):
            if read not in earlier[step]:
                wrong = f"Step '{step}' reads '{read}', which never runs before it."
                yield Problem(
                    ("steps", step, "precursors", position), wrong, "Name steps that lead to it."
                )


def _root_problems(file: Values, precursors: Mapping[str, Collection[str]]) -> Iterator[Problem]:
    """Of several agents without successors, those without precursors are unreachable, the others
    roots.
    """
    read = {agent for read in precursors.values() for agent in read}
    ends = [agent for agent in precursors if agent not in read]
    roots = [agent for agent in ends if precursors[agent]] or ends
    for agent in ends:
        if agent not in roots:
            unreachable = (
                f"Agent '{agent}' is unreachable: it has neither precursors nor successors."
            )
            yield Problem(
                ("agents", agent), unreachable, "Name it among another's precursors, or remove it."
            )
    if len(roots) > 1:
        if len(roots) == 2:
            counts = "two roots"
        else:
            counts = f"{len(roots)} roots"
        named = " and ".join(f"'{agent}'" for agent in roots)
        remedy = (
            "Exactly one agent may have no successor; name the others among some agent's "
            "precursors."
        )
        yield Problem(
            ("agents", roots[1]), f"The graph has {counts}: {named} have no successor.", remedy
        )
        return
    (root,) = roots
    for cluster, said in file.get("clusters", {}).items():
        if root in said["agents"]:
            at: Path = ("clusters", cluster, "agents", said["agents"].index(root))
            wrong = f"Cluster '{cluster}' holds the root '{root}', whose output is the answer."
            yield Problem(at, wrong, "Remove it from the cluster.")
    for form in GRAPH_FORMS:
        if file.get(form, {}).get(root, {}).get("on_failure") == "drop":
            at = (form, root, "on_failure")
            yield Problem(
                at,
                "The root cannot be dropped: its output is the answer.",
                "Write 'fail', or remove it.",
            )
