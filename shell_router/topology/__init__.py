"""Agent graphs: what a topology file says, checked, and drawn."""

from shell_router.topology.draw import draw_mermaid, draw_terminal
from shell_router.topology.graph import AUTO, Agent, Cluster, Prefill, Prompt, Topology
from shell_router.topology.load import load_folder, load_topology, parse_topology
from shell_router.topology.schema import json_schema

__all__ = [
    "AUTO",
    "Agent",
    "Cluster",
    "Prefill",
    "Prompt",
    "Topology",
    "draw_mermaid",
    "draw_terminal",
    "json_schema",
    "load_folder",
    "load_topology",
    "parse_topology",
]
