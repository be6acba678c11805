"""Check what types cannot: contradictory keys, unknown names, graphs that cannot run.

The checks run in stages. A stage runs only on files that the stages before accept, so that a
mistake is reported once.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from shell_router.core.sampling import SAMPLING_NAMES
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
    """Check that the graph is described once, and that its layers and its keys fit together."""
    forms = [form for form in GRAPH_FORMS if form in file]
    choices = ", ".join(f"'{form}'" for form in GRAPH_FORMS)
    if not forms:
        yield Problem((), "No graph is described.", f"Add one of {choices}.")
    for extra in forms[1:]:
        wrong = f"The graph is described twice, by '{forms[0]}' and by '{extra}'."
        yield Problem((extra,), wrong, f"Keep one of {choices}.")
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
        ("model", "fallbacks", "tools", *OF_STEPS),
        "{at} votes and asks no model, so it cannot have '{key}'.",
        "Remove '{key}', or 'vote'.",
    ),
    (
        "topology",
        ("model", "fallbacks", "precursors", *OF_STEPS),
        "{at} asks a topology, so it cannot have '{key}'.",
        "Remove '{key}': only the topology's own file can set it.",
    ),
    (
        "steps",
        ("clusters", "early_exit", "prefill", "on_failure", "root_reserve_s"),
        "'{key}' does not go with 'steps'.",
        "Remove it here, and write it in the topology that a step names.",
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
"""A key, the keys that do not go with it, the message, and the remedy."""


def _clashes(at: Path, block: Values) -> Iterator[Problem]:
    name = spell(at)
    for sign, others, wrong, remedy in CLASHES:
        clashing = [key for key in others if key in block] if sign in block else []
        for key in clashing:
            yield Problem((*at, key), wrong.format(at=name, key=key), remedy.format(key=key))
    for key in block.get("sampling") or {}:
        alike = [name for name in SAMPLING_NAMES if name.endswith(f"_{key}")]
        alike += get_close_matches(key, SAMPLING_NAMES, 1, 0.65)
        if alike and key not in SAMPLING_NAMES:
            place = (*at, "sampling", key)
            yield Problem(place, f"Unknown key {spell(place)}.", f"Did you mean '{alike[0]}'?")
    if block.get("readers_get") == "all" and "max_thinking_tokens" in block:
        wrong = f"{name} has max_thinking_tokens, but its readers get its thinking, too."
        remedy = "Remove max_thinking_tokens or readers_get."
        yield Problem((*at, "max_thinking_tokens"), wrong, remedy)


def _blocks(file: Values) -> Iterator[tuple[Path, Values]]:
    """Yield the file and all blocks that may hold keys of agents, each with its place."""
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
        wrong = f"The layers hold {sum(shape)} agents."
        yield Problem(at, wrong, f"Write at most {MAX_AGENTS} in all.")
    if shape[-1] != 1:
        wrong = f"The last layer of shape {shape} is not 1."
        yield Problem(at, wrong, f"Write {[*shape, 1]}, or end it with 1.")
    for below, layer in pairwise(shape) if form == "tree" else ():
        if below % layer:
            wrong = (
                f"In a tree {below} agents cannot be shared out evenly among {layer} successors."
            )
            remedy = f"Make {below} a multiple of {layer}, or use the full form, 'agents'."
            yield Problem(at, wrong, remedy)
    if "root_model" in layered and "vote" in layered.get("root", {}):
        wrong = "The root votes, so it asks no model."
        yield Problem((form, "root_model"), wrong, "Remove one of the two.")
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
    steps = len(file["steps"])
    if steps > MAX_STEPS:
        yield Problem(("steps",), f"There are {steps} steps.", f"Write at most {MAX_STEPS}.")


# --- stage 2: names


def name_problems(
    file: Values,
    models: Collection[str] | None,
    topologies: Collection[str],
    with_steps: Collection[str],
) -> Iterator[Problem]:
    """Check that all names exist and may be used where they are.

    Args:
        file: The values of a file whose keys are accepted.
        models: The models that agents may name; None if they are not known.
        topologies: The topologies that steps may name.
        with_steps: Topologies that steps may not name, because they have steps themselves.
    """
    yield from _model_problems(file, models)
    for who, at, block in _nodes(file):
        precursors = block.get("precursors", ())
        yield from _precursor_problems(who, at, precursors, file[str(at[0])])
        prompt = block.get("prompt", {})
        if "slot" in prompt and not precursors:
            yield _idle_slot(who, at)
        for precursor in prompt.get("slots", {}):
            if precursor not in precursors:
                place = (*at, "prompt", "slots", precursor)
                wrong = f"{precursor!r} is no precursor of {who}."
                yield Problem(place, wrong, suggest(precursor, list(precursors)))
        name = block.get("topology")
        place = (*at, "topology")
        if name in with_steps:
            remedy = "Write its steps here, or name one without steps."
            yield Problem(place, f"The topology '{name}' has steps itself.", remedy)
        elif name is not None and name not in topologies:
            remedy = suggest(name, sorted(topologies))
            yield Problem(place, f"Unknown topology '{name}'.", remedy)
    if "steps" in file:
        yield from _rule_problems(file)
        yield from _classifier_problems(file)
    else:
        agents = agents_in(file)
        yield from _member_problems(file, agents)
        yield from _vote_problems(file, agents)


def _model_problems(file: Values, models: Collection[str] | None) -> Iterator[Problem]:
    for who, at, block in _nodes(file):
        if "model" not in file.get("defaults", {}) and not (
            {"model", "vote", "topology"} & block.keys()
        ):
            missing = "neither a model nor a topology" if at[0] == "steps" else "no model"
            remedy = "Give it a 'model', or one to 'defaults'."
            yield Problem(at, f"{who} has {missing}.", remedy)
    for at, model, may_be_auto in _models_in(file):
        if model == AUTO and not may_be_auto:
            remedy = "Write it alone as 'model', or name models."
            yield Problem(at, "'auto' cannot be one of several models.", remedy)
        elif model != AUTO and models is not None and model not in models:
            yield Problem(at, f"Unknown model {show(model)}.", suggest(model, sorted(models)))


def _models_in(file: Values) -> Iterator[tuple[Path, str, bool]]:
    """Yield the place of every model name in the file, the name, and whether it may be `auto`."""
    for at, block in _blocks(file):
        model = block.get("model", [])
        if isinstance(model, str):
            yield (*at, "model"), model, True
        else:
            yield from (((*at, "model", n), name, False) for n, name in enumerate(model))
        fallbacks = enumerate(block.get("fallbacks", ()))
        yield from (((*at, "fallbacks", n), name, False) for n, name in fallbacks)
    for form in LAYERED:
        layered = file.get(form, {})
        models = enumerate(layered.get("models", ()))
        yield from (((form, "models", n), name, True) for n, name in models)
        if "root_model" in layered:
            yield (form, "root_model"), layered["root_model"], True
    for _, at, rule in rules_of(file):
        scored = rule.get("when", {}).get("score_below", ())
        yield from (((*at, "when", "score_below", name), name, False) for name in scored)


def _precursor_problems(
    who: str, at: Path, precursors: Iterable[str], nodes: Collection[str]
) -> Iterator[Problem]:
    for position, precursor in enumerate(precursors):
        place = (*at, "precursors", position)
        if precursor == at[-1]:
            yield Problem(place, f"{who} reads itself.", "Remove it from its own precursors.")
        elif precursor not in nodes:
            noun = "an agent" if at[0] == "agents" else "a step"
            others = [node for node in nodes if node != at[-1]]
            wrong = f"{who} reads '{precursor}', which is not {noun}."
            yield Problem(place, wrong, suggest(precursor, others))


def _vote_problems(file: Values, agents: Mapping[str, Values]) -> Iterator[Problem]:
    form = next(form for form in GRAPH_FORMS if form in file)
    for agent, block in agents.items():
        place: Path = (form, agent, "vote") if form == "agents" else (form, "shape")
        if "vote" in block and len(block.get("precursors", ())) < 2:
            wrong = f"Agent '{agent}' votes, but reads fewer than two agents."
            yield Problem(place, wrong, "Give it at least two precursors, or a model.")
        elif block.get("vote") == "judge":
            *voters, judge = block["precursors"]
            judging = agents.get(judge, {})
            if "vote" in judging or judging.get("precursors") != voters:
                wrong = f"'{judge}' is the judge of '{agent}', but does not read just the others."
                remedy = (
                    "Let the last precursor be an agent with a model that reads the rest in order."
                )
                yield Problem(place, wrong, remedy)


def _member_problems(file: Values, agents: Collection[str]) -> Iterator[Problem]:
    home: dict[str, str] = {}
    for cluster, block in file.get("clusters", {}).items():
        for position, agent in enumerate(block["agents"]):
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
    """Check that targets exist, conditions can be evaluated, and rules can be reached."""
    always: dict[str, Path] = {}
    for step in {START, END} & file["steps"].keys():
        yield Problem(("steps", step), f"A step is named '{step}', a reserved name.", "Rename it.")
    for step, at, rule in rules_of(file):
        if step in always:
            wrong = f"{spell(at)} is never reached: {spell(always[step])} always holds."
            yield Problem(at, wrong, "Put the rule without 'when' last.")
        targets = list(file["steps"]) if step == START else [*file["steps"], END]
        if rule["go"] not in targets:
            place = (*at, "go") if isinstance(at[-1], int) else at
            yield Problem(place, f"'{rule['go']}' is not a step.", suggest(rule["go"], targets))
        if "when" in rule:
            yield from _when_problems(rule["when"], (*at, "when"), at_start=step == START)
        else:
            always.setdefault(step, at)
    if START not in always:
        remedy = "End it with a rule without 'when', such as {go: ...}."
        yield Problem(("start",), "It may happen that no rule of 'start' holds.", remedy)


def _when_problems(when: Values, at: Path, *, at_start: bool) -> Iterator[Problem]:
    if not when.keys() - {"of"}:
        yield Problem(at, f"{spell(at)} has no condition.", "Add one, or leave 'when' out.")
    elif "of" in when and not {"matches", "classifier"} & when.keys():
        remedy = "Remove 'of', or add 'matches' or 'classifier'."
        yield Problem((*at, "of"), f"{spell(at)} reads no text.", remedy)
    if at_start and ("confidence_below" in when or subject_of(when, at_start=True) == "output"):
        key = "of" if "of" in when else "confidence_below"
        yield Problem((*at, key), "At the start there is no output yet.", "Ask about the request.")
    if error := pattern_error(when.get("matches", "")):
        place = (*at, "matches")
        remedy = "Patterns are RE2's: no look-around, no back-references, at most 1 MiB compiled."
        yield Problem(place, f"{spell(place)} is not a regular expression: {error}.", remedy)


def _classifier_problems(file: Values) -> Iterator[Problem]:
    """Check that rules name existing classifiers and classes, and that no classifier is unused."""
    classifiers = file.get("classifiers", {})
    unused = dict.fromkeys(classifiers)
    for _, at, rule in rules_of(file):
        when = rule.get("when", {})
        name = when.get("classifier")
        unused.pop(name, None)
        if ("classifier" in when) != ("is" in when):
            wrong = f"{spell((*at, 'when'))} has only one of 'classifier' and 'is'."
            remedy = "Write both: which classifier, and which class."
            yield Problem((*at, "when"), wrong, remedy)
        elif name is not None and name not in classifiers:
            remedy = suggest(name, list(classifiers))
            yield Problem((*at, "when", "classifier"), f"Unknown classifier '{name}'.", remedy)
        elif name is not None:
            classes = list(classifiers[name]["examples"])
            labels = [when["is"]] if isinstance(when["is"], str) else when["is"]
            for label in labels:
                if label not in classes:
                    wrong = f"The classifier '{name}' has no class '{label}'."
                    yield Problem((*at, "when", "is"), wrong, suggest(label, classes))
    for name in unused:
        wrong = f"No rule uses the classifier '{name}'."
        yield Problem(("classifiers", name), wrong, "Remove it, or use it in a rule.")


# --- stage 3: the graph


def graph_problems(file: Values) -> Iterator[Problem]:
    """Check that the graph has no cycles and can run.

    A graph of agents has one root, which cannot be cut off or dropped, and connects all agents.
    Each step can be reached, and reads only outputs of steps that may run before it.
    """
    has_steps = "steps" in file
    if has_steps:
        before: Mapping[str, Collection[str]] = predecessors(file)
    else:
        before = {name: block.get("precursors", ()) for name, block in agents_in(file).items()}
    try:
        order = list(TopologicalSorter(before).static_order())
    except CycleError as error:
        yield _cycle(error.args[1], has_steps=has_steps)
        return
    yield from _order_problems(file, before, order) if has_steps else _root_problems(file, before)


def _cycle(nodes: list[str], *, has_steps: bool) -> Problem:
    drawn = " -> ".join(nodes)
    if has_steps:
        remedy = "Remove one of these rules; write further steps for a second round."
        return Problem(("steps", nodes[0], "then"), f"Steps lead in a circle: {drawn}.", remedy)
    remedy = f"Remove one of these links, say '{nodes[0]}' from the precursors of '{nodes[1]}'."
    place = ("agents", nodes[1], "precursors")
    return Problem(place, f"Outputs run in a circle: {drawn}.", remedy)


def _order_problems(
    file: Values, before: Mapping[str, Collection[str]], order: list[str]
) -> Iterator[Problem]:
    first = {rule["go"] for step, _, rule in rules_of(file) if step == START}
    reached: set[str] = set()
    earlier: dict[str, set[str]] = {}
    certain: dict[str, set[str]] = {}
    failing = {step for step, block in file["steps"].items() if "on_failure" in block}
    for step in order:
        earlier[step] = set(before[step]).union(*(earlier[each] for each in before[step]))
        ways = [certain[each] | ({each} - failing) for each in before[step]]
        certain[step] = set() if step in first or not ways else set.intersection(*ways)
        if step in first or not reached.isdisjoint(before[step]):
            reached.add(step)
    for step, block in file["steps"].items():
        if step not in reached:
            wrong = f"Step '{step}' is unreachable: neither 'start' nor any step that can run "
            remedy = "Let a rule lead to it, or remove it."
            yield Problem(("steps", step), f"{wrong}leads to it.", remedy)
        for position, precursor in enumerate(block.get("precursors", ())):
            if precursor not in earlier[step]:
                place = ("steps", step, "precursors", position)
                wrong = f"Step '{step}' reads '{precursor}', which never runs before it."
                yield Problem(place, wrong, "Name steps that lead to it.")
        answer = block.get("answer")
        if answer is not None and answer not in certain[step]:
            wrong = f"Step '{step}' answers with '{answer}', which need not have run before it."
            yield Problem(("steps", step, "answer"), wrong, suggest(answer, sorted(certain[step])))
        if answer is None and block.get("on_failure") == END:
            wrong = f"If step '{step}' fails, there is no answer."
            remedy = "Add 'answer', an earlier step, or name the step that follows."
            yield Problem(("steps", step, "on_failure"), wrong, remedy)


def _root_problems(file: Values, precursors: Mapping[str, Collection[str]]) -> Iterator[Problem]:
    """Check that there is one root, and no agent without precursors and successors."""
    read = {agent for several in precursors.values() for agent in several}
    ends = [agent for agent in precursors if agent not in read]
    roots = [agent for agent in ends if precursors[agent]] or ends
    for agent in ends:
        if agent not in roots:
            wrong = f"Agent '{agent}' is unreachable: it has neither precursors nor successors."
            remedy = "Name it among another's precursors, or remove it."
            yield Problem(("agents", agent), wrong, remedy)
    if len(roots) == 1:
        yield from _check_root(file, roots[0])
        return
    count = "two" if len(roots) == 2 else len(roots)
    names = " and ".join(f"'{agent}'" for agent in roots)
    wrong = f"The graph has {count} roots: {names} have no successor."
    remedy = (
        "Exactly one agent may have no successor; name the others among some agent's precursors."
    )
    yield Problem(("agents", roots[1]), wrong, remedy)


def _check_root(file: Values, root: str) -> Iterator[Problem]:
    """Check that the root is neither cut off nor dropped."""
    for cluster, block in file.get("clusters", {}).items():
        if root in block["agents"]:
            at: Path = ("clusters", cluster, "agents", block["agents"].index(root))
            wrong = f"Cluster '{cluster}' holds the root '{root}', whose output is the answer."
            yield Problem(at, wrong, "Remove it from the cluster.")
    for form in GRAPH_FORMS:
        if file.get(form, {}).get(root, {}).get("on_failure") == "drop":
            wrong = "The root cannot be dropped: its output is the answer."
            yield Problem((form, root, "on_failure"), wrong, "Write 'fail', or remove it.")
