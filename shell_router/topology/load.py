"""Topology files to checked topologies."""

from collections.abc import Collection
from pathlib import Path

from shell_router.errors import TopologyError
from shell_router.topology.assemble import assemble
from shell_router.topology.checks import form_problems, graph_problems, name_problems
from shell_router.topology.document import Document, Problem, read_document
from shell_router.topology.grammar import check
from shell_router.topology.graph import Topology
from shell_router.topology.syntax import TOPOLOGY


def load_topology(path: Path, *, models: Collection[str] | None = None) -> Topology:
    """Read the topology in the file at `path`. Raises TopologyError; see `parse_topology`."""
    return parse_topology(_read(path), source=str(path), models=models)


def parse_topology(text: str, *, source: str, models: Collection[str] | None = None) -> Topology:
    """Read the topology that `text` describes; `source` names it in errors and, where it has no name, gives it one.

    With `models` every model alias must be one of them, and the topology's name none. Raises TopologyError, whose
    message holds one `source:line: problem` per line.
    """
    return _checked(read_document(text, source=source), models)


def load_folder(path: Path, *, models: Collection[str] | None = None) -> dict[str, Topology]:
    """Read every .yaml and .yml file of a folder, by topology name. Raises TopologyError naming every problem."""
    if not path.is_dir():
        raise TopologyError(f"{path}:1: This is not a folder.", remedy="Name a folder of topology files.")
    files = sorted(file for ending in ("*.yaml", "*.yml") for file in path.glob(ending))
    topologies: dict[str, Topology] = {}
    home: dict[str, Path] = {}
    errors: list[TopologyError] = []
    for file in files:
        try:
            document = read_document(_read(file), source=str(file))
            topology = _checked(document, models)
            document.refuse(_taken(topology.name, home))
        except TopologyError as error:
            errors.append(error)
        else:
            topologies[topology.name] = topology
            home[topology.name] = file
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise TopologyError("\n".join(map(str, errors)))
    return topologies


def _read(path: Path) -> str:
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


def _checked(document: Document, models: Collection[str] | None) -> Topology:
    file = document.value
    document.refuse(check(TOPOLOGY, file, ()))
    stem = Path(document.source).stem
    document.refuse(form_problems(file))
    if "name" not in file:
        document.refuse(_unnamed(stem))
    document.refuse(name_problems(file, models))
    document.refuse(graph_problems(file))
    topology = assemble(file, name=stem)
    if models is not None and topology.name in models:
        document.refuse([_named_as_a_model(topology.name)])
    return topology


def _named_as_a_model(name: str) -> Problem:
    message = f"The topology's name, '{name}', is a model's too, and requests choose by name."
    return Problem(("name",), message, "Rename one of them.")


def _unnamed(stem: str) -> list[Problem]:
    if not list(check(TOPOLOGY.fields["name"], stem, ())):
        return []
    return [Problem((), f"The file's name, {stem!r}, cannot be the topology's name.", "Add 'name'.")]


def _taken(name: str, home: dict[str, Path]) -> list[Problem]:
    if name not in home:
        return []
    return [Problem(("name",), f"The name '{name}' is already that of {home[name]}.", "Rename one of them.")]
