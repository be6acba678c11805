"""What a chat completion's `model` may name: topologies, models as the smallest topologies, and a
choice of models.
"""

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
        self.alone = {alias: straight_through(alias) for alias in (*services.models, AUTO)}
        """Models, each as a topology of one agent."""

    def __contains__(self, name: object) -> bool:
        return name in self.alone or name in self._services.topologies

    @property
    def names(self) -> list[str]:
        """All that requests may name now, sorted."""
        return sorted({*self.alone, *self._services.topologies})

    def find(self, name: str) -> Graph:
        """What is served under the name now. Raises UnknownModel."""
        topology = self.alone.get(name) or self._services.topologies.get(name)
        if topology is None:
            known = ", ".join(self.names) or "none"
            raise UnknownModel(
                f"No topology or model is named {name!r}.", remedy=f"Known: {known}."
            )
        return topology

    def choice(self, names: Sequence[str]) -> Graph:
        """The one that is named, or one agent whose model is to be chosen among those. Raises
        UnknownModel.
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
        """All of them in the shape of OpenAI's model objects."""
        serving = self._services.serving()
        names = dict.fromkeys((*self.names, *self._services.embedders))
        return [self.model_object(name, created, serving) for name in names]

    def model_object(self, name: str, created: int, serving: Mapping[str, bool]) -> dict[str, Any]:
        """What is served under `name` in that shape; `serving` says which models' engines seem to
        serve.
        """
        facts = {"id": name, "object": "model", "created": created, "owned_by": "shell-router"}
        if name == AUTO:
            return {
                **facts,
                "kind": AUTO,
                "description": "one of the models, chosen for each request",
            }
        topology = self._services.topologies.get(name)
        if topology is None and name not in self._services.models:
            return {**facts, "kind": "embedder"}
        if topology is None:
            model = self._services.models[name]
            words = self._services.engines.get(model.base or name)
            known = {
                "engine": words,
                "parent": model.base,
                "ready": serving.get(model.base or name),
            }
            known = {key: value for key, value in known.items() if value is not None}
            drafts = [seen for seen in self._compared("drafts") if seen["models"] == name]
            return {
                **facts,
                "kind": "model",
                "max_model_len": model.context_length,
                **known,
                "drafts": drafts,
            }
        steps = {}
        names = {name}
        if isinstance(topology, Conditional):
            steps = {"steps": list(topology.steps)}
            names = {step.topology.name for step in topology.steps.values()}
        return {
            **facts,
            "kind": "topology",
            "source": self._services.topologies.catalog.entries[name].source,
            "description": topology.description,
            "agents": len(topology.agents),
            **steps,
            "incremental_prefill": [
                seen for seen in self._compared("incremental_prefill") if seen["topology"] in names
            ],
        }

    def _compared(self, optimization: Optimization) -> list[dict[str, Any]]:
        seen = [
            one
            for one in self._services.holdouts.comparisons()
            if one.compared.optimization == optimization
        ]
        return [
            {
                "topology": one.compared.topology,
                "models": one.compared.models,
                **({"role": one.compared.role} if one.compared.role else {}),
                "state": one.state,
                "benefit": one.benefit and asdict(one.benefit),
            }
            for one in seen
        ]


def straight_through(alias: str) -> Topology:
    """One agent that is asked the client's messages as they are."""
    return Topology(name=alias, agents={alias: Agent(id=alias, model=alias)})


TARGETS = Key[Targets]("TARGETS")
