"""Reads what a router answered, and the trace of how, into records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from shell_router.evaluation.records import AgentRecord, ExitRecord


@dataclass(frozen=True, slots=True)
class Reply:
    """One request's answer. `latency_s` is from sending to the answer's end."""

    text: str
    latency_s: float
    prompt_tokens: int
    completion_tokens: int
    agents: tuple[AgentRecord, ...]
    exits: tuple[ExitRecord, ...]


def read_reply(completion: Mapping[str, Any], trace: Mapping[str, Any], latency_s: float) -> Reply:
    """A chat completion and its trace, both as docs/api.md has them."""
    usage = completion["usage"]
    layers = layers_of({agent: found.get("precursors", ()) for agent, found in trace["agents"].items()})
    return Reply(
        completion["choices"][0]["message"]["content"] or "",
        latency_s,
        usage["prompt_tokens"],
        usage["completion_tokens"],
        tuple(_agent(agent, found, layers[agent]) for agent, found in trace["agents"].items()),
        tuple(_exit(found, layers) for found in trace["exits"]),
    )


def layers_of(precursors: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Per agent its longest distance from a leaf, by the agents that each one reads."""

    @cache
    def layer(agent: str) -> int:
        return 1 + max((layer(one) for one in precursors[agent] if one in precursors), default=-1)

    return {agent: layer(agent) for agent in precursors}


def _agent(agent: str, found: Mapping[str, Any], layer: int) -> AgentRecord:
    return AgentRecord(
        agent,
        found["model"],
        layer,
        found["state"],
        any(span["name"] == "prefill" for span in found["spans"]),
        found.get("prompt_tokens", 0),
        found.get("cached_tokens", 0),
        found.get("completion_tokens", found["decoded_tokens"]),
    )


def _exit(found: Mapping[str, Any], layers: Mapping[str, int]) -> ExitRecord:
    layer = max((layers[agent] for agent in found["completed"]), default=0)
    return ExitRecord(found["cluster"], layer, found["exited"], found["end_s"] - found["start_s"])
