"""Topologies of files, those that clients put, and those inside of requests: read, checked, and
kept together.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

from shell_router.errors import ShellRouterError, TopologyConflict, TopologyError, UnknownTopology
from shell_router.topology.assemble import assemble, assemble_steps
from shell_router.topology.checks import form_problems, graph_problems, name_problems
from shell_router.topology.document import (
    Document,
    Problem,
    Values,
    clients_document,
    read_document,
    read_text,
)
from shell_router.topology.forms import Number, check
from shell_router.topology.graph import AUTO, Graph, Topology
from shell_router.topology.syntax import TOPOLOGY

Models = Collection[str] | None
"""Aliases that topologies may name; None where they are not known."""

Needs = Callable[[Graph], Iterable[Problem]]
"""What a checked graph needs and the deployment lacks."""


def nothing_lacks(_: Graph) -> Iterable[Problem]:
    """Where it is not known what the deployment has."""
    return ()


def load_topology(path: Path, *, models: Models = None) -> Topology:
    """Read the topology in the file at `path`. Raises TopologyError; see `parse_topology`."""
    return parse_topology(read_text(path), source=str(path), models=models)


def parse_topology(text: str, *, source: str, models: Models = None) -> Topology:
    """Read the topology that `text` describes; `source` names it in errors and, where it has no
    name, gives it one.

    With `models` every model alias must be one of them, and the topology's name none. One with
    steps is refused, for callers that run agents alone. Raises TopologyError, whose message holds
    one `source:line: problem` per line.
    """
    document = formed(read_document(text, source=source))
    if "steps" in document.value:
        remedy = "Name one of agents, such as one that a step asks."
        document.refuse([Problem(("steps",), "A topology with steps cannot be used here.", remedy)])
    graph = link(document, models)
    assert isinstance(graph, Topology)
    return graph


def formed(document: Document) -> Document:
    """The document, its form checked. Raises its error."""
    document.refuse(check(TOPOLOGY, document.value, ()))
    document.refuse(form_problems(document.value))
    stem = Path(document.source).stem
    if (
        "name" not in document.value
        and document.lines is not None
        and any(check(TOPOLOGY.fields["name"], stem, ()))
    ):
        wrong = f"The file's name, {stem!r}, cannot be the topology's name."
        document.refuse([Problem((), wrong, "Add 'name'.")])
    return document


def name_of(document: Document) -> str:
    """The topology's name: the document's own, else its file's."""
    return str(document.value.get("name", Path(document.source).stem))


def link(
    document: Document,
    models: Models = None,
    needs: Needs = nothing_lacks,
    graphs: Mapping[str, Graph] = MappingProxyType({}),
    with_steps: Collection[str] = (),
) -> Graph:
    """The graph of a document whose form is checked. Raises the document's error.

    Steps may name topologies of `graphs`, but none that has steps itself; of those `with_steps`
    more is not known.
    """
    file = document.value
    name = name_of(document)
    plain = {one: graph for one, graph in graphs.items() if isinstance(graph, Topology)}
    document.refuse(
        name_problems(file, models, plain, {*with_steps, *(graphs.keys() - plain.keys())})
    )
    document.refuse(graph_problems(file))
    if models is not None and (name in models or name == AUTO):
        message = f"The topology's name, '{name}', is a model's too, and requests choose by name."
        document.refuse([Problem(("name",), message, "Rename one of them.")])
    if name == INLINE:
        message = (
            f"The topology's name, '{name}', is what metrics call the topologies inside of "
            "requests."
        )
        document.refuse([Problem(("name",), message, "Rename it.")])
    graph: Graph = (
        assemble_steps(file, name=name, topologies=plain)
        if "steps" in file
        else assemble(file, name=name)
    )
    document.refuse(needs(graph))
    return graph


def files_in(path: Path) -> list[Path]:
    """The topology files of a folder, by name. Raises TopologyError where it is none."""
    if not path.is_dir():
        raise TopologyError(
            f"{path}:1: This is not a folder.", remedy="Name a folder of topology files."
        )
    return sorted(file for ending in ("*.yaml", "*.yml") for file in path.glob(ending))


