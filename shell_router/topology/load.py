"""A topology file to a checked topology."""

from collections.abc import Collection, Mapping
from pathlib import Path

from shell_router.errors import TopologyError
from shell_router.topology.assemble import assemble
from shell_router.topology.assemble_steps import assemble_steps
from shell_router.topology.checks import form_problems, graph_problems, model_problems, name_problems
from shell_router.topology.conditional import Conditional
from shell_router.topology.document import Document, Problem, read_document
from shell_router.topology.grammar import check
from shell_router.topology.graph import Topology
from shell_router.topology.step_checks import step_form_problems, step_graph_problems, step_name_problems
from shell_router.topology.syntax import TOPOLOGY

Models = Collection[str] | None
"""Aliases that topologies may name; None where they are not known."""


def load_topology(path: Path, *, models: Models = None) -> Topology:
    """Read the topology in the file at `path`. Raises TopologyError; see `parse_topology`."""
    return parse_topology(read_text(path), source=str(path), models=models)


def parse_topology(text: str, *, source: str, models: Models = None) -> Topology:
    """Read the topology that `text` describes; `source` names it in errors and, where it has no name, gives it one.

    With `models` every model alias must be one of them, and the topology's name none. One with steps is refused, for
    callers that run agents alone. Raises TopologyError, whose message holds one `source:line: problem` per line.
    """
    document = formed(text, source)
    if has_steps(document):
        remedy = "Name one of agents, such as one that a step asks."
        document.refuse([Problem(("steps",), "A topology with steps cannot be used here.", remedy)])
    return topology_in(document, models)


def parse_steps(
    text: str, *, source: str, topologies: Mapping[str, Topology] | None = None, models: Models = None
) -> Conditional:
    """Read the topology with steps that `text` describes, which may name some of `topologies`.

    Otherwise as `parse_topology`.
    """
    document = formed(text, source)
    if not has_steps(document):
        document.refuse([Problem((), "No steps are described.", "Add 'steps'.")])
    return conditional_in(document, models, topologies or {}, with_steps=())


def read_text(path: Path) -> str:
    """The file's text. Raises TopologyError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TopologyError(
            f"{path}:1: The file cannot be read: {error.strerror}.",
            remedy="Check its name and its permissions.",
        ) from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise TopologyError(f"{path}:{line}: This is not UTF-8 text.", remedy="Save the file as UTF-8.") from error


def formed(text: str, source: str) -> Document:
    """The document in `text`, its form checked. Raises TopologyError."""
    document = read_document(text, source=source)
    document.refuse(check(TOPOLOGY, document.value, ()))
    document.refuse([*form_problems(document.value), *step_form_problems(document.value)])
    if "name" not in document.value:
        document.refuse(_unnamed(Path(source).stem))
    return document


def has_steps(document: Document) -> bool:
    """Which of the two kinds a formed document describes."""
    return "steps" in document.value


def name_of(document: Document) -> str:
    """The name of what a formed document describes."""
    return str(document.value.get("name", Path(document.source).stem))


def topology_in(document: Document, models: Models) -> Topology:
    """The topology that a formed document without steps describes. Raises TopologyError."""
    document.refuse(name_problems(document.value, models))
    document.refuse(graph_problems(document.value))
    _refuse_a_models_name(document, models)
    return assemble(document.value, name=name_of(document))


def conditional_in(
    document: Document, models: Models, topologies: Mapping[str, Topology], with_steps: Collection[str]
) -> Conditional:
    """What a formed document with steps describes; they may name `topologies`, not those `with_steps`.

    Raises TopologyError.
    """
    file = document.value
    document.refuse([*model_problems(file, models), *step_name_problems(file, topologies, with_steps)])
    document.refuse(step_graph_problems(file))
    _refuse_a_models_name(document, models)
    return assemble_steps(file, name=name_of(document), topologies=topologies)


def _refuse_a_models_name(document: Document, models: Models) -> None:
    name = name_of(document)
    if models is not None and name in models:
        message = f"The topology's name, '{name}', is a model's too, and requests choose by name."
        document.refuse([Problem(("name",), message, "Rename one of them.")])


def _unnamed(stem: str) -> list[Problem]:
    if not list(check(TOPOLOGY.fields["name"], stem, ())):
        return []
    return [Problem((), f"The file's name, {stem!r}, cannot be the topology's name.", "Add 'name'.")]
