"""The graphs that requests may name: topologies, which change while requests run, and models."""

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import orjson

from shell_router.core.exact_json import Values
from shell_router.errors import (
    ConfigError,
    InvalidField,
    ShellRouterError,
    TopologiesOff,
    UnknownModel,
)
from shell_router.http.app import Key
from shell_router.topology import AUTO, INLINE, Agent, Catalog, Graph, Topology

KEPT_INLINE = 64
"""Graphs of documents of at most `max_bytes` each."""


class LiveTopologies(Mapping[str, Graph]):
    """The topologies by name, as they are now. Requests keep the graph that they began with.

    Changes are compiled on a worker thread, one after the other.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._turn = asyncio.Lock()
        self._take(catalog)

    def _take(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._graphs = catalog.graphs_without("")
        self._inline: dict[str, Graph] = {}  # steps in them name other topologies

    def __getitem__(self, name: str) -> Graph:
        return self._graphs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._graphs)

    def __len__(self) -> int:
        return len(self._graphs)

    async def reload(self, files: Callable[[], Iterable[Path]]) -> Sequence[ShellRouterError]:
        """Read the files again and return their errors; the version before a wrong one stays."""
        async with self._turn:
            catalog, errors = await asyncio.to_thread(lambda: self.catalog.with_files(files()))
            self._take(catalog)
        return [error for _, error in errors]

    async def put(self, name: str, document: Values) -> bool:
        """Serve the document under `name`; return whether the name is new.

        Raises what `Catalog.with_put` does.
        """
        self._require(self.catalog.settings.api, "api")
        self._write(document, "")
        async with self._turn:
            is_new = name not in self
            self._take(await asyncio.to_thread(self.catalog.with_put, name, document))
        return is_new

    async def delete(self, name: str) -> None:
        """Stop serving the topology; raises what `Catalog.without` does."""
        self._require(self.catalog.settings.api, "api")
        async with self._turn:
            self._take(await asyncio.to_thread(self.catalog.without, name))

    def readable(self) -> Catalog:
        """Return the catalog for a client to read; raises TopologiesOff."""
        self._require(self.catalog.settings.api, "api")
        return self.catalog

    async def inline(self, document: Values) -> Graph:
        """Return the graph of a request's own document; the latest ones are kept.

        Raises:
            InvalidField: The document is no topology.
            TopologiesOff: The deployment takes none.
        """
        self._require(self.catalog.settings.inline, "inline")
        text = self._write(document, "topology")
        key = hashlib.sha256(text).hexdigest()
        kept = self._inline
        graph = kept.pop(key, None)
        if graph is None:
            graph = await asyncio.to_thread(self.catalog.inline, document, f"{INLINE}/{key[:16]}")
        kept[key] = graph  # the last one used is the last
        if len(kept) > KEPT_INLINE:
            del kept[next(iter(kept))]
        return graph

    def _write(self, document: Values, where: str) -> bytes:
        """Return the document as text; raises InvalidField if it is over the limit."""
        limit = self.catalog.settings.max_bytes
        try:
            text = orjson.dumps(document)
        except orjson.JSONEncodeError as error:
            raise InvalidField(f"The topology cannot be kept: {error}.", field=where) from None
        if len(text) > limit:
            raise InvalidField(
                f"The topology has {len(text)} bytes.",
                field=where,
                remedy=f"Send at most {limit}, or raise live_topologies.max_bytes.",
            )
        return text

    @staticmethod
    def _require(allowed: bool, setting: str) -> None:
        if not allowed:
            raise TopologiesOff(
                "This router does not let clients do that to topologies.",
                remedy=f"Set live_topologies.{setting} to true in its configuration.",
            )


class Targets:
    """Topologies and models by the names that requests use."""

    def __init__(self, topologies: Mapping[str, Graph], models: Collection[str]) -> None:
        clash = sorted(topologies.keys() & {*models, AUTO})
        if clash:
            raise ConfigError(
                f"{', '.join(clash)} name both a topology and a model (auto is the choice of one).",
                remedy="Requests choose by name: rename one of them.",
            )
        self._topologies = topologies
        self._models = frozenset(models)
        self.alone = {alias: make_single_agent(alias) for alias in (*models, AUTO)}
        """Models, each as a topology of one agent."""

    def __contains__(self, name: object) -> bool:
        return name in self.alone or name in self._topologies

    @property
    def names(self) -> list[str]:
        """The names that requests may use now, sorted."""
        return sorted({*self.alone, *self._topologies})

    def find(self, name: str) -> Graph:
        """Return what is served under the name; raises UnknownModel."""
        topology = self.alone.get(name) or self._topologies.get(name)
        if topology is None:
            known = ", ".join(self.names) or "none"
            raise UnknownModel(
                f"No topology or model is named {name!r}.", remedy=f"Known: {known}."
            )
        return topology

    def choose(self, names: Sequence[str]) -> Graph:
        """Return the graph of the one name, or an agent whose model is chosen among several.

        Raises:
            UnknownModel: A name is unknown, or one of several is no model.
        """
        if len(names) == 1:
            return self.find(names[0])
        models = self._models
        if unknown := sorted(set(names) - models):
            raise UnknownModel(
                f"No model is named {' or '.join(map(repr, unknown))}.",
                remedy=f"Choose among models: {', '.join(sorted(models))}.",
            )
        return Topology(
            name=AUTO, agents={AUTO: Agent(id=AUTO, model=AUTO, candidates=tuple(names))}
        )


def make_single_agent(alias: str) -> Topology:
    """Return the topology of one agent that gets the client's messages as they are."""
    return Topology(name=alias, agents={alias: Agent(id=alias, model=alias)})


TARGETS = Key[Targets]("TARGETS")
