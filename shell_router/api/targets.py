"""What a chat completion's `model` may name: topologies, and single models as the smallest topologies."""

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from shell_router.api.services import Services
from shell_router.errors import ConfigError, UnknownModel
from shell_router.topology import Agent, Topology


class Targets:
    """Topologies and models by the names that requests use."""

    def __init__(self, services: Services) -> None:
        clash = sorted(services.topologies.keys() & services.models.keys())
        if clash:
            raise ConfigError(
                f"{', '.join(clash)} name both a topology and a model.",
                remedy="Requests choose by name: rename one of them.",
            )
        self._services = services
        self._by_name: Mapping[str, Topology] = {
            **{alias: straight_through(alias) for alias in services.models},
            **services.topologies,
        }

    def find(self, name: str) -> Topology:
        """Raises UnknownModel."""
        topology = self._by_name.get(name)
        if topology is None:
            known = ", ".join(sorted(self._by_name)) or "none"
            raise UnknownModel(f"No topology or model is named {name!r}.", remedy=f"Known: {known}.")
        return topology

    def listed(self, created: int) -> list[dict[str, Any]]:
        """All of them in the shape of OpenAI's model objects."""
        return [self._model_object(name, created) for name in sorted(self._by_name)]

    def _model_object(self, name: str, created: int) -> dict[str, Any]:
        facts = {"id": name, "object": "model", "created": created, "owned_by": "shell-router"}
        topology = self._services.topologies.get(name)
        if topology is None:
            engine = {"engine": self._services.engines[name]} if name in self._services.engines else {}
            return {**facts, "kind": "model", "max_model_len": self._services.models[name].context_length, **engine}
        return {
            **facts,
            "kind": "topology",
            "description": topology.description,
            "agents": len(topology.agents),
        }


def straight_through(alias: str) -> Topology:
    """One agent that is asked the client's messages as they are."""
    return Topology(name=alias, agents={alias: Agent(id=alias, model=alias)})


TARGETS = web.AppKey("TARGETS", Targets)
