"""Faster-MoA's figure 4 and what goes beyond it, on six simulated H200s (configs/engines/h200.yaml), in virtual time.

    python benchmarks/faster_moa.py [--table NAME ...] [--requests N] [--seed N] [--json]

    settings     its four settings (section 5.3) over its five data sets, one question at a time: latency relative to
                 all-to-all's, beside the largest reductions that the paper tells; then ours
    reading      what decides early exit's figure: how many outputs it waits for, and who the root is
    activation   agents that ran to their end, per question, of those there are
    second       from the end of an aggregator's last input to its own end, by what the two GPUs of a model do (5.2.2)
    beyond       slot order, chunk sizes and the exit in flight, alone and together, against the critical-path bound
    busy         what updates of one size or another cost the prefill engines, with a question every second
    scale        what a simulated agent costs, for 100, 1000 and 10000 programs at a time, and down again, which shows
                 how far runs of one size differ

How long outputs are and how often they agree is assumed (DATA_SETS). Each table is of one seed: what is asked and
written is the same in all of its rows. Of questions with outputs as long as AIME's a tenth is asked.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from report import Row, report

from shell_router.early_exit import EarlyExit
from shell_router.scheduling import IncrementSettings
from shell_router.simulation.load import Loaded, load
from shell_router.simulation.run import simulate
from shell_router.simulation.settings import Length, Workload
from shell_router.simulation.summary import Summary, summary_of
from shell_router.topology import Prefill, Topology

ROOT = Path(__file__).parents[1]
SIMULATION = ROOT / "configs/simulations/six-h200.yaml"
MODELS = ("small", "medium", "large")
PAPER = {"all-to-all": "0 %", "tree": "up to 62 %", "tree-incremental": "up to 76 %", "full": "up to 90 %"}


@dataclass(frozen=True, slots=True)
class DataSet:
    """Mean tokens of a question and of an output, the latter's spread, and how often agents agree. All are assumed."""

    question: int
    output: int
    spread: float
    right: float
    asked: float = 1.0


