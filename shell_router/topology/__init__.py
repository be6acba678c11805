"""Agent graphs: topology files, checked, kept by name, and drawn."""

from shell_router.topology.catalog import (
    Catalog,
    Entry,
    LiveSettings,
    files_in,
    load_with_others,
)
from shell_router.topology.graph import (
    AUTO,
    VOTE,
    Agent,
    Cluster,
    Conditional,
    Graph,
    Prefill,
    Step,
    Topology,
)
from shell_router.topology.keys import topology_schema
from shell_router.topology.load import INLINE, load_topology, parse_topology
from shell_router.topology.prompting import Prompt

__all__ = [
    "AUTO",
    "INLINE",
    "VOTE",
    "Agent",
    "Catalog",
    "Cluster",
    "Conditional",
    "Entry",
    "Graph",
    "LiveSettings",
    "Prefill",
    "Prompt",
    "Step",
    "Topology",
    "files_in",
    "load_topology",
    "load_with_others",
    "parse_topology",
    "topology_schema",
]
