"""`shell-router topology`: check, show, experts, schema."""

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
    experts = commands.add_parser("experts", help="tell which models follow on which, and how often each is needed")
    experts.add_argument("files", nargs="+", type=Path, metavar="FILE")
    experts.add_argument("--sample", type=Path, help='JSONL of requests, one {"model": …, "metadata": …} per line')
    experts.add_argument(
        "--chances",
        type=_chances,
        action="append",
        default=[],
        metavar="TOPOLOGY/STEP=NEXT:SHARE,…",
        help="how often each step, or `end`, follows on a step, or on `start`",
    )
    experts.add_argument("--auto", type=names, default=(), help="the models that `auto` stands for: a,b,c")
    experts.set_defaults(command=_topology_experts)
    schema = commands.add_parser("schema", help="print the JSON Schema of topology files, for editors")
    schema.set_defaults(command=_topology_schema)


def _topology_check(chosen: argparse.Namespace) -> int:
    from shell_router.topology import Conditional, load_with_others

    for file, topology in load_with_others(chosen.files, models=chosen.models).items():
        if isinstance(topology, Conditional):
            shape = f"{len(topology.steps)} steps, {len(topology.agents)} agents"
        else:
            layers = "-".join(str(len(layer)) for layer in topology.layers)
            shape = f"{len(topology.agents)} agents in layers of {layers}"
        print(f"{file}: {topology.name} is right: {shape}")
    return 0


def _topology_show(chosen: argparse.Namespace) -> int:
    from shell_router import topology as drawing

    topology = drawing.load_with_others([chosen.file], models=chosen.models)[chosen.file]
    if isinstance(topology, drawing.Conditional):
        drawn = (drawing.draw_steps_mermaid if chosen.mermaid else drawing.draw_steps_terminal)(topology)
    else:
        drawn = (drawing.draw_mermaid if chosen.mermaid else drawing.draw_terminal)(topology)
    print(drawn, end="")
    return 0


def _topology_experts(chosen: argparse.Namespace) -> int:
    from shell_router.expert_pools.dependencies import expert_uses
    from shell_router.expert_pools.ways import Asked, read_sample
    from shell_router.topology import load_with_others
    from shell_router.topology.load import read_text

    graphs = {one.name: one for one in load_with_others(chosen.files).values()}
    if chosen.sample is None:
        asked = [Asked(name, labels=None) for name in graphs]
    else:
        asked = read_sample(read_text(chosen.sample), source=str(chosen.sample))
    uses = expert_uses(graphs, asked, chosen.auto, dict(chosen.chances))
    width = max(map(len, ("expert", *uses)))
    print(f"{'expert':<{width}}  usage  after")
    for name, use in sorted(uses.items(), key=lambda one: -one[1].usage):
        print(f"{name:<{width}}  {use.usage:5.3f}  {', '.join(sorted(use.after)) or '-'}")
    return 0


def _chances(text: str) -> tuple[tuple[str, str], dict[str, float]]:
    """`triage/quick=careful:0.4,end:0.6`."""
    place, equals, shares = text.partition("=")
    topology, slash, step = place.partition("/")
    try:
        found = {target: float(share) for target, _, share in (one.rpartition(":") for one in names(shares))}
    except ValueError:
        found = {}
    if not (equals and slash and found):
        raise argparse.ArgumentTypeError(f"must be TOPOLOGY/STEP=NEXT:SHARE,… and not {text!r}")
    return (topology, step), found


def _topology_schema(_chosen: argparse.Namespace) -> int:
    from shell_router.topology import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
