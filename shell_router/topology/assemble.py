"""From the plain values of a checked file to a `Topology`."""

from collections.abc import Mapping
from dataclasses import replace
from graphlib import TopologicalSorter
from typing import Any

from shell_router.early_exit import EarlyExit
from shell_router.scheduling import IncrementSettings
from shell_router.topology.graph import AUTO, Agent, Cluster, Prefill, Topology
from shell_router.topology.layered import Values, merged, write_out
from shell_router.topology.prompting import AGGREGATOR, PROPOSER

_ON, _OFF = (True, "on"), (False, "off")


def agents_in(file: Values) -> Mapping[str, Values]:
    """The graph agent by agent, whichever form the file uses."""
    if "tree" in file:
        return write_out("tree", file["tree"])
    if "all_to_all" in file:
        return write_out("all_to_all", file["all_to_all"])
    return {agent: dict(said) for agent, said in file["agents"].items()}


def assemble(file: Values, *, name: str) -> Topology:
    """Build the topology that a checked file describes; `name` is used when the file gives none."""
    said = agents_in(file)
    order = list(TopologicalSorter({agent: said[agent].get("precursors", ()) for agent in said}).static_order())
    agents = {agent: agent_of(agent, said[agent], file) for agent in order}
    agents[order[-1]] = replace(agents[order[-1]], on_failure="fail")  # without the root there is no answer
    bare = Topology(name=file.get("name", name), agents=agents)
    return replace(
        bare,
        clusters=_clusters(file["clusters"], file) if "clusters" in file else _default_clusters(bare, file),
        prefill=prefill_in(file),
        description=file.get("description", ""),
    )


def prefill_in(file: Values) -> Prefill:
    """The `prefill` block. Raises ValueError for settings that contradict each other."""
    said = dict(file.get("prefill", {}))
    incremental = said.pop("incremental", True) in _ON
    slot_order = said.pop("slot_order", "declared")
    return Prefill(incremental=incremental, increments=IncrementSettings(**said), slot_order=slot_order)


def early_exit_in(said: Any, base: Any = False) -> EarlyExit | None:
    """An `early_exit` value: None for off, else settings over those of `base`, the topology's own value.

    Raises ValueError for settings that contradict each other.
    """
    if said in _OFF:
        return None
    own = said if isinstance(said, Mapping) else {}
    inherited = base if isinstance(base, Mapping) else {}
    settings = {**inherited, **own}
    return EarlyExit(**{**settings, "pass_on": settings.get("pass_on", False) in _ON})


def agent_of(agent_id: str, own: Values, file: Values) -> Agent:
    """One agent of a checked file, what it does not say itself taken from the rest of the file."""
    topology_wide = {"on_failure": file["on_failure"]} if "on_failure" in file else {}
    said = merged(merged(topology_wide, file.get("defaults", {})), own)
    precursors = tuple(said.pop("precursors", ()))
    prompt = replace(AGGREGATOR if precursors else PROPOSER, **said.pop("prompt", {}))
    models = said.pop("model")
    if isinstance(models, str):
        return Agent(id=agent_id, model=models, precursors=precursors, prompt=prompt, **said)
    return Agent(id=agent_id, model=AUTO, candidates=tuple(models), precursors=precursors, prompt=prompt, **said)


def _clusters(said: Mapping[str, Values], file: Values) -> tuple[Cluster, ...]:
    base = file.get("early_exit", False)
    return tuple(
        Cluster(cluster, tuple(block["agents"]), early_exit_in(block.get("early_exit", base), base))
        for cluster, block in said.items()
    )


def _default_clusters(topology: Topology, file: Values) -> tuple[Cluster, ...]:
    """Agents read by the same successors, where there are several: one alone has nobody to be judged with."""
    groups: dict[frozenset[str], list[str]] = {}
    for agent, after in topology.successors.items():
        if after:
            groups.setdefault(frozenset(after), []).append(agent)
    early_exit = early_exit_in(file.get("early_exit", False))
    shared = [tuple(group) for group in groups.values() if len(group) > 1]
    return tuple(Cluster(f"cluster-{n}", group, early_exit) for n, group in enumerate(shared, start=1))
