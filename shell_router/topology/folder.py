"""Many topology files at once, whose steps may name each other's topologies."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from shell_router.errors import TopologyError
from shell_router.topology.conditional import Graph
from shell_router.topology.document import Document, Problem
from shell_router.topology.graph import Topology
from shell_router.topology.load import Models, conditional_in, formed, has_steps, name_of, read_text, topology_in


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
    trouble = _Trouble()
    documents: dict[Path, Document] = {}
    for file in files:
        with trouble.kept():
            documents[file] = formed(read_text(file), str(file))
    named = _named(documents, trouble)
    topologies: dict[str, Topology] = {}
    for name, document in named.items():
        with trouble.kept():
            if not has_steps(document):
                topologies[name] = topology_in(document, models)
    trouble.tell()  # before steps are looked at: a topology may be missing only because its own file is wrong
    with_steps = [name for name in named if name not in topologies]
    graphs: dict[str, Graph] = dict(topologies)
    for name in with_steps:
        with trouble.kept():
            graphs[name] = conditional_in(named[name], models, topologies, with_steps)
    trouble.tell()
    return {name: graphs[name] for name in named}


def load_with_others(files: Sequence[Path], *, models: Models = None) -> dict[Path, Graph]:
    """Read `files`, by file; what their steps name is looked for among them, and then in their folders.

    Raises TopologyError naming every problem.
    """
    asked = list(dict.fromkeys(files))
    graphs = load_files([*asked, *_named_beside(asked)], models=models)
    return dict(zip(asked, graphs.values(), strict=False))


def _named_beside(files: Sequence[Path]) -> list[Path]:
    """Files in the same folders that describe what the steps of `files` name, and they do not."""
    documents = _readable(files)
    asked = {said.get("topology") for one in documents.values() for said in one.value.get("steps", {}).values()}
    missing = asked - {name_of(one) for one in documents.values()}
    folders = dict.fromkeys(file.parent for file in documents)
    beside = [file for folder in folders for file in files_in(folder) if file not in documents] if missing else []
    return [file for file, document in _readable(beside).items() if name_of(document) in missing]


def _readable(files: Sequence[Path]) -> dict[Path, Document]:
    """Those whose form is right; what is wrong with the others is told to whom it concerns, by `load_files`."""
    documents: dict[Path, Document] = {}
    for file in files:
        with suppress(TopologyError):
            documents[file] = formed(read_text(file), str(file))
    return documents


def _named(documents: Mapping[Path, Document], trouble: "_Trouble") -> dict[str, Document]:
    """The documents by the names of their topologies, each of which may stand once."""
    home: dict[str, Path] = {}
    for file, document in documents.items():
        first = home.setdefault(name_of(document), file)
        if first != file:
            wrong = f"The name '{name_of(document)}' is already that of {first}."
            with trouble.kept():
                document.refuse([Problem(("name",), wrong, "Rename one of them.")])
    return {name: documents[file] for name, file in home.items()}


class _Trouble:
    """Errors of several files, told together."""

    def __init__(self) -> None:
        self._errors: list[TopologyError] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A TopologyError that is raised inside is kept, to be told later."""
        try:
            yield
        except TopologyError as error:
            self._errors.append(error)

    def tell(self) -> None:
        """Raise TopologyError naming all that were kept."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            raise TopologyError("\n".join(map(str, self._errors)))
