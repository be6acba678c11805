"""Several topologies together: those of files, those that clients put, and those inside of requests."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path as File
from typing import Annotated, Literal

from shell_router.errors import ShellRouterError, TopologyConflict, TopologyError, UnknownTopology
from shell_router.topology.document import Document, Problem, Values, clients_document
from shell_router.topology.forms import Number
from shell_router.topology.graph import AUTO, Graph
from shell_router.topology.load import Models, Needs, files_in, formed, link, name_of, nothing_lacks, read_file

Errors = list[tuple[Document, ShellRouterError]]
"""What is wrong, each with the document that it is wrong with."""
Source = Literal["file", "put"]
INLINE = "inline"
"""What metrics and traces call the topologies inside of requests, whose names clients make up."""
MAX_PUT = 1000
"""Topologies that clients may have put at a time."""


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """Topologies that change while the router runs: watched files, topologies inside of requests, and those put."""

    watch: Annotated[bool, "Whether changed files and folders of `topologies` take effect without a restart."] = True
    inline: Annotated[bool, "Whether requests may hold a topology, or name a panel of models and a judge."] = True
    api: Annotated[
        bool, "Whether API keys may list and read topologies at `/v1/topologies`, and operators' put and delete them."
    ] = False
    max_agents: Annotated[int, Number("Most agents of a client's topology.", at_least=1, at_most=1024, whole=True)] = (
        128
    )
    max_bytes: Annotated[int, Number("Largest client's topology, as compact JSON.", at_least=1, whole=True)] = (
        256 * 1024
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A topology and the document that describes it."""

    graph: Graph
    document: Document
    source: Source


@dataclass(frozen=True)
class Catalog:
    """The topologies by name, compiled together, since steps name other topologies. A change makes a new catalog.

    `models` are the names that they may give models; `needs` says what a graph lacks in this deployment.
    """

    models: Models
    needs: Needs = nothing_lacks
    settings: LiveSettings = LiveSettings()
    entries: Mapping[str, Entry] = field(default_factory=dict)

    def with_files(self, files: Iterable[File]) -> tuple["Catalog", Errors]:
        """With the topologies of these files in the place of all files' before, and what is wrong with them.

        Of a file that is wrong the version before stays.
        """
        errors: Errors = []
        before = {entry.document.source: entry for entry in self.entries.values() if entry.source == "file"}
        documents: list[Document] = []
        for file in files:
            with _kept(errors, Document(str(file), {}, {})):
                documents.append(read_file(file))
                continue
            if str(file) in before:
                documents.append(before[str(file)].document)
        put = [entry.document for entry in self.entries.values() if entry.source == "put"]
        return self._linked(documents, put, errors), errors

    def of_files(self, files: Iterable[File]) -> "Catalog":
        """The same. Raises TopologyError naming every problem."""
        catalog, errors = self.with_files(files)
        if len(errors) == 1:
            raise errors[0][1]
        if errors:
            raise TopologyError("\n".join(str(error) for _, error in errors))
        return catalog

    def with_put(self, name: str, value: Values) -> "Catalog":
        """With this document under `name`.

        Raises InvalidField where it is wrong, TopologyConflict where it may not take the name or another needs the one
        before.
        """
        document = self._checked(clients_document(value, ""))
        if value.get("name", name) != name:
            wrong = f"The document is named {value['name']!r}, the route {name!r}."
            document.refuse([Problem(("name",), wrong, "Leave 'name' out, or write the route's.")])
        document = replace(document, value={**value, "name": name})
        if name in (self.models or ()) or name == AUTO:
            raise TopologyConflict(f"{name!r} is a model's name.", remedy="Choose another.")
        self._refuse_a_files(name)
        if name not in self.entries and sum(entry.source == "put" for entry in self.entries.values()) >= MAX_PUT:
            raise TopologyConflict(f"{MAX_PUT} topologies are put already.", remedy="Delete one.")
        graph = link(document, self.models, self.needs, self.graphs_without(name))
        return self._changed({**self.entries, name: Entry(graph, document, "put")}, name)

    def without(self, name: str) -> "Catalog":
        """Without the topology that was put under `name`. Raises UnknownTopology and TopologyConflict."""
        self.entry(name)
        self._refuse_a_files(name)
        return self._changed({one: entry for one, entry in self.entries.items() if one != name}, name)

    def inline(self, value: Values, name: str) -> Graph:
        """The graph of a request's own document, under a name that no other has. Raises InvalidField."""
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
        """Its form, and its agents before the graph is built, whose cost grows with their square."""
        formed(document)
        said = document.value
        layered = said.get("tree") or said.get("all_to_all") or {"shape": ()}
        named = [step.get("topology", "") for step in said.get("steps", {}).values()]
        of_steps = sum(len(self.entries[one].graph.agents) if one in self.entries else 1 for one in named)
        agents, limit = sum(layered["shape"]) + len(said.get("agents", ())) + of_steps, self.settings.max_agents
        if agents > limit:
            remedy = f"Describe at most {limit}, or raise live_topologies.max_agents."
            document.refuse([Problem((), f"There are {agents} agents.", remedy)])
        return document

    def _refuse_a_files(self, name: str) -> None:
        found = self.entries.get(name)
        if found is not None and found.source == "file":
            raise TopologyConflict(f"{name!r} is described by a file.", remedy="Change the file, or take another name.")

    def _changed(self, entries: dict[str, Entry], name: str) -> "Catalog":
        """With these entries, of which that of `name` has changed: those whose steps name it are compiled again."""
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
        """The catalog of these documents; where one is wrong, its entry stays as it was, if there is one."""
        named = _by_name([*put, *files], errors)
        with_steps = {name for name, document in named.items() if "steps" in document.value}
        entries: dict[str, Entry] = {}
        graphs: dict[str, Graph] = {}
        for name in sorted(named, key=with_steps.__contains__):  # what steps name comes before them
            document, before = named[name], self.entries.get(name)
            if not (errors and _names_others(document, graphs)):  # it may be missing only as its own file is wrong
                with _kept(errors, document):
                    graphs[name] = link(document, self.models, self.needs, graphs, with_steps)
                    source: Source = "put" if any(document is one for one in put) else "file"
                    entries[name] = Entry(graphs[name], document, source)
                    continue
            if before is not None and before.document.source == document.source:
                graphs[name], entries[name] = before.graph, before
        return replace(self, entries={name: entries[name] for name in named if name in entries})


