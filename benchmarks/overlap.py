"""What the tree, incremental prefill and early exit each save, on the embedded pair.

    python benchmarks/overlap.py [--rounds N] [--new-tokens N] [--question-tokens N] [--json]

The four settings of Faster-MoA, 5.3, take turns in every round, each with a question nobody has asked before, one
request at a time. Every agent decodes the same number of tokens (the models have random weights and never stop).

    end_to_end_ms      from the request to the root's last token
    second_layer_ms    mean over the aggregators of layer two: from the end of the last precursor to the own end
    exposed_ms         the part of it before the first token: prefill, queue and KV transfer that nothing hides
    cached_share       of the aggregators' and the root's prompts, how much their real request found cached
    bound_ms           the critical path if no prefill were exposed: the longest chain of a leaf's first token and
                       every agent's decoding, as measured in the same run
    over_bound         end_to_end_ms / bound_ms - 1

Medians over the rounds; ratios are medians of each round's ratio.
"""

import argparse
import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from report import Row, report

from shell_router.api import Services
from shell_router.config import Config, ModelSettings, RandomWeights
from shell_router.early_exit import EarlyExit
from shell_router.execution import MoaRequest
from shell_router.telemetry import Trace
from shell_router.topology import Prefill, Topology, load_topology
from shell_router.wiring import running_services

TITLE = "Overlap: four settings of one question, tree 9-3-1 and all-to-all 9-9-1"
ENGINE = "embedded pair, random weights, float32"
TOPOLOGIES = Path(__file__).parent.parent / "topologies"
MODELS = {
    "small": RandomWeights(hidden=64, layers=2, seed=1),
    "medium": RandomWeights(hidden=128, layers=3, seed=2),
    "large": RandomWeights(hidden=256, layers=4, seed=3),
}
WORDS = ("time", "people", "water", "number", "answer", "seven", "twelve", "table", "river", "money", "light", "house")


@dataclass(frozen=True, slots=True)
class Figures:
    """One run's measurements, in seconds but for the shares and counts."""

    end_to_end_s: float
    second_layer_s: float
    exposed_s: float
    cached_share: float
    bound_s: float
    cut_off: int


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--question-tokens", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    rows = asyncio.run(measure(options.rounds, options.new_tokens, options.question_tokens))
    report(TITLE, rows, engine=ENGINE, simulated=False, as_json=options.json)


async def measure(rounds: int, new_tokens: int, question_tokens: int) -> list[Row]:
    """One row per setting."""
    config = Config({alias: ModelSettings(random=weights) for alias, weights in MODELS.items()})
    settings = four_settings(new_tokens)
    found: dict[str, list[Figures]] = {name: [] for name in settings}
    words = random.Random(0)
    async with running_services(config) as services:
        for round_number in range(rounds + 1):
            for name, topology in settings.items():
                question = " ".join(words.choices(WORDS, k=question_tokens))
                figures = await run(services, topology, f"{name}-{round_number}", question)
                if round_number:  # the first warms up
                    found[name].append(figures)
    return [row(name, found) for name in settings]


def four_settings(new_tokens: int) -> Mapping[str, Topology]:
    """The settings of section 5.3 by name, greedy and of equal output lengths."""
    tree = load_topology(TOPOLOGIES / "tree-9-3-1.yaml")
    dense = load_topology(TOPOLOGIES / "all-to-all-9-9-1.yaml")
    return {
        "all-to-all": setting(dense, new_tokens, incremental=False, early_exit=False),
        "tree": setting(tree, new_tokens, incremental=False, early_exit=False),
        "tree + incremental prefill": setting(tree, new_tokens, incremental=True, early_exit=False),
        "full": setting(tree, new_tokens, incremental=True, early_exit=True),
    }


