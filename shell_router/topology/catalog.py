"""The topologies of a deployment by name: from files, put by clients, or sent inline."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from shell_router.errors import ShellRouterError, TopologyConflict, TopologyError, UnknownTopology
from shell_router.files.document import (
    Document,
    Problem,
    Values,
    client_document,
    read_document,
    read_text,
)
from shell_router.files.types import Count, Switch
from shell_router.topology.graph import AUTO, Graph
from shell_router.topology.load import Models, Needs, check_keys, link, name_of, needs_nothing

Errors = list[tuple[Document, ShellRouterError]]
"""Errors, each with the document that is wrong."""
Source = Literal["file", "put"]
MAX_PUT = 1000
"""The most topologies that clients can have put at once."""


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """Topologies that change while the router runs: watched files, put and inline documents."""

    watch: Annotated[
        Switch, "Whether changed files and folders of `topologies` take effect without a restart."
    ] = True
    inline: Annotated[
        Switch, "Whether requests may hold a topology, or name a panel of models and a judge."
    ] = True
    api: Annotated[
        Switch,
        "Whether API keys may list and read topologies at `/v1/topologies`, and operators' put and "
        "delete them.",
    ] = False
    max_agents: Annotated[int, Interval(ge=1, le=1024), "Most agents of a client's topology."] = 128
    max_bytes: Annotated[Count, "Largest client's topology, as compact JSON."] = 256 * 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """A topology and the document that describes it."""

    graph: Graph
    document: Document
    source: Source


def files_in(path: Path) -> list[Path]:
    """List the topology files of a folder, by name. Raises TopologyError if it is no folder."""
    if not path.is_dir():
        raise TopologyError(
            f"{path}:1: This is not a folder.", remedy="Name a folder of topology files."
        )
    return sorted(file for ending in ("*.yaml", "*.yml") for file in path.glob(ending))


@dataclass(frozen=True)
class Catalog:
    """Topologies by name, linked together because steps name other topologies.

    A change makes a new catalog. `models` are the aliases that agents may name; `needs` says what a
    graph lacks in this deployment.
    """

    models: Models
    needs: Needs = needs_nothing
    settings: LiveSettings = LiveSettings()
    entries: Mapping[str, Entry] = field(default_factory=dict)

    def with_files(self, files: Iterable[Path]) -> tuple["Catalog", Errors]:
        """Replace the topologies of all files by those of `files`.

        Returns:
            The new catalog, and the errors of files. A wrong file keeps its previous topology.
        """
        errors: Errors = []
        before = {
            entry.document.source: entry.document
            for entry in self.entries.values()
            if entry.source == "file"
        }
        documents: list[Document] = []
        for file in files:
            with _collect(errors, Document(str(file), {}, {})):
                documents.append(check_keys(read_document(read_text(file), source=str(file))))
                continue
            if str(file) in before:
                documents.append(before[str(file)])
        put = [entry.document for entry in self.entries.values() if entry.source == "put"]
        return self._link_all(documents, put, errors), errors

    def of_files(self, files: Iterable[Path]) -> "Catalog":
        """Replace the topologies of all files. Raises TopologyError naming every problem."""
        catalog, errors = self.with_files(files)
        if len(errors) == 1:
            raise errors[0][1]
        if errors:
            raise TopologyError("\n".join(str(error) for _, error in errors))
        return catalog

    def with_put(self, name: str, value: Values) -> "Catalog":
        """Add or replace the document that a client puts under `name`.

        Raises:
            InvalidField: The document is wrong.
            TopologyConflict: The name is taken, or another topology needs the replaced one.
        """
        document = client_document(value, "")
        if value.get("name", name) != name:
            wrong = f"The document is named {value['name']!r}, the route {name!r}."
            remedy = "Leave 'name' out, or write the route's."
            document.require_none([Problem(("name",), wrong, remedy)])
        document = self._check_client(replace(document, value={**value, "name": name}))
        if name in (self.models or ()) or name == AUTO:
            raise TopologyConflict(f"{name!r} is a model's name.", remedy="Choose another.")
        self._require_no_file(name)
        put = [entry for entry in self.entries.values() if entry.source == "put"]
        if name not in self.entries and len(put) >= MAX_PUT:
            raise TopologyConflict(f"{MAX_PUT} topologies are put already.", remedy="Delete one.")
        graph = link(document, self.models, self.needs, self.graphs_without(name))
        return self._relink({**self.entries, name: Entry(graph, document, "put")}, name)

    def without(self, name: str) -> "Catalog":
        """Remove the topology that was put under `name`.

        Raises:
            UnknownTopology: There is none.
            TopologyConflict: It is a file's, or another topology needs it.
        """
        self.entry(name)
        self._require_no_file(name)
        others = {key: entry for key, entry in self.entries.items() if key != name}
        return self._relink(others, name)

    def inline(self, value: Values, name: str) -> Graph:
        """Build the graph of a request's own document, under a name that no other has.

        Raises:
            InvalidField: The document is wrong.
        """
        document = self._check_client(client_document(value, "topology"))
        document = replace(document, value={**document.value, "name": name})
        return link(document, self.models, self.needs, self.graphs_without(""))

    def entry(self, name: str) -> Entry:
        """Look up a topology. Raises UnknownTopology."""
        if name not in self.entries:
            names = ", ".join(sorted(self.entries)) or "none"
            raise UnknownTopology(f"No topology is named {name!r}.", remedy=f"Known: {names}.")
        return self.entries[name]

    def graphs_without(self, name: str) -> dict[str, Graph]:
        """Return the graphs by name, but for one."""
        return {key: entry.graph for key, entry in self.entries.items() if key != name}

    def _check_client(self, document: Document) -> Document:
        """Check the keys and the number of agents: the cost of linking grows with its square."""
        document = check_keys(document)
        values = document.value
        layered = values.get("tree") or values.get("all_to_all") or {"shape": ()}
        agents = sum(layered["shape"]) + len(values.get("agents", ()))
        for step in values.get("steps", {}).values():
            entry = self.entries.get(step.get("topology", ""))
            agents += 1 if entry is None else len(entry.graph.agents)
        limit = self.settings.max_agents
        if agents > limit:
            remedy = f"Describe at most {limit}, or raise live_topologies.max_agents."
            document.require_none([Problem((), f"There are {agents} agents.", remedy)])
        return document

    def _require_no_file(self, name: str) -> None:
        entry = self.entries.get(name)
        if entry is not None and entry.source == "file":
            raise TopologyConflict(
                f"{name!r} is described by a file.", remedy="Change the file, or take another name."
            )

    def _relink(self, entries: dict[str, Entry], name: str) -> "Catalog":
        """Take `entries`, in which `name` changed, and link again those whose steps name it."""
        graphs = {key: entry.graph for key, entry in entries.items()}
        for key, entry in entries.items():
            if name in _named_topologies(entry.document):
                others = {other: graph for other, graph in graphs.items() if other != key}
                try:
                    graph = link(entry.document, self.models, self.needs, others)
                except ShellRouterError as error:
                    raise TopologyConflict(f"{key!r} needs {name!r} as it is: {error}") from None
                entries[key] = replace(entry, graph=graph)
        return replace(self, entries=entries)

    def _link_all(self, files: list[Document], put: list[Document], errors: Errors) -> "Catalog":
        """Link the documents; a wrong one keeps its previous entry, if it had one."""
        documents = _by_name([*put, *files], errors)
        with_steps = {name for name, document in documents.items() if "steps" in document.value}
        entries: dict[str, Entry] = {}
        graphs: dict[str, Graph] = {}
        for name in sorted(documents, key=with_steps.__contains__):  # steps last
            document = documents[name]
            # After an error a name may be missing only because its own file is wrong.
            if not errors or _named_topologies(document) <= graphs.keys():
                with _collect(errors, document):
                    graphs[name] = link(document, self.models, self.needs, graphs, with_steps)
                    is_put = any(document is each for each in put)
                    entries[name] = Entry(graphs[name], document, "put" if is_put else "file")
                    continue
            before = self.entries.get(name)
            if before is not None and before.document.source == document.source:
                graphs[name] = before.graph
                entries[name] = before
        return replace(self, entries={name: entries[name] for name in documents if name in entries})


def _named_topologies(document: Document) -> set[str]:
    steps = document.value.get("steps", {}).values()
    return {step["topology"] for step in steps if "topology" in step}


@contextmanager
def _collect(errors: Errors, document: Document) -> Iterator[None]:
    """Add an error that the body of the context raises to `errors`, with its document."""
    try:
        yield
    except ShellRouterError as error:
        errors.append((document, error))


def _by_name(documents: Iterable[Document], errors: Errors) -> dict[str, Document]:
    """Return the documents by the names of their topologies; a second use of a name is an error."""
    documents_by_name: dict[str, Document] = {}
    for document in documents:
        name = name_of(document)
        first = documents_by_name.setdefault(name, document)
        if first is not document:
            owner = first.source or "a topology that was put"
            problem = Problem(
                ("name",), f"The name '{name}' is already that of {owner}.", "Rename one of them."
            )
            with _collect(errors, document):
                document.require_none([problem])
    return documents_by_name


def load_with_others(files: Sequence[Path], *, models: Models = None) -> dict[Path, Graph]:
    """Read topology files; their steps may name topologies of these files or of their folders.

    Returns:
        The graphs, by file.

    Raises:
        TopologyError: Its message names every problem.
    """
    folders = dict.fromkeys(file.parent for file in files if file.exists())
    every = dict.fromkeys([*files, *chain.from_iterable(map(files_in, folders))])
    catalog, _ = Catalog(models).with_files(every)
    # Files that were not asked for may be wrong.
    right = {entry.document.source for entry in catalog.entries.values()}
    catalog = Catalog(models).of_files(
        file for file in every if file in files or str(file) in right
    )
    graphs = {entry.document.source: entry.graph for entry in catalog.entries.values()}
    return {file: graphs[str(file)] for file in files}
