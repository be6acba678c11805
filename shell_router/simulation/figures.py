"""What the trace of one run says of it."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shell_router.topology import Topology

Agents = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Figures:
    """One run's measurements, in seconds but for the shares and counts. Readers are the aggregators and the root.

    What is said of the second layer is None where none of it wrote anything; where no reader did, nothing was late.
    """

    end_to_end_s: float
    second_layer_s: float | None
    exposed_s: float | None
    reader_exposed_s: float
    late_share: float
    cached_share: float
    bound_s: float
    cut_off: int


def figures_of(topology: Topology, trace: Mapping[str, Any]) -> Figures:
    """One finished run's figures, from its trace as JSON."""
    agents: Agents = trace["agents"]
    finished = {name: agent for name, agent in agents.items() if agent["state"] == "finished"}
    readers = {name: agent for name, agent in finished.items() if topology.agents[name].precursors}
    aggregators = [name for name in topology.layers[1] if name in readers]
    inputs_end_s = {name: max(agents[p]["ended_s"] for p in topology.agents[name].precursors) for name in readers}
    prompts = sum(agent["prompt_tokens"] for agent in readers.values()) or 1
    in_time = sum(
        # an update may have held a slot that an early exit then left out
        min(prefilled_tokens(agent, inputs_end_s[name]), agent["cached_tokens"])
        for name, agent in readers.items()
    )
    return Figures(
        end_to_end_s=trace["duration_s"],
        second_layer_s=_mean([agents[name]["ended_s"] - inputs_end_s[name] for name in aggregators]),
        exposed_s=_mean([agents[name]["exposed_prefill_s"] for name in aggregators]),
        reader_exposed_s=_mean([agent["exposed_prefill_s"] for agent in readers.values()]) or 0.0,
        late_share=1 - in_time / prompts if readers else 0.0,
        cached_share=sum(agent["cached_tokens"] for agent in readers.values()) / prompts,
        bound_s=critical_path_s(topology, agents),
        cut_off=sum(agent["state"] == "early_exit" for agent in agents.values()),
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def prefilled_tokens(agent: Mapping[str, Any], at_s: float) -> int:
    """Tokens of the agent's prompt that were in the prefix cache at `at_s`, as its updates and its request tell.

    Without an update by then, what its first request found there: the question, which others have asked before.
    """
    updates = [span for span in agent["spans"] if span["name"] == "prefill_increment"]
    done = [span["prompt_tokens"] for span in updates if span["end_s"] <= at_s]
    first = updates[0]["cached_tokens"] if updates else agent["cached_tokens"]
    return int(max(done, default=first))


def critical_path_s(topology: Topology, agents: Agents) -> float:
    """Seconds to the root's end if each agent decoded from the moment its last needed precursor ended.

    One that passes an output on does so as long after its last needed precursor as it did.
    """
    end_s: dict[str, float] = {}
    for name, agent in topology.agents.items():
        needed = [p for p in agent.precursors if p in end_s]
        begin_s = max((end_s[p] for p in needed), default=None)
        if agents[name]["state"] == "passed_on":
            waited_s = agents[name]["ended_s"] - max(agents[p]["ended_s"] for p in needed)
            end_s[name] = (begin_s or 0.0) + waited_s
        elif agents[name]["state"] == "finished":
            decode = next(span for span in agents[name]["spans"] if span["name"] == "decode")
            end_s[name] = decode["end_s"] - decode["start_s"] + (decode["start_s"] if begin_s is None else begin_s)
    return end_s[topology.root.id]