Errors = list[tuple[Document, ShellRouterError]]
"""What is wrong, each with the document that it is wrong with."""
Source = Literal["file", "put"]
INLINE = "inline"
"""What metrics and traces call the topologies inside of requests, whose names clients make up."""
MAX_PUT = 1000
"""Topologies that clients may have put at a time."""


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """Topologies that change while the router runs: watched files, topologies inside of requests,
    and those put.
    """

    watch: Annotated[
        bool, "Whether changed files and folders of `topologies` take effect without a restart."
    ] = True
    inline: Annotated[
        bool, "Whether requests may hold a topology, or name a panel of models and a judge."
    ] = True
    api: Annotated[
        bool,
        (
            "Whether API keys may list and read topologies at `/v1/topologies`, and operators' put "
            "and delete them."
        ),
    ] = False
    max_agents: Annotated[
        int, Number("Most agents of a client's topology.", at_least=1, at_most=1024, whole=True)
    ] = 128
    max_bytes: Annotated[
        int, Number("Largest client's topology, as compact JSON.", at_least=1, whole=True)
    ] = 256 * 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """A topology and the document that describes it."""

    graph: Graph
    document: Document
    source: Source


@dataclass(frozen=True)
class Catalog:
    """The topologies by name, compiled together, since steps name other topologies. A change makes
    a new catalog.

    `models` are the names that they may give models; `needs` says what a graph lacks in this
    deployment.
    """

    models: Models
    needs: Needs = nothing_lacks
    settings: LiveSettings = LiveSettings()
    entries: Mapping[str, Entry] = field(default_factory=dict)

    def with_files(self, files: Iterable[Path]) -> tuple["Catalog", Errors]:
        """With the topologies of these files in the place of all files' before, and what is wrong
        with them.

        Of a file that is wrong the version before stays.
        """
        errors: Errors = []
        before = {
            entry.document.source: entry
            for entry in self.entries.values()
            if entry.source == "file"
        }
        documents: list[Document] = []
        for file in files:
            with _kept(errors, Document(str(file), {}, {})):
                documents.append(formed(read_document(read_text(file), source=str(file))))
                continue
            if str(file) in before:
                documents.append(before[str(file)].document)
        put = [entry.document for entry in self.entries.values() if entry.source == "put"]
        return self._linked(documents, put, errors), errors

    def of_files(self, files: Iterable[Path]) -> "Catalog":
        """The same. Raises TopologyError naming every problem."""
        catalog, errors = self.with_files(files)
        if len(errors) == 1:
            raise errors[0][1]
        if errors:
            raise TopologyError("\n".join(str(error) for _, error in errors))
        return catalog

    def with_put(self, name: str, value: Values) -> "Catalog":
        """With this document under `name`.

        Raises InvalidField where it is wrong, TopologyConflict where it may not take the name or
        another needs the one before.
        """
        document = clients_document(value, "")
        if value.get("name", name) != name:
            wrong = f"The document is named {value['name']!r}, the route {name!r}."
            document.refuse([Problem(("name",), wrong, "Leave 'name' out, or write the route's.")])
        document = self._checked(replace(document, value={**value, "name": name}))
        if name in (self.models or ()) or name == AUTO:
            raise TopologyConflict(f"{name!r} is a model's name.", remedy="Choose another.")
        self._refuse_a_files(name)
        if (
            name not in self.entries
            and sum(entry.source == "put" for entry in self.entries.values()) >= MAX_PUT
        ):
            raise TopologyConflict(f"{MAX_PUT} topologies are put already.", remedy="Delete one.")
        graph = link(document, self.models, self.needs, self.graphs_without(name))
        return self._changed({**self.entries, name: Entry(graph, document, "put")}, name)

    def without(self, name: str) -> "Catalog":
        """Without the topology that was put under `name`. Raises UnknownTopology and
        TopologyConflict.
        """
        self.entry(name)
        self._refuse_a_files(name)
        return self._changed(
            {one: entry for one, entry in self.entries.items() if one != name}, name
        )

    def inline(self, value: Values, name: str) -> Graph:
        """The graph of a request's own document, under a name that no other has. Raises
        InvalidField.
        """
        document = self._checked(clients_document(value, "topology"))
        document = replace(document, value={**value, "name": name})
        return link(document, self.models, self.needs, self.graphs_without(""))

    def entry(self, name: str) -> Entry:
        """Raises UnknownTopology."""
        found = self.entries.get(name)
        if found is None:
            known = ", ".join(sorted(self.entries)) or "none"
            raise UnknownTopology(f"No topology is named {name!r}.", remedy=f"Known: {known}.")
        return found

    def graphs_without(self, name: str) -> dict[str, Graph]:
        """The graphs by name, but for one."""
        return {one: entry.graph for one, entry in self.entries.items() if one != name}

    def _checked(self, document: Document) -> Document:
        """Its form, and its agents before the graph is built, whose cost grows with their
        square."""
        formed(document)
        said = document.value
        layered = said.get("tree") or said.get("all_to_all") or {"shape": ()}
        named = [step.get("topology", "") for step in said.get("steps", {}).values()]
        of_steps = sum(
            len(self.entries[one].graph.agents) if one in self.entries else 1 for one in named
        )
        agents = sum(layered["shape"]) + len(said.get("agents", ())) + of_steps
        limit = self.settings.max_agents
        if agents > limit:
            remedy = f"Describe at most {limit}, or raise live_topologies.max_agents."
            document.refuse([Problem((), f"There are {agents} agents.", remedy)])
        return document

    def _refuse_a_files(self, name: str) -> None:
        found = self.entries.get(name)
        if found is not None and found.source == "file":
            raise TopologyConflict(
                f"{name!r} is described by a file.", remedy="Change the file, or take another name."
            )

    def _changed(self, entries: dict[str, Entry], name: str) -> "Catalog":
        """With these entries, of which that of `name` has changed: those whose steps name it are
        compiled again.
        """
        graphs = {one: entry.graph for one, entry in entries.items()}
        for one, entry in entries.items():
            steps = entry.document.value.get("steps", {}).values()
            if any(step.get("topology") == name for step in steps):
                others = {other: graph for other, graph in graphs.items() if other != one}
                try:
                    graph = link(entry.document, self.models, self.needs, others)
                except ShellRouterError as error:
                    raise TopologyConflict(f"{one!r} needs {name!r} as it is: {error}") from None
                entries[one] = replace(entry, graph=graph)
        return replace(self, entries=entries)

    def _linked(self, files: list[Document], put: list[Document], errors: Errors) -> "Catalog":
        """The catalog of these documents; where one is wrong, its entry stays as it was, if there
        is one.
        """
        named = _by_name([*put, *files], errors)
        with_steps = {name for name, document in named.items() if "steps" in document.value}
        entries: dict[str, Entry] = {}
        graphs: dict[str, Graph] = {}
        for name in sorted(named, key=with_steps.__contains__):  # what steps name comes before them
            document = named[name]
            before = self.entries.get(name)
            asked = {step.get("topology") for step in document.value.get("steps", {}).values()} - {
                None
            }
            if (
                not errors or asked <= graphs.keys()
            ):  # else one may be missing only as its own file is wrong
                with _kept(errors, document):
                    graphs[name] = link(document, self.models, self.needs, graphs, with_steps)
                    source: Source = "put" if any(document is one for one in put) else "file"
                    entries[name] = Entry(graphs[name], document, source)
                    continue
            if before is not None and before.document.source == document.source:
                graphs[name] = before.graph
                entries[name] = before
        return replace(self, entries={name: entries[name] for name in named if name in entries})


