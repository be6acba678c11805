"""Read a topology: check a document's keys, then its names and its graph, and build the graph."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from shell_router.files.document import Document, Problem, read_document, read_text
from shell_router.files.read import check
from shell_router.topology.assemble import assemble, assemble_steps
from shell_router.topology.checks import form_problems, graph_problems, name_problems
from shell_router.topology.graph import AUTO, Graph, Topology
from shell_router.topology.keys import TOPOLOGY, TOPOLOGY_NAME

Models = Collection[str] | None
"""Aliases that topologies may name; None where they are not known."""

Needs = Callable[[Graph], Iterable[Problem]]
"""Problems of a graph that needs what a deployment lacks."""

INLINE = "inline"
"""The name of all topologies inside of requests in metrics and traces; clients make up others."""


def needs_nothing(graph: Graph) -> Iterable[Problem]:
    """Accept every graph, where it is not known what the deployment has."""
    return ()


def load_topology(path: Path, *, models: Models = None) -> Topology:
    """Read the topology in the file at `path`. Raises TopologyError; see `parse_topology`."""
    return parse_topology(read_text(path), source=str(path), models=models)


def parse_topology(text: str, *, source: str, models: Models = None) -> Topology:
    """Read the topology that YAML text describes.

    Args:
        text: A YAML document. One with steps is refused, for callers that run agents alone.
        source: Its name in errors; it also names a topology that has no name.
        models: The aliases that agents may name; the topology's name must be none of them.

    Raises:
        TopologyError: Its message holds one `source:line: problem` per line.
    """
    document = check_keys(read_document(text, source=source))
    if "steps" in document.value:
        remedy = "Name one of agents, such as one that a step asks."
        wrong = "A topology with steps cannot be used here."
        document.require_none([Problem(("steps",), wrong, remedy)])
    graph = link(document, models)
    assert isinstance(graph, Topology)
    return graph


def check_keys(document: Document) -> Document:
    """Check a document's keys and the form of its values, and return it with typed values.

    Raises:
        TopologyError: The document is a file's.
        InvalidField: The document is a client's.
    """
    value, problems = check(TOPOLOGY, document.value)
    document.require_none(problems)
    document.require_none(form_problems(value))
    stem = Path(document.source).stem
    if "name" not in value and document.lines is not None:
        _, problems = check(TOPOLOGY_NAME, stem)
        if problems:
            wrong = f"The file's name, {stem!r}, cannot be the topology's name."
            document.require_none([Problem((), wrong, "Add 'name'.")])
    return replace(document, value=value)


def name_of(document: Document) -> str:
    """Return the topology's name: the document's own, else its file's."""
    return str(document.value.get("name", Path(document.source).stem))


def link(
    document: Document,
    models: Models = None,
    needs: Needs = needs_nothing,
    graphs: Mapping[str, Graph] = MappingProxyType({}),
    with_steps: Collection[str] = (),
) -> Graph:
    """Build the graph of a document whose keys are checked.

    Args:
        document: The document, as `check_keys` returns it.
        models: The aliases that agents may name.
        needs: Says what a graph lacks in the deployment.
        graphs: Topologies that steps may name, unless they have steps themselves.
        with_steps: Names of further topologies that have steps.

    Raises:
        TopologyError: The document is a file's.
        InvalidField: The document is a client's.
    """
    values = document.value
    name = name_of(document)
    plain = {key: graph for key, graph in graphs.items() if isinstance(graph, Topology)}
    conditional = {*with_steps, *(graphs.keys() - plain.keys())}
    document.require_none(name_problems(values, models, plain, conditional))
    document.require_none(graph_problems(values))
    document.require_none(_own_name_problems(name, models))
    if "steps" in values:
        graph: Graph = assemble_steps(values, name=name, topologies=plain)
    else:
        graph = assemble(values, name=name)
        document.require_none(_exit_problems(graph))
    document.require_none(_tool_problems(graph))
    document.require_none(needs(graph))
    return graph


def _exit_problems(topology: Topology) -> Iterable[Problem]:
    sizes = [
        (cluster.early_exit.min_completed, len(cluster.agents))
        for cluster in topology.clusters
        if cluster.early_exit is not None
    ]
    if sizes and all(least > agents for least, agents in sizes):
        wrong = "early_exit.min_completed is above the number of agents in each cluster."
        yield Problem(("early_exit",), wrong, "Lower it.")
    for name in topology.asked_first:
        if topology.agents[name].precursors:
            wrong = f"early_exit.ask_first: {name!r}, the first of its cluster, reads other agents."
            yield Problem((), wrong, "List an agent without precursors first, or remove ask_first.")


def _tool_problems(graph: Graph) -> Iterable[Problem]:
    """Check that agents below a root that call tools can go on in a later request."""
    for part in graph.parts:
        if not part.callers:
            continue
        callers = ", ".join(sorted(part.callers))
        wrong = f"Below the root {callers} may call tools, which does not go with "
        others = {
            "steps": part is not graph,
            "fan_out": part.fan_out == "request",
            "root_reserve_s": part.root_reserve_s > 0,
            "early_exit": any(cluster.early_exit is not None for cluster in part.clusters),
            "vote": any(agent.votes for agent in part.agents.values()),
        }
        remedy = "Remove one of the two: an agent whose calls lack results has not finished."
        for key, clashes in others.items():
            if clashes:
                yield Problem((key,), f"{wrong}{key}.", remedy)
        for agent in sorted(part.callers):
            if part is graph and not CALLER.fullmatch(agent):
                wrong = f"Agent {agent!r} may call tools, and ids of calls name it."
                remedy = "Name it by at most 64 letters, digits, '_' and '-'."
                yield Problem(("agents", agent), wrong, remedy)


CALLER = re.compile("[A-Za-z0-9_-]{1,64}")
"""The name of an agent that ids of calls may hold, as Anthropic's clients allow them."""


def _own_name_problems(name: str, models: Models) -> Iterable[Problem]:
    if models is not None and (name in models or name == AUTO):
        wrong = f"The topology's name, '{name}', is a model's too, and requests choose by name."
        yield Problem(("name",), wrong, "Rename one of them.")
    if name == INLINE:
        wrong = f"The topology's name, '{name}', is that of topologies inside of requests."
        yield Problem(("name",), wrong, "Rename it.")