DATA_SETS = {
    "GSM8K": DataSet(80, 300, 0.4, 0.93),
    "MATH-500": DataSet(100, 1200, 0.7, 0.85),
    "AIME2025": DataSet(150, 8000, 0.5, 0.45, asked=0.1),
    "MMLU-ProX-Lite": DataSet(250, 900, 0.7, 0.65),
    "IFBench": DataSet(250, 700, 0.8, 0.3),
}


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=TABLES, nargs="+", default=list(TABLES), metavar="NAME")
    parser.add_argument("--requests", type=int, default=100, help="questions per row (default 100)")
    parser.add_argument(
        "--programs", type=int, nargs="+", default=[100, 1000, 10_000, 1000, 100], help="for the table `scale`"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end each table with one JSON object")
    options = parser.parse_args()
    bench = Bench(load(SIMULATION), options.requests, options.programs, options.seed)
    for name in options.table:
        title, rows = TABLES[name]
        engine = "six H200s by roofline, three sizes of Qwen3-VL"
        report(title, rows(bench), engine=engine, simulated=True, as_json=options.json)


@dataclass(frozen=True, slots=True)
class Bench:
    """The shipped simulation, and how much of it is run."""

    loaded: Loaded
    requests: int
    programs: Sequence[int]
    seed: int

    def run(self, topology: Topology, data: DataSet, **changed: Any) -> Summary:
        """One setting on one data set; `changed` are fields of the workload, or `engines`."""
        output = Length(mean=data.output, cv=data.spread)
        workload = Workload(
            max(1, round(self.requests * data.asked)),
            dict.fromkeys(MODELS, output),
            Length(mean=data.question, cv=0.5),
            right=data.right,
        )
        engines = changed.pop("engines", "disaggregated")
        models = {name: replace(one, engines=engines) for name, one in self.loaded.simulation.models.items()}
        simulation = replace(self.loaded.simulation, models=models, workload=replace(workload, **changed))
        return summary_of(simulate(simulation, topology, self.loaded.costs, self.seed))

    def topology(self, name: str) -> Topology:
        """One of the shipped settings."""
        return self.loaded.topologies[name]


def exiting(topology: Topology, gate: EarlyExit | None) -> Topology:
    """The topology with another early exit."""
    return replace(topology, clusters=tuple(replace(cluster, early_exit=gate) for cluster in topology.clusters))


def rooted(topology: Topology, model: str) -> Topology:
    """The topology with another model as its root."""
    root = topology.root
    return replace(topology, agents={**topology.agents, root.id: replace(root, model=model)})


def largest_first(topology: Topology) -> Topology:
    """The topology with every agent's precursors the other way round."""
    agents = {
        name: replace(agent, precursors=tuple(reversed(agent.precursors))) for name, agent in topology.agents.items()
    }
    return replace(topology, agents=agents)


def settings(bench: Bench) -> list[Row]:
    """The four settings, the paper's gate as the paper has it (it exits from the first output on), then ours."""
    full = exiting(bench.topology("full"), EarlyExit(min_completed=1))
    tried = {name: bench.topology(name) for name in ("all-to-all", "tree", "tree-incremental")}
    ours = {"full, in flight": "full-in-flight", "full, what agrees passed on": "full-passing-on"}
    tried |= {"full": full} | {name: bench.topology(file) for name, file in ours.items()}
    rows = []
    for data_set, data in DATA_SETS.items():
        done = {name: bench.run(topology, data) for name, topology in tried.items()}
        for name, one in done.items():
            rows.append(
                {
                    "data set": data_set,
                    "setting": name,
                    "mean s": one.mean_s,
                    "less than all-to-all": f"{1 - one.mean_s / done['all-to-all'].mean_s:.0%}",
                    "paper": PAPER.get(name, ""),
                    "bound s": one.bound_s,
                    "over bound": f"{one.over_bound:.1%}",
                    "exposed s": one.exposed_s,
                    "late": f"{one.late:.1%}",
                }
            )
    return rows


def reading(bench: Bench) -> list[Row]:
    """Early exit under other readings of what the paper leaves open, on one data set."""
    data = DATA_SETS["GSM8K"]
    baseline = bench.run(bench.topology("all-to-all"), data)
    rows = []
    for least in (1, 2):
        for model in reversed(MODELS):
            topology = rooted(exiting(bench.topology("full"), EarlyExit(min_completed=least)), model)
            one = bench.run(topology, data)
            rows.append(
                {
                    "exits after": f"{least} output{'s' * (least > 1)}",
                    "root": model,
                    "mean s": one.mean_s,
                    "less than all-to-all": f"{1 - one.mean_s / baseline.mean_s:.0%}",
                    "over bound": f"{one.over_bound:.1%}",
                    **_completed(one),
                }
            )
    return rows


def activation(bench: Bench) -> list[Row]:
    """Who is asked on which data set."""
    topology = exiting(bench.topology("full"), EarlyExit(min_completed=1))
    rows = []
    for data_set, data in DATA_SETS.items():
        one = bench.run(topology, data)
        rows.append({"data set": data_set, "agents agree": f"{data.right:.0%}", **_completed(one)})
    return rows


def _completed(one: Summary) -> Row:
    return {f"{model} ran": f"{one.completed[model] / one.agents[model]:.0%}" for model in MODELS}


def second(bench: Bench) -> list[Row]:
    """The second layer's latency; its inputs have 1 to 2048 tokens, and it writes so many."""
    tree = bench.topology("tree")
    ways: Mapping[str, tuple[Topology, str]] = {
        "prefill and decode apart": (tree, "disaggregated"),
        "data parallel": (tree, "data_parallel"),
        "data parallel, chunked prefill": (tree, "data_parallel_chunked"),
        "apart, incremental prefill": (bench.topology("tree-incremental"), "disaggregated"),
    }
    rows = []
    for written in (16, 64, 256):
        seconds = {}
        for name, (topology, engines) in ways.items():
            fixed = _writing(topology, written)
            inputs = dict.fromkeys(MODELS, Length(low=1, high=2048))
            one = bench.run(fixed, DATA_SETS["GSM8K"], engines=engines, outputs=inputs)
            assert one.second_layer_s is not None
            seconds[name] = one.second_layer_s
        apart_s = seconds["prefill and decode apart"]
        rows += [
            {
                "tokens written": written,
                "engines": name,
                "second layer s": taken_s,
                "relative": taken_s / apart_s,
                "less": f"{1 - taken_s / apart_s:.1%}",
                "paper": "up to 27.4 %" if "incremental" in name else "about 10 % at best" if "data" in name else "",
            }
            for name, taken_s in seconds.items()
        ]
    return rows


def _writing(topology: Topology, tokens: int) -> Topology:
    """The topology with aggregators that write at most `tokens`; nearly all outputs are longer."""
    agents = {
        name: replace(agent, sampling={**agent.sampling, "max_new_tokens": tokens}) if agent.precursors else agent
        for name, agent in topology.agents.items()
    }
    return replace(topology, agents=agents)


def beyond(bench: Bench) -> list[Row]:
    """What is ours: each alone on top of the paper's incremental prefill, then together.

    The shipped tree names small models first, which end first; the slot order is tried on one that does not.
    """
    tree = bench.topology("tree-incremental")
    fixed = Prefill(incremental=True, increments=IncrementSettings(chunk_tokens=256, tail_share=0.0))
    slots = replace(fixed, slot_order="expected_finish")
    adaptive = replace(fixed, increments=IncrementSettings())
    both = replace(adaptive, slot_order="expected_finish")
    in_flight = bench.topology("full-in-flight").clusters[0].early_exit
    rows = []
    for data_set in ("GSM8K", "MATH-500"):
        tried = {
            "incremental prefill as in the paper, chunks of 256": replace(tree, prefill=fixed),
            "largest models in the first slots": replace(largest_first(tree), prefill=fixed),
            "the same, slots by expected finish": replace(largest_first(tree), prefill=slots),
            "adaptive chunks": replace(tree, prefill=adaptive),
            "early exit as in the paper": replace(exiting(tree, EarlyExit(min_completed=1)), prefill=fixed),
            "exit in flight": replace(exiting(tree, in_flight), prefill=fixed),
            "exit in flight, expected finish, adaptive chunks": replace(exiting(tree, in_flight), prefill=both),
        }
        done = {name: bench.run(topology, DATA_SETS[data_set]) for name, topology in tried.items()}
        first = next(iter(done.values()))
        rows += [
            {
                "data set": data_set,
                "online path": name,
                "mean s": one.mean_s,
                "relative": one.mean_s / first.mean_s,
                "over bound": f"{one.over_bound:.2%}",
                "exposed ms": 1000 * (one.exposed_s or 0.0),
                "late": f"{one.late:.1%}",
            }
            for name, one in done.items()
        ]
    return rows


def busy(bench: Bench) -> list[Row]:
    """Chunk sizes under load: how busy the prefill engine of the large model is for what."""
    tree = bench.topology("tree-incremental")
    tried = {"no incremental prefill": bench.topology("tree")}
    for tokens in (8, 64, 256):
        fixed = IncrementSettings(chunk_tokens=tokens)
        tried[f"chunks of {tokens}"] = replace(tree, prefill=Prefill(increments=fixed))
    tried["adaptive chunks"] = replace(tree, prefill=Prefill())
    rows = []
    for name, topology in tried.items():
        one = bench.run(topology, DATA_SETS["GSM8K"], arrivals="poisson", per_s=1.0)
        prefill_busy = max(use.prefill_busy for use in one.engines if use.model == "large")
        rows.append(
            {
                "updates": name,
                "mean s": one.mean_s,
                "over bound": f"{one.over_bound:.2%}",
                "exposed ms": 1000 * (one.exposed_s or 0.0),
                "late": f"{one.late:.1%}",
                "prefill engine busy": f"{prefill_busy:.0%}",
            }
        )
    return rows


def scale(bench: Bench) -> list[Row]:
    """Programs that all begin at once, and the simulator's own time."""
    topology = bench.topology("full")
    patient = replace(topology, agents={name: replace(agent, timeout_s=1e9) for name, agent in topology.agents.items()})
    rows = []
    for number in bench.programs:
        workload = replace(bench.loaded.simulation.workload, requests=number, arrivals="closed", clients=number)
        simulation = replace(bench.loaded.simulation, workload=workload, timeout_s=1e9)
        begun_s = time.perf_counter()
        done = simulate(simulation, patient, bench.loaded.costs, bench.seed)
        took_s = time.perf_counter() - begun_s
        latencies = [run.trace["duration_s"] for run in done.runs]
        rows.append(
            {
                "programs": number,
                "agents": number * len(topology.agents),
                "failed": sum(bool(run.error) for run in done.runs),
                "virtual s": done.elapsed_s,
                "p50 s": statistics.median(latencies),
                "took s": took_s,
                "ms per agent": 1000 * took_s / number / len(topology.agents),
            }
        )
        print(f"{number} programs: {took_s:.0f} s", file=sys.stderr)
    return rows


Rows = Callable[[Bench], list[Row]]
TABLES: Mapping[str, tuple[str, Rows]] = {
    "settings": ("Faster-MoA 5.3: four settings, five data sets", settings),
    "reading": ("Early exit on GSM8K, by what the paper leaves open", reading),
    "activation": ("Faster-MoA 5.2.1: agents that ran to their end", activation),
    "second": ("Faster-MoA 5.2.2: latency of the second layer", second),
    "beyond": ("Beyond the paper: the online path against its bound", beyond),
    "busy": ("GSM8K, one question a second: sizes of updates, the large model's prefill engine", busy),
    "scale": ("What a simulated agent costs the simulator", scale),
}


if __name__ == "__main__":
    main()
