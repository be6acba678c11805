"""What a file's form cannot show: names that lead nowhere, and graphs that no request could walk.

The checks run in stages, each on what the stage before has found sound, so that one slip is reported once.
"""

from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from shell_router.topology.assemble import agents_in, early_exit_in, prefill_in
from shell_router.topology.document import Path, Problem, Values
from shell_router.topology.forms import shown, spelled, suggestion
from shell_router.topology.graph import AUTO
from shell_router.topology.step_checks import precursor_problems, rules_of
from shell_router.topology.syntax import GRAPH_FORMS, MAX_AGENTS


def form_problems(file: Values) -> Iterator[Problem]:
    """Exactly one description of the graph, layers that fit together, settings that agree."""
    given = [form for form in GRAPH_FORMS if form in file]
    choices = ", ".join(f"'{form}'" for form in GRAPH_FORMS)
    if not given:
        yield Problem((), "No graph is described.", f"Add one of {choices}.")
    for extra in given[1:]:
        remedy = f"Keep one of {choices}."
        yield Problem((extra,), f"The graph is described twice, by '{given[0]}' and by '{extra}'.", remedy)
    for form in ("tree", "all_to_all"):
        if form in file:
            yield from _layer_problems(form, file[form])
    try:
        prefill_in(file)
    except ValueError as error:
        yield Problem(("prefill",), f"prefill: {error}.", "Change one of them.")
    yield from _exit_problems(file)


def name_problems(file: Values, models: Collection[str] | None) -> Iterator[Problem]:
    """Models, precursors and cluster members that do not exist or may not stand where they do."""
    agents = agents_in(file)
    yield from model_problems(file, models)
    for agent, said in agents.items():
        if said.get("readers_get") == "all" and "max_thinking_tokens" in said:
            wrong = f"Agent '{agent}' has max_thinking_tokens, and its readers get all that it writes."
            yield Problem((), wrong, "Leave max_thinking_tokens or readers_get out.")
    for agent, said in file.get("agents", {}).items():
        yield from precursor_problems("agent", agent, said.get("precursors", ()), agents)
        if "slot" in said.get("prompt", {}) and not said.get("precursors"):
            yield _idle_slot(f"'{agent}'", ("agents", agent, "prompt", "slot"))
    for form in ("tree", "all_to_all"):
        if "slot" in file.get(form, {}).get("proposer", {}).get("prompt", {}):
            yield _idle_slot("a proposer", (form, "proposer", "prompt", "slot"))
    yield from _member_problems(file, agents)
    yield from _vote_problems(file, agents)


def graph_problems(file: Values) -> Iterator[Problem]:
    """Cycles; else more than one root, agents that nothing connects, and a root among a cluster's members."""
    precursors = {agent: said.get("precursors", ()) for agent, said in agents_in(file).items()}
    try:
        TopologicalSorter(precursors).prepare()
    except CycleError as error:
        yield _cycle(error.args[1])
        return
    read = {agent for read in precursors.values() for agent in read}
    roots = [agent for agent in precursors if agent not in read]
    yield from _root_problems(roots, precursors)
    if len(roots) == 1:
        yield from _root_misuse(roots[0], file)


def _exit_problems(file: Values) -> Iterator[Problem]:
    base = file.get("early_exit", False)
    said: dict[Path, Any] = {("early_exit",): base} | {
        ("clusters", cluster, "early_exit"): block["early_exit"]
        for cluster, block in file.get("clusters", {}).items()
        if "early_exit" in block
    }
    for at, value in said.items():
        try:
            found = early_exit_in(value, base)
            if found is not None and found.scope == "layer" and "clusters" in file:
                yield Problem(at, "early_exit: 'clusters' says which agents are judged together.", _ONE_SCOPE)
        except ValueError as error:
            yield Problem(at, f"early_exit: {error}.", "Change one of them.")


_ONE_SCOPE = "Remove 'scope', or 'clusters'."


