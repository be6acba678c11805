"""What is asked for real and simulated: one model, and the four settings of Faster-MoA, 5.3."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overlapping.settings import four_settings, setting

from shell_router.api.targets import straight_through
from shell_router.telemetry import Trace as RunTrace
from shell_router.topology import Topology

SINGLE = "large"
Trace = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens of every output and question, how many clients ask at a time, and how often each in a round."""

    new_tokens: int
    question_tokens: int
    at_once: Sequence[int]
    turns: int


def all_settings(models: Collection[str], new_tokens: int) -> Mapping[str, Topology]:
    """The settings by name; every agent writes `new_tokens`. Raises ConfigError where a model is missing."""
    tokens = dict.fromkeys(models, new_tokens)
    return {f"{SINGLE} alone": alone(SINGLE, new_tokens), **four_settings(tokens)}


def alone(alias: str, new_tokens: int) -> Topology:
    """One agent that answers the question itself."""
    return setting(straight_through(alias), {alias: new_tokens}, incremental=False, early_exit=False)


def trace_of(topology: Topology, name: str, now_s: float) -> RunTrace:
    """The trace of a request that begins now."""
    return RunTrace(
        name,
        tenant="benchmark",
        target=topology.name,
        root=topology.root.id,
        started_s=now_s,
        wall_s=now_s,
        precursors={agent.id: agent.precursors for agent in topology.agents.values()},
    )
