"""Topology files to checked topologies: one file, or many whose steps may name each other's topologies."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from shell_router.errors import TopologyError
from shell_router.topology.assemble import assemble, assemble_steps
from shell_router.topology.checks import form_problems, graph_problems, model_problems, name_problems
from shell_router.topology.document import Document, Problem, read_document
from shell_router.topology.forms import check
from shell_router.topology.graph import Conditional, Graph, Topology
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
    document = _formed(text, source)
    if "steps" in document.value:
        remedy = "Name one of agents, such as one that a step asks."
        document.refuse([Problem(("steps",), "A topology with steps cannot be used here.", remedy)])
    return _topology(document, models)


def parse_steps(
    text: str, *, source: str, topologies: Mapping[str, Topology] | None = None, models: Models = None
) -> Conditional:
    """Read the topology with steps that `text` describes, which may name some of `topologies`.

    Otherwise as `parse_topology`.
    """
    document = _formed(text, source)
    if "steps" not in document.value:
        document.refuse([Problem((), "No steps are described.", "Add 'steps'.")])
    return _conditional(document, models, topologies or {}, with_steps=())


def read_text(path: Path) -> str:
    """The text of a topology file. Raises TopologyError."""
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


def _formed(text: str, source: str) -> Document:
    """The document in `text`, its form checked."""
    document = read_document(text, source=source)
    document.refuse(check(TOPOLOGY, document.value, ()))
    document.refuse([*form_problems(document.value), *step_form_problems(document.value)])
    if "name" not in document.value:
        document.refuse(_unnamed(Path(source).stem))
    return document


def _name_of(document: Document) -> str:
    return str(document.value.get("name", Path(document.source).stem))


def _topology(document: Document, models: Models) -> Topology:
    document.refuse(name_problems(document.value, models))
    document.refuse(graph_problems(document.value))
    _refuse_a_models_name(document, models)
    return assemble(document.value, name=_name_of(document))


def _conditional(
    document: Document, models: Models, topologies: Mapping[str, Topology], with_steps: Collection[str]
) -> Conditional:
    """The steps may name `topologies`, and none of those `with_steps`."""
    file = document.value
    document.refuse([*model_problems(file, models), *step_name_problems(file, topologies, with_steps)])
    document.refuse(step_graph_problems(file))
    _refuse_a_models_name(document, models)
    return assemble_steps(file, name=_name_of(document), topologies=topologies)


def _refuse_a_models_name(document: Document, models: Models) -> None:
    name = _name_of(document)
    if models is not None and name in models:
        message = f"The topology's name, '{name}', is a model's too, and requests choose by name."
        document.refuse([Problem(("name",), message, "Rename one of them.")])


def _unnamed(stem: str) -> list[Problem]:
    if not list(check(TOPOLOGY.fields["name"], stem, ())):
        return []
    return [Problem((), f"The file's name, {stem!r}, cannot be the topology's name.", "Add 'name'.")]


def load_folder(path: Path, *, models: Models = None) -> dict[str, Graph]:
    """Read every .yaml and .yml file of a folder, by topology name. Raises TopologyError naming every problem."""
    return load_files(files_in(path), models=models)


def files_in(path: Path) -> list[Path]:
    """The topology files of a folder, by name. Raises TopologyError where it is none."""
    if not path.is_dir():
        raise TopologyError(f"{path}:1: This is not a folder.", remedy="Name a folder of topology files.")
    return sorted(file for ending in ("*.yaml", "*.yml") for file in path.glob(ending))


def load_files(files: Sequence[Path], *, models: Models = None) -> dict[str, Graph]:
    """Read `files`, by topology name, in their order. Raises TopologyError naming every problem.

    What steps name is looked for in all of the files.
    """
    errors: list[TopologyError] = []
    documents: dict[Path, Document] = {}
    for file in files:
        with _kept(errors):
            documents[file] = _formed(read_text(file), str(file))
    named = _named(documents, errors)
    topologies: dict[str, Topology] = {}
    for name, document in named.items():
        with _kept(errors):
            if "steps" not in document.value:
                topologies[name] = _topology(document, models)
    _raise_all(errors)  # before steps are checked: a topology may be missing only because its own file is wrong
    with_steps = [name for name in named if name not in topologies]
    graphs: dict[str, Graph] = dict(topologies)
    for name in with_steps:
        with _kept(errors):
            graphs[name] = _conditional(named[name], models, topologies, with_steps)
    _raise_all(errors)
    return {name: graphs[name] for name in named}


def load_with_others(files: Sequence[Path], *, models: Models = None) -> dict[Path, Graph]:
    """Read `files`, by file; what their steps name is looked for among them, and then in their folders.

    Raises TopologyError naming every problem.
    """
    asked = list(dict.fromkeys(files))
    graphs = load_files([*asked, *_named_in_folders(asked)], models=models)
    return dict(zip(asked, graphs.values(), strict=False))


def _named_in_folders(files: Sequence[Path]) -> list[Path]:
    """Files in the same folders that describe what the steps of `files` name, and they do not."""
    documents = _readable(files)
    asked = {said.get("topology") for one in documents.values() for said in one.value.get("steps", {}).values()}
    missing = asked - {_name_of(one) for one in documents.values()}
    folders = dict.fromkeys(file.parent for file in documents)
    others = [file for folder in folders for file in files_in(folder) if file not in documents] if missing else []
    return [file for file, document in _readable(others).items() if _name_of(document) in missing]


def _readable(files: Sequence[Path]) -> dict[Path, Document]:
    """Those whose form is right; `load_files` reports what is wrong with the others."""
    documents: dict[Path, Document] = {}
    for file in files:
        with suppress(TopologyError):
            documents[file] = _formed(read_text(file), str(file))
    return documents


def _named(documents: Mapping[Path, Document], errors: list[TopologyError]) -> dict[str, Document]:
    """The documents by the names of their topologies, each of which may stand once."""
    home: dict[str, Path] = {}
    for file, document in documents.items():
        first = home.setdefault(_name_of(document), file)
        if first != file:
            wrong = f"The name '{_name_of(document)}' is already that of {first}."
            with _kept(errors):
                document.refuse([Problem(("name",), wrong, "Rename one of them.")])
    return {name: documents[file] for name, file in home.items()}


@contextmanager
def _kept(errors: list[TopologyError]) -> Iterator[None]:
    """Adds a TopologyError that is raised inside to `errors`."""
    try:
        yield
    except TopologyError as error:
        errors.append(error)


def _raise_all(errors: Sequence[TopologyError]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise TopologyError("\n".join(map(str, errors)))
