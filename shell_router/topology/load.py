"""Topology files to checked topologies: one file, or many whose steps may name each other's topologies."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from shell_router.errors import ShellRouterError, TopologyError
from shell_router.topology.assemble import assemble, assemble_steps
from shell_router.topology.checks import form_problems, graph_problems, model_problems, name_problems
from shell_router.topology.document import Document, Problem, read_document
from shell_router.topology.forms import check
from shell_router.topology.graph import AUTO, Conditional, Graph, Topology
from shell_router.topology.step_checks import step_form_problems, step_graph_problems, step_name_problems
from shell_router.topology.syntax import TOPOLOGY

Models = Collection[str] | None
"""Aliases that topologies may name; None where they are not known."""

Needs = Callable[[Graph], Iterable[Problem]]
"""What a checked graph needs and the deployment lacks."""

Errors = list[tuple[Document, ShellRouterError]]
"""What is wrong, each with the document that it is wrong with."""


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
    return _topology(document, models)


def parse_steps(
    text: str, *, source: str, topologies: Mapping[str, Topology] | None = None, models: Models = None
) -> Conditional:
    """Read the topology with steps that `text` describes, which may name some of `topologies`.

    Otherwise as `parse_topology`.
    """
    document = formed(read_document(text, source=source))
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


def _topology(document: Document, models: Models) -> Topology:
    document.refuse(name_problems(document.value, models))
    document.refuse(graph_problems(document.value))
    _refuse_a_models_name(document, models)
    return assemble(document.value, name=name_of(document))


def _conditional(
    document: Document, models: Models, topologies: Mapping[str, Topology], with_steps: Collection[str]
) -> Conditional:
    """The steps may name `topologies`, and none of those `with_steps`."""
    file = document.value
    document.refuse(chain(model_problems(file, models), step_name_problems(file, topologies, with_steps)))
    document.refuse(step_graph_problems(file))
    _refuse_a_models_name(document, models)
    return assemble_steps(file, name=name_of(document), topologies=topologies)


def _refuse_a_models_name(document: Document, models: Models) -> None:
    name = name_of(document)
    if models is not None and (name in models or name == AUTO):
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


def load_files(files: Sequence[Path], *, models: Models = None, needs: Needs = nothing_lacks) -> dict[str, Graph]:
    """Read `files`, by topology name, in their order. Raises TopologyError naming every problem.

    What steps name is looked for in all of the files.
    """
    errors: Errors = []
    documents: list[Document] = []
    for file in files:
        with kept(errors, Document(str(file), {}, {})):
            documents.append(read_file(file))
    named = by_name(documents, errors)
    topologies = linked_agents(named, models, needs, errors)
    _raise_all(errors)  # before steps are checked: a topology may be missing only because its own file is wrong
    graphs = linked_steps(named, models, needs, topologies, errors)
    _raise_all(errors)
    return graphs


def linked_agents(named: Mapping[str, Document], models: Models, needs: Needs, errors: Errors) -> dict[str, Topology]:
    """The topologies without steps among documents by name; those that are wrong are left out, and in `errors`."""
    found: dict[str, Topology] = {}
    for name, document in named.items():
        with kept(errors, document):
            if "steps" not in document.value:
                topology = _topology(document, models)
                document.refuse(needs(topology))
                found[name] = topology
    return found


def linked_steps(
    named: Mapping[str, Document],
    models: Models,
    needs: Needs,
    topologies: Mapping[str, Topology],
    errors: Errors,
) -> dict[str, Graph]:
    """`topologies`, and those with steps, which may name them, in the documents' order."""
    with_steps = [name for name, document in named.items() if "steps" in document.value]
    graphs: dict[str, Graph] = dict(topologies)
    for name in with_steps:
        with kept(errors, named[name]):
            graph = _conditional(named[name], models, topologies, with_steps)
            named[name].refuse(needs(graph))
            graphs[name] = graph
    return {name: graphs[name] for name in named if name in graphs}


def link_one(document: Document, models: Models, needs: Needs, topologies: Mapping[str, Graph]) -> Graph:
    """The graph of one document whose form is checked; steps may name `topologies`. Raises the document's error."""
    graph: Graph
    if "steps" in document.value:
        without = {name: one for name, one in topologies.items() if isinstance(one, Topology)}
        graph = _conditional(document, models, without, topologies.keys() - without.keys())
    else:
        graph = _topology(document, models)
    document.refuse(needs(graph))
    return graph


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
    missing = asked - {name_of(one) for one in documents.values()}
    folders = dict.fromkeys(file.parent for file in documents)
    others = [file for folder in folders for file in files_in(folder) if file not in documents] if missing else []
    return [file for file, document in _readable(others).items() if name_of(document) in missing]


def _readable(files: Sequence[Path]) -> dict[Path, Document]:
    """Those whose form is right; `load_files` reports what is wrong with the others."""
    documents: dict[Path, Document] = {}
    for file in files:
        with suppress(TopologyError):
            documents[file] = read_file(file)
    return documents


def by_name(documents: Iterable[Document], errors: Errors) -> dict[str, Document]:
    """The documents by the names of their topologies, each of which may stand once."""
    home: dict[str, Document] = {}
    for document in documents:
        first = home.setdefault(name_of(document), document)
        if first is not document:
            wrong = f"The name '{name_of(document)}' is already that of {first.source or 'a topology that was put'}."
            with kept(errors, document):
                document.refuse([Problem(("name",), wrong, "Rename one of them.")])
    return home


@contextmanager
def kept(errors: Errors, document: Document) -> Iterator[None]:
    """Adds what is raised inside to `errors`, as the document's."""
    try:
        yield
    except ShellRouterError as error:
        errors.append((document, error))


def _raise_all(errors: Errors) -> None:
    if len(errors) == 1:
        raise errors[0][1]
    if errors:
        raise TopologyError("\n".join(str(error) for _, error in errors))
