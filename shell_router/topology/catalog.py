"""The topologies that a deployment serves: those of its files, those that clients put, and those inside of requests."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as File
from typing import Annotated, Literal

from shell_router.errors import ShellRouterError, TopologyConflict, UnknownTopology
from shell_router.topology.document import Document, Problem, Values, clients_document
from shell_router.topology.forms import Number
from shell_router.topology.graph import AUTO, Graph, Topology
from shell_router.topology.load import (
    Errors,
    Needs,
    by_name,
    formed,
    kept,
    link_one,
    linked_agents,
    linked_steps,
    name_of,
    nothing_lacks,
    read_file,
)

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
        bool, "Whether every API key may list, read, put and delete topologies at `/v1/topologies`; keys have no roles."
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

    models: Collection[str]
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
            with kept(errors, Document(str(file), {}, {})):
                documents.append(read_file(file))
                continue
            if str(file) in before:
                documents.append(before[str(file)].document)
        put = [entry.document for entry in self.entries.values() if entry.source == "put"]
        return self._linked(documents, put, errors), errors

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
        if name in self.models or name == AUTO:
            raise TopologyConflict(f"{name!r} is a model's name.", remedy="Choose another.")
        self._refuse_a_files(name)
        if name not in self.entries and sum(entry.source == "put" for entry in self.entries.values()) >= MAX_PUT:
            raise TopologyConflict(f"{MAX_PUT} topologies are put already.", remedy="Delete one.")
        graph = link_one(document, self.models, self.needs, self.graphs_without(name))
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
        return link_one(document, self.models, self.needs, self.graphs_without(""))

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
                    graph = link_one(entry.document, self.models, self.needs, others)
                except ShellRouterError as error:
                    raise TopologyConflict(f"{one!r} needs {name!r} as it is: {error}") from None
                entries[one] = replace(entry, graph=graph)
        return replace(self, entries=entries)

    def _linked(self, files: list[Document], put: list[Document], errors: Errors) -> "Catalog":
        """The catalog of these documents; where one is wrong, its entry stays as it was, if there is one."""
        named = by_name([*put, *files], errors)
        sources: dict[str, Source] = {name_of(one): "put" for one in put}
        before = {
            name: entry
            for name, entry in self.entries.items()
            if name in named and entry.document.source == named[name].source
        }
        topologies = linked_agents(named, self.models, self.needs, errors)
        for name, entry in before.items():
            if isinstance(entry.graph, Topology) and "steps" not in named[name].value:
                topologies.setdefault(name, entry.graph)
        graphs = linked_steps(named, self.models, self.needs, topologies, errors)
        wrong = {id(document) for document, _ in errors}
        entries: dict[str, Entry] = {}
        for name, document in named.items():
            if id(document) in wrong and name in before:
                entries[name] = before[name]
            elif name in graphs:
                entries[name] = Entry(graphs[name], document, sources.get(name, "file"))
        return replace(self, entries=entries)
