"""The topologies and models that a chat completion's `model` may name."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shell_router.api.services import Services
from shell_router.errors import ConfigError, UnknownModel
from shell_router.http.app import Key
from shell_router.routing.holdout import Optimization
from shell_router.topology import AUTO, Agent, Conditional, Graph, Topology


class Targets:
    """Topologies and models by the names that requests use."""

    def __init__(self, services: Services) -> None:
        clash = sorted(services.topologies.keys() & {*services.models, AUTO})
        if clash:
            raise ConfigError(
                f"{', '.join(clash)} name both a topology and a model (auto is the choice of one).",
                remedy="Requests choose by name: rename one of them.",
            )
        self._services = services
        self.alone = {alias: make_single_agent(alias) for alias in (*services.models, AUTO)}
        """Models, each as a topology of one agent."""

    def __contains__(self, name: object) -> bool:
        return name in self.alone or name in self._services.topologies

    @property
    def names(self) -> list[str]:
        """The names that requests may use now, sorted."""
        return sorted({*self.alone, *self._services.topologies})

    def find(self, name: str) -> Graph:
        """Return what is served under the name; raises UnknownModel."""
        topology = self.alone.get(name) or self._services.topologies.get(name)
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
        models = self._services.models
        if unknown := sorted(set(names) - models.keys()):
            raise UnknownModel(
                f"No model is named {' or '.join(map(repr, unknown))}.",
                remedy=f"Choose among models: {', '.join(sorted(models))}.",
            )
        return Topology(
            name=AUTO, agents={AUTO: Agent(id=AUTO, model=AUTO, candidates=tuple(names))}
        )

    def listed(self, created: int) -> list[dict[str, Any]]:
        """Return all of them as OpenAI's model objects."""
        serving = self._services.serving()
        names = dict.fromkeys((*self.names, *self._services.embedders))
        return [self.model_object(name, created, serving) for name in names]

    def model_object(self, name: str, created: int, serving: Mapping[str, bool]) -> dict[str, Any]:
        """Return one of them as OpenAI's model object.

        `serving` says which models' engines seem to serve.
        """
        facts = {"id": name, "object": "model", "created": created, "owned_by": "shell-router"}
        topology = self._services.topologies.get(name)
        if name == AUTO:
            description = "one of the models, chosen for each request"
            return {**facts, "kind": AUTO, "description": description}
        if topology is not None:
            return {**facts, "kind": "topology", **self._describe_topology(name, topology)}
        if name in self._services.models:
            return {**facts, "kind": "model", **self._describe_model(name, serving)}
        return {**facts, "kind": "embedder"}

    def _describe_model(self, name: str, serving: Mapping[str, bool]) -> dict[str, Any]:
        model = self._services.models[name]
        served_by = model.base or name
        optional = {
            "engine": self._services.engines.get(served_by),
            "parent": model.base,
            "ready": serving.get(served_by),
        }
        comparisons = self._list_comparisons("drafts")
        return {
            "max_model_len": model.context_length,
            **{key: fact for key, fact in optional.items() if fact is not None},
            "drafts": [each for each in comparisons if each["models"] == name],
        }

    def _describe_topology(self, name: str, topology: Graph) -> dict[str, Any]:
        steps = {}
        names = {name}
        if isinstance(topology, Conditional):
            steps = {"steps": list(topology.steps)}
            names = {step.topology.name for step in topology.steps.values()}
        comparisons = self._list_comparisons("incremental_prefill")
        return {
            "source": self._services.topologies.catalog.entries[name].source,
            "description": topology.description,
            "agents": len(topology.agents),
            **steps,
            "incremental_prefill": [each for each in comparisons if each["topology"] in names],
        }

    def _list_comparisons(self, optimization: Optimization) -> list[dict[str, Any]]:
        return [
            {
                "topology": comparison.compared.topology,
                "models": comparison.compared.models,
                **({"role": comparison.compared.role} if comparison.compared.role else {}),
                "state": comparison.state,
                "benefit": comparison.benefit and asdict(comparison.benefit),
            }
            for comparison in self._services.holdouts.comparisons()
            if comparison.compared.optimization == optimization
        ]


def make_single_agent(alias: str) -> Topology:
    """Return the topology of one agent that gets the client's messages as they are."""
    return Topology(name=alias, agents={alias: Agent(id=alias, model=alias)})


TARGETS = Key[Targets]("TARGETS")