def setting(topology: Topology, new_tokens: int, *, incremental: bool, early_exit: bool) -> Topology:
    """`topology` with mechanisms switched on or off."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    gate = EarlyExit() if early_exit else None
    return replace(
        topology,
        agents={name: replace(agent, sampling=sampling) for name, agent in topology.agents.items()},
        clusters=tuple(replace(cluster, early_exit=gate) for cluster in topology.clusters),
        prefill=Prefill(incremental=incremental),
    )


async def run(services: Services, topology: Topology, run_id: str, question: str) -> Figures:
    """One request, measured from its trace."""
    precursors = {name: agent.precursors for name, agent in topology.agents.items()}
    trace = Trace(
        run_id,
        tenant="benchmark",
        target=topology.name,
        root=topology.root.id,
        started_s=services.clock(),
        wall_s=services.wall(),
        precursors=precursors,
    )
    request = MoaRequest(run_id, "benchmark", ({"role": "user", "content": question},), seed=hash_free_seed(run_id))
    await services.executor.run(topology, request, trace.add)
    trace.ended(services.clock(), "finished")
    return figures_of(topology, trace.as_json())


def hash_free_seed(run_id: str) -> int:
    """The same seed for the same run in every process."""
    return sum(run_id.encode())


def figures_of(topology: Topology, trace: Mapping[str, Any]) -> Figures:
    """What the trace says of one run."""
    agents = trace["agents"]
    ended_s = {name: agent["ended_s"] for name, agent in agents.items()}
    finished = {name: agent for name, agent in agents.items() if agent["state"] == "finished"}
    aggregators = [name for name in topology.layers[1] if name in finished]
    waits = [ended_s[a] - max(ended_s[p] for p in topology.agents[a].precursors) for a in aggregators]
    readers = [agent for name, agent in finished.items() if topology.agents[name].precursors]
    prompts = sum(agent["prompt_tokens"] for agent in readers)
    return Figures(
        end_to_end_s=trace["duration_s"],
        second_layer_s=statistics.mean(waits),
        exposed_s=statistics.mean(agents[name]["exposed_prefill_s"] for name in aggregators),
        cached_share=sum(agent["cached_tokens"] for agent in readers) / prompts,
        bound_s=critical_path_s(topology, agents),
        cut_off=sum(agent["state"] == "early_exit" for agent in agents.values()),
    )


def critical_path_s(topology: Topology, agents: Mapping[str, Mapping[str, Any]]) -> float:
    """Seconds to the root's end if each agent decoded from the moment its last needed precursor ended."""
    end_s: dict[str, float] = {}
    for name, agent in topology.agents.items():
        if agents[name]["state"] != "finished":
            continue
        decode = next(span for span in agents[name]["spans"] if span["name"] == "decode")
        needed = [end_s[p] for p in agent.precursors if p in end_s]
        end_s[name] = decode["end_s"] - decode["start_s"] + (max(needed) if needed else decode["start_s"])
    return end_s[topology.root.id]


def row(name: str, found: Mapping[str, Sequence[Figures]]) -> Row:
    """One setting's medians."""
    mine, dense, tree = found[name], found["all-to-all"], found["tree"]
    return {
        "setting": name,
        "end_to_end_ms": 1e3 * median(one.end_to_end_s for one in mine),
        "vs_all_to_all": median(a.end_to_end_s / b.end_to_end_s for a, b in zip(mine, dense, strict=True)),
        "vs_tree": median(a.end_to_end_s / b.end_to_end_s for a, b in zip(mine, tree, strict=True)),
        "second_layer_ms": 1e3 * median(one.second_layer_s for one in mine),
        "second_vs_tree": median(a.second_layer_s / b.second_layer_s for a, b in zip(mine, tree, strict=True)),
        "exposed_ms": 1e3 * median(one.exposed_s for one in mine),
        "cached_share": median(one.cached_share for one in mine),
        "bound_ms": 1e3 * median(one.bound_s for one in mine),
        "over_bound": median(one.end_to_end_s / one.bound_s - 1 for one in mine),
        "cut_off": median(one.cut_off for one in mine),
    }


def median(values: Any) -> float:
    """The median of what may be a generator."""
    return float(statistics.median(list(values)))


if __name__ == "__main__":
    main()
