"""Topology files to checked topologies, one document at a time; `catalog` has those that name each other."""

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from shell_router.errors import TopologyError
from shell_router.topology.assemble import assemble, assemble_steps
from shell_router.topology.checks import form_problems, graph_problems, model_problems, name_problems
from shell_router.topology.document import Document, Problem, read_document, read_text
from shell_router.topology.forms import check
from shell_router.topology.graph import AUTO, Graph, Topology
from shell_router.topology.step_checks import step_form_problems, step_graph_problems, step_name_problems
from shell_router.topology.syntax import TOPOLOGY

Models = Collection[str] | None
"""Aliases that topologies may name; None where they are not known."""

Needs = Callable[[Graph], Iterable[Problem]]
"""What a checked graph needs and the deployment lacks."""

NO_GRAPHS: Mapping[str, Graph] = MappingProxyType({})


def nothing_lacks(_: Graph) -> Iterable[Problem]:
    """Where it is not known what the deployment has."""
    return ()


def load_topology(path: Path, *, models: Models = None) -> Topology:
    """Read the topology in the file at `path`. Raises TopologyError; see `parse_topology`."""
    return parse_topology(read_text(path), source=str(path), models=models)


def parse_topology(text: str, *, source: str, models: Models = None) -> Topology:
    """Read the topology that `text` describes; `source` names it in errors and, where it has no name, gives it one.

    With `models` every model alias must be one of them, and the topology's name none. One with steps is refused, for
    callers that run agents alone. Raises TopologyError, whose message holds one `source:line: problem` per line.
    """
    document = formed(read_document(text, source=source))
    if "steps" in document.value:
        remedy = "Name one of agents, such as one that a step asks."
        document.refuse([Problem(("steps",), "A topology with steps cannot be used here.", remedy)])
    graph = link(document, models)
    assert isinstance(graph, Topology)
    return graph


def read_file(path: Path) -> Document:
    """The document in the file at `path`, its form checked. Raises TopologyError."""
    return formed(read_document(read_text(path), source=str(path)))


def formed(document: Document) -> Document:
    """The document, its form checked. Raises its error."""
    document.refuse(check(TOPOLOGY, document.value, ()))
    document.refuse([*form_problems(document.value), *step_form_problems(document.value)])
    if "name" not in document.value and document.lines is not None:
        document.refuse(_unnamed(Path(document.source).stem))
    return document


def name_of(document: Document) -> str:
    """The topology's name: the document's own, else its file's."""
    return str(document.value.get("name", Path(document.source).stem))


def link(
    document: Document,
    models: Models = None,
    needs: Needs = nothing_lacks,
    graphs: Mapping[str, Graph] = NO_GRAPHS,
    with_steps: Collection[str] = (),
) -> Graph:
    """The graph of a document whose form is checked. Raises the document's error.

    Steps may name topologies of `graphs`, but none that has steps itself; of those `with_steps` more is not known.
    """
    file, name = document.value, name_of(document)
    plain = {one: graph for one, graph in graphs.items() if isinstance(graph, Topology)} if "steps" in file else {}
    if "steps" in file:
        others = {*with_steps, *(graphs.keys() - plain.keys())}
        document.refuse(chain(model_problems(file, models), step_name_problems(file, plain, others)))
        document.refuse(step_graph_problems(file))
    else:
        document.refuse(name_problems(file, models))
        document.refuse(graph_problems(file))
    if models is not None and (name in models or name == AUTO):
        message = f"The topology's name, '{name}', is a model's too, and requests choose by name."
        document.refuse([Problem(("name",), message, "Rename one of them.")])
    graph: Graph = assemble_steps(file, name=name, topologies=plain) if "steps" in file else assemble(file, name=name)
    document.refuse(needs(graph))
    return graph


def _unnamed(stem: str) -> list[Problem]:
    if not list(check(TOPOLOGY.fields["name"], stem, ())):
        return []
    return [Problem((), f"The file's name, {stem!r}, cannot be the topology's name.", "Add 'name'.")]


def files_in(path: Path) -> list[Path]:
    """The topology files of a folder, by name. Raises TopologyError where it is none."""
    if not path.is_dir():
        raise TopologyError(f"{path}:1: This is not a folder.", remedy="Name a folder of topology files.")
    return sorted(file for ending in ("*.yaml", "*.yml") for file in path.glob(ending))