def _layer_problems(form: str, layered: Values) -> Iterator[Problem]:
    shape = layered["shape"]
    at = (form, "shape")
    if sum(shape) > MAX_AGENTS:
        yield Problem(at, f"The layers hold {sum(shape)} agents.", f"Write at most {MAX_AGENTS} in all.")
    if shape[-1] != 1:
        yield Problem(at, f"The last layer of shape {shape} is not 1.", f"Write {[*shape, 1]}, or end it with 1.")
    if form == "all_to_all":
        return
    for below, layer in pairwise(shape):
        if below % layer:
            yield Problem(
                at,
                f"In a tree {below} agents cannot be shared out evenly among {layer} successors.",
                f"Make {below} a multiple of {layer}, or use the full form, 'agents'.",
            )


def model_problems(file: Values, models: Collection[str] | None) -> Iterator[Problem]:
    """Agents without a model, models that do not exist, and choices that make none."""
    yield from _choice_problems(file)
    default = file.get("defaults", {}).get("model")
    for agent, said in file.get("agents", {}).items():
        if "model" not in said and "vote" not in said and default is None:
            yield Problem(("agents", agent), f"Agent '{agent}' has no model.", "Give it, or 'defaults', a 'model'.")
    if models is None:
        return
    for at, model in _scored(file):
        if model not in models:
            yield Problem(at, f"Unknown model {shown(model)}.", suggestion(model, sorted(models)))
    for at, model in _models_named(file):
        if model not in models and model != AUTO:
            yield Problem(at, f"Unknown model {shown(model)}.", suggestion(model, sorted(models)))


def _choice_problems(file: Values) -> Iterator[Problem]:
    """Lists of models that hold `auto`, which stands for a list itself, or to choose from a model twice."""
    for at, said in _blocks(file).items():
        for position, model in enumerate(said.get("fallbacks", ())):
            if model == AUTO:
                yield Problem((*at, "fallbacks", position), "'auto' cannot take a model's place.", "Name the models.")
        named = said.get("model", ())
        for position, model in enumerate(named if isinstance(named, list) else ()):
            if model == AUTO:
                wrong = "'auto' stands for several models itself."
                yield Problem((*at, "model", position), wrong, "Write it alone, or name the models.")
            elif model in named[:position]:
                yield Problem((*at, "model", position), f"Model '{model}' stands twice.", "Name it once.")


def _scored(file: Values) -> Iterator[tuple[Path, str]]:
    """Models that rules between steps ask the chances of."""
    for _, at, rule in rules_of(file) if "steps" in file else ():
        for model in rule.get("when", {}).get("score_below", {}):
            yield (*at, "when", "score_below", model), model


def _blocks(file: Values) -> Mapping[Path, Values]:
    """Where agents' models may stand in the full forms."""
    named: dict[Path, Values] = {
        (form, one): said for form in ("agents", "steps") for one, said in file.get(form, {}).items()
    }
    return {("defaults",): file.get("defaults", {}), **named}


def _models_named(file: Values) -> Iterator[tuple[Path, str]]:
    for at, said in _blocks(file).items():
        named = said.get("model", [])
        if isinstance(named, str):
            yield (*at, "model"), named
        else:
            yield from (((*at, "model", position), model) for position, model in enumerate(named))
        yield from (((*at, "fallbacks", position), model) for position, model in enumerate(said.get("fallbacks", ())))
    for form in ("tree", "all_to_all"):
        layered = file.get(form, {})
        for position, model in enumerate(layered.get("models", ())):
            yield (form, "models", position), model
        if "root_model" in layered:
            yield (form, "root_model"), layered["root_model"]


