"""`shell-router topology`: check, show, schema."""

# ruff: noqa: PLC0415 - see the package's docstring

import argparse
import json
from pathlib import Path

from shell_router.cli.arguments import Commands, names


def add_commands(commands: Commands) -> None:
    """What these commands take."""
    topology = commands.add_parser("topology", help="check and draw topology files")
    _add_topology(topology.add_subparsers(required=True, metavar="COMMAND"))


def _add_topology(commands: Commands) -> None:
    check = commands.add_parser("check", help="say whether topology files are right, or what is wrong where")
    check.add_argument("files", nargs="+", type=Path, metavar="FILE")
    check.add_argument("--models", type=names, help="the deployment's model aliases: a,b,c")
    check.set_defaults(command=_topology_check)
    show = commands.add_parser("show", help="draw a topology")
    show.add_argument("file", type=Path, metavar="FILE")
    show.add_argument("--models", type=names, help="the deployment's model aliases: a,b,c")
    show.add_argument("--mermaid", action="store_true", help="print a Mermaid flowchart")
    show.set_defaults(command=_topology_show)
    schema = commands.add_parser("schema", help="print the JSON Schema of topology files, for editors")
    schema.set_defaults(command=_topology_schema)


def _topology_check(chosen: argparse.Namespace) -> int:
    from shell_router.topology import load_topology

    for file in chosen.files:
        topology = load_topology(file, models=chosen.models)
        layers = "-".join(str(len(layer)) for layer in topology.layers)
        print(f"{file}: {topology.name} is right: {len(topology.agents)} agents in layers of {layers}")
    return 0


def _topology_show(chosen: argparse.Namespace) -> int:
    from shell_router.topology import draw_mermaid, draw_terminal, load_topology

    draw = draw_mermaid if chosen.mermaid else draw_terminal
    print(draw(load_topology(chosen.file, models=chosen.models)), end="")
    return 0


def _topology_schema(_chosen: argparse.Namespace) -> int:
    from shell_router.topology import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
