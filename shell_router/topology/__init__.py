"""Agent graphs: what a topology file says, checked, and drawn."""

from shell_router.topology.graph import (
    AUTO,
    VOTE,
    Agent,
    Cluster,
    Conditional,
    Graph,
    Prefill,
    Prompt,
    Step,
    Topology,
)
from shell_router.topology.load import (
    INLINE,
    Catalog,
    Entry,
    LiveSettings,
    files_in,
    load_topology,
    load_with_others,
    parse_topology,
)
from shell_router.topology.syntax import json_schema

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
    "json_schema",
    "load_topology",
    "load_with_others",
    "parse_topology",
]
