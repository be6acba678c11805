"""Agent graphs: what a topology file says, checked, and drawn."""

from shell_router.topology.conditional import Conditional, Graph, Step
from shell_router.topology.draw import draw_mermaid, draw_terminal
from shell_router.topology.draw_steps import draw_steps_mermaid, draw_steps_terminal
from shell_router.topology.folder import files_in, load_files, load_folder, load_with_others
from shell_router.topology.graph import AUTO, Agent, Cluster, Prefill, Prompt, Topology
from shell_router.topology.load import load_topology, parse_steps, parse_topology
from shell_router.topology.schema import json_schema

__all__ = [
    "AUTO",
    "Agent",
    "Cluster",
    "Conditional",
    "Graph",
    "Prefill",
    "Prompt",
    "Step",
    "Topology",
    "draw_mermaid",
    "draw_steps_mermaid",
    "draw_steps_terminal",
    "draw_terminal",
    "files_in",
    "json_schema",
    "load_files",
    "load_folder",
    "load_topology",
    "load_with_others",
    "parse_steps",
    "parse_topology",
]
