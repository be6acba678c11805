"""The four settings of Faster-MoA, 5.3."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shell_router.config import Config
from shell_router.early_exit import EarlyExit
from shell_router.scheduling import IncrementSettings
from shell_router.topology import Agent, Prefill, Topology, load_topology

TOPOLOGIES = Path(__file__).parents[2] / "topologies"
SHARED_PAIR_LENGTHS = {"small": 0.5, "medium": 0.75, "large": 1.0}


def tokens_by_model(config: Config, new_tokens: int) -> Mapping[str, int]:
    """Tokens that an agent of each model writes: `new_tokens`, or, where one pair serves all, less for the smaller."""
    if len(set(config.models.values())) > 1:
        return dict.fromkeys(config.models, new_tokens)
    return {alias: max(1, int(SHARED_PAIR_LENGTHS.get(alias, 1.0) * new_tokens)) for alias in config.models}


def four_settings(new_tokens: Mapping[str, int]) -> Mapping[str, Topology]:
    """The settings by name; an agent writes as many tokens as `new_tokens` says for its model's alias.

    Raises ConfigError where one of the topologies' aliases is missing.
    """
    tree = load_topology(TOPOLOGIES / "tree-9-3-1.yaml", models=new_tokens)
    dense = load_topology(TOPOLOGIES / "all-to-all-9-9-1.yaml", models=new_tokens)
    return {
        "all-to-all": setting(dense, new_tokens, incremental=False, early_exit=False),
        "tree": setting(tree, new_tokens, incremental=False, early_exit=False),
        "tree + incremental prefill": setting(tree, new_tokens, incremental=True, early_exit=False),
        "full": setting(tree, new_tokens, incremental=True, early_exit=True),
    }


def in_chunks(tree: Topology, chunks: Sequence[int]) -> Mapping[str, Topology]:
    """The tree with incremental prefill in chunks of fixed sizes, by name."""
    return {
        f"in chunks of {tokens}": replace(tree, prefill=Prefill(increments=IncrementSettings(chunk_tokens=tokens)))
        for tokens in chunks
    }


def setting(topology: Topology, new_tokens: Mapping[str, int], *, incremental: bool, early_exit: bool) -> Topology:
    """`topology` with mechanisms switched on or off."""
    gate = EarlyExit() if early_exit else None
    return replace(
        topology,
        agents={name: writing(agent, new_tokens[agent.model]) for name, agent in topology.agents.items()},
        clusters=tuple(replace(cluster, early_exit=gate) for cluster in topology.clusters),
        prefill=Prefill(incremental=incremental),
    )


def writing(agent: Agent, tokens: int) -> Agent:
    """`agent` with an output of exactly that length, drawn as its topology says."""
    return replace(agent, sampling={**agent.sampling, "max_new_tokens": tokens, "ignore_eos": True})