def _vote_problems(file: Values, agents: Mapping[str, Values]) -> Iterator[Problem]:
    """Votes that have nothing to count, and what only an agent that asks a model can have."""
    blocks: dict[Path, Values] = {("agents", agent): said for agent, said in file.get("agents", {}).items()}
    for form in ("tree", "all_to_all"):
        layered = file.get(form, {})
        blocks |= {(form, role): layered.get(role, {}) for role in ("proposer", "aggregator", "root")}
        if "root_model" in layered and "vote" in layered.get("root", {}):
            yield Problem((form, "root_model"), "The root votes, so that it asks no model.", "Remove one of the two.")
    for at, said in blocks.items():
        for key in ("model", "fallbacks", "prompt", "sampling", "timeout_s", "drafts"):
            if "vote" in said and key in said:
                wrong = f"{spelled(at)} votes, so that it asks no model: it has no '{key}'."
                yield Problem((*at, key), wrong, f"Remove '{key}', or 'vote'.")
    for agent, said in agents.items():
        if "vote" in said and len(said.get("precursors", ())) < 2:
            form = next(one for one in GRAPH_FORMS if one in file)
            place: Path = (form, agent, "vote") if form == "agents" else (form, "shape")
            wrong = f"Agent '{agent}' votes, but reads fewer than two agents."
            yield Problem(place, wrong, "Give it at least two precursors, or a model.")


def _idle_slot(who: str, at: Path) -> Problem:
    remedy = "Add 'precursors', or remove 'slot'."
    return Problem(at, f"The prompt of {who} has a slot, but no precursor to fill it.", remedy)


def _member_problems(file: Values, agents: Collection[str]) -> Iterator[Problem]:
    home: dict[str, str] = {}
    for cluster, said in file.get("clusters", {}).items():
        for position, agent in enumerate(said["agents"]):
            at = ("clusters", cluster, "agents", position)
            if agent not in agents:
                wrong = f"Cluster '{cluster}' holds '{agent}', which is not an agent."
                yield Problem(at, wrong, suggestion(agent, list(agents)))
            elif agent in home:
                twice = f"Agent '{agent}' is in cluster '{home[agent]}' and again in '{cluster}'."
                yield Problem(at, twice, "Keep it in one cluster, once.")
            else:
                home[agent] = cluster


def _cycle(agents: list[str]) -> Problem:
    drawn = " -> ".join(agents)
    remedy = f"Remove one of these links, say '{agents[0]}' from the precursors of '{agents[1]}'."
    return Problem(("agents", agents[1], "precursors"), f"Outputs run in a circle: {drawn}.", remedy)


def _root_problems(roots: list[str], precursors: Mapping[str, Collection[str]]) -> Iterator[Problem]:
    """Of several agents without successors, those without precursors are unreachable, the others roots."""
    connected = [agent for agent in roots if precursors[agent]]
    alone = [agent for agent in roots if connected and agent not in connected]
    for agent in alone:
        unreachable = f"Agent '{agent}' is unreachable: it has neither precursors nor successors."
        yield Problem(("agents", agent), unreachable, "Name it among another's precursors, or remove it.")
    ends = [agent for agent in roots if agent not in alone]
    if len(ends) > 1:
        counts = "two roots" if len(ends) == 2 else f"{len(ends)} roots"
        named = " and ".join(f"'{agent}'" for agent in ends)
        remedy = "Exactly one agent may have no successor; name the others among some agent's precursors."
        yield Problem(("agents", ends[1]), f"The graph has {counts}: {named} have no successor.", remedy)


def _root_misuse(root: str, file: Values) -> Iterator[Problem]:
    for cluster, said in file.get("clusters", {}).items():
        if root in said["agents"]:
            at: Path = ("clusters", cluster, "agents", said["agents"].index(root))
            wrong = f"Cluster '{cluster}' holds the root '{root}', whose output is the answer."
            yield Problem(at, wrong, "Remove it from the cluster.")
    for form in GRAPH_FORMS:
        if file.get(form, {}).get(root, {}).get("on_failure") == "drop":
            at = (form, root, "on_failure")
            yield Problem(at, "The root cannot be dropped: its output is the answer.", "Write 'fail', or remove it.")