@contextmanager
def _kept(errors: Errors, document: Document) -> Iterator[None]:
    """Adds what is raised inside to `errors`, as the document's."""
    try:
        yield
    except ShellRouterError as error:
        errors.append((document, error))


def _by_name(documents: Iterable[Document], errors: Errors) -> dict[str, Document]:
    """The documents by the names of their topologies, each of which may stand once."""
    home: dict[str, Document] = {}
    for document in documents:
        first = home.setdefault(name_of(document), document)
        if first is not document:
            wrong = (
                f"The name '{name_of(document)}' is already that of "
                f"{first.source or 'a topology that was put'}."
            )
            with _kept(errors, document):
                document.refuse([Problem(("name",), wrong, "Rename one of them.")])
    return home


def load_with_others(files: Sequence[Path], *, models: Models = None) -> dict[Path, Graph]:
    """Read `files`, by file; what their steps name is looked for among them, and then in their
    folders.

    Raises TopologyError naming every problem.
    """
    folders = dict.fromkeys(file.parent for file in files if file.exists())
    every = dict.fromkeys([*files, *chain.from_iterable(map(files_in, folders))])
    catalog, _ = Catalog(models).with_files(every)
    right = {
        entry.document.source for entry in catalog.entries.values()
    }  # what is wrong with others does not matter
    catalog = Catalog(models).of_files(one for one in every if one in files or str(one) in right)
    found = {entry.document.source: entry.graph for entry in catalog.entries.values()}
    return {file: found[str(file)] for file in files}