def _names_others(document: Document, graphs: Collection[str]) -> bool:
    """Whether its steps name topologies that are none of `graphs`."""
    steps = document.value.get("steps", {}).values()
    return any("topology" in step and step["topology"] not in graphs for step in steps)


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
            wrong = f"The name '{name_of(document)}' is already that of {first.source or 'a topology that was put'}."
            with _kept(errors, document):
                document.refuse([Problem(("name",), wrong, "Rename one of them.")])
    return home


def load_files(files: Iterable[File], *, models: Models = None) -> dict[str, Graph]:
    """Read `files`, by topology name, in their order; what steps name is looked for in all of them.

    Raises TopologyError naming every problem.
    """
    return Catalog(models).of_files(files).graphs_without("")


def load_with_others(files: Sequence[File], *, models: Models = None) -> dict[File, Graph]:
    """Read `files`, by file; what their steps name is looked for among them, and then in their folders.

    Raises TopologyError naming every problem.
    """
    asked = list(dict.fromkeys(files))
    graphs = load_files([*asked, *_named_in_folders(asked)], models=models)
    return dict(zip(asked, graphs.values(), strict=False))


def _named_in_folders(files: Sequence[File]) -> list[File]:
    """Files in the same folders that describe what the steps of `files` name, and they do not."""
    documents = _readable(files)
    asked = {said.get("topology") for one in documents.values() for said in one.value.get("steps", {}).values()}
    missing = asked - {name_of(one) for one in documents.values()}
    folders = dict.fromkeys(file.parent for file in documents)
    others = [file for folder in folders for file in files_in(folder) if file not in documents] if missing else []
    return [file for file, document in _readable(others).items() if name_of(document) in missing]


def _readable(files: Sequence[File]) -> dict[File, Document]:
    """Those whose form is right; `load_files` reports what is wrong with the others."""
    documents: dict[File, Document] = {}
    for file in files:
        with suppress(TopologyError):
            documents[file] = read_file(file)
    return documents
