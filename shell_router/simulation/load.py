"""A simulation with all that its file names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shell_router.engines.simulated import PairCosts
from shell_router.errors import ConfigError
from shell_router.simulation.settings import EngineProfile, Profiles, Simulation, load_profiles, load_simulation
from shell_router.topology import Topology, load_topology


@dataclass(frozen=True, slots=True)
class Loaded:
    """A simulation, its topologies by name, and per model a pair's costs and the GPUs that an engine of it takes."""

    simulation: Simulation
    topologies: Mapping[str, Topology]
    costs: Mapping[str, PairCosts]
    gpus_per_engine: Mapping[str, int]


def load(file: Path) -> Loaded:
    """What `file` describes. Raises ConfigError."""
    simulation = load_simulation(file)
    profiles = load_profiles(simulation.profiles)
    _require_profiles(file, simulation, profiles)
    profile_of = {alias: profiles.models[model.profile] for alias, model in simulation.models.items()}
    return Loaded(
        simulation,
        _topologies(file, simulation),
        {alias: _costs(simulation, alias, profile, profiles) for alias, profile in profile_of.items()},
        {alias: profile.roofline.gpus if profile.roofline else 1 for alias, profile in profile_of.items()},
    )


def _require_profiles(file: Path, simulation: Simulation, profiles: Profiles) -> None:
    for alias, model in simulation.models.items():
        if model.profile not in profiles.models:
            raise ConfigError(
                f"{file}: models.{alias} has the profile {model.profile!r}, which {simulation.profiles} lacks.",
                remedy=f"Choose one of: {', '.join(profiles.models)}.",
            )


def _costs(simulation: Simulation, alias: str, profile: EngineProfile, profiles: Profiles) -> PairCosts:
    try:
        return profile.costs(profiles.gpus)
    except ConfigError as error:
        name = simulation.models[alias].profile
        raise ConfigError(f"{simulation.profiles}: models.{name}: {error.args[0]}", remedy=error.remedy) from error


def _topologies(file: Path, simulation: Simulation) -> dict[str, Topology]:
    found = [load_topology(one, models=simulation.models) for one in simulation.topologies]
    if simulation.max_new_tokens is not None:
        found = [widened(topology, simulation.max_new_tokens) for topology in found]
    if len({topology.name for topology in found}) < len(found):
        raise ConfigError(f"{file}: two of the topologies have one name.", remedy="Rename one.")
    return {topology.name: topology for topology in found}


def widened(topology: Topology, max_new_tokens: int) -> Topology:
    """The topology with another limit to all outputs."""
    agents = {
        name: replace(agent, sampling={**agent.sampling, "max_new_tokens": max_new_tokens})
        for name, agent in topology.agents.items()
    }
    return replace(topology, agents=agents)
