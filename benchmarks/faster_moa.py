"""Faster-MoA's experiment and what goes beyond it, on six simulated H200s
(configs/engines/h200.yaml), in virtual time.

    python benchmarks/faster_moa.py [--table NAME ...] [--requests N] [--seeds N] [--markdown]
    [--json]

    settings     section 5.3: its four settings on its five data sets, one question at a time; then
    ours exit         section 5.2.1: the tree with early exit alone, what it saves and costs, and
    who runs to the end second       section 5.2.2: the second layer's latency, by what the two GPUs
    of a model do sensitivity  what the figures of 5.3 depend on; no row of it is the paper's
    load         tree + incremental prefill against tree from idle to 90 % of saturation, over
    several seeds beyond       slot order and chunk sizes against the critical-path bound
    stragglers   outputs that run to the cap, with and without an exit that cuts stragglers off
    drafts       settings of 5.3 with drafts in all agents that read others, by the tokens that a
    pass gives busy         what updates of one size or another cost the prefill engines, with a
    question every second scale        what a simulated agent costs, for 100, 1000 and 10000
    programs at a time, and down again, which shows
                 how far runs of one size differ

A saving is 1 minus the mean over questions of latency / all-to-all's latency on the same question,
as in the paper's figure 4; "up to" is the largest over data sets. How long outputs are and how
often they agree is assumed, in configs/workloads/faster-moa.yaml. All settings are asked the same
questions, and get the same outputs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from report import Row, report

from shell_router.early_exit.settings import EarlyExit
from shell_router.files.read import read_file
from shell_router.lab.simulation.run import Simulated, simulate
from shell_router.lab.simulation.settings import Drafted, Length, Loaded, Workload, load
from shell_router.lab.simulation.summary import Summary, summarize
from shell_router.topology import Cluster, Prefill, Topology

ROOT = Path(__file__).parents[1]
SIMULATION = ROOT / "configs/simulations/six-h200.yaml"
DATA_SETS = ROOT / "configs/workloads/faster-moa.yaml"
MODELS = ("small", "medium", "large")
BASELINE, FULL = "all-to-all", "full: the paper's exit"


@dataclass(frozen=True, slots=True)
class DataSet:
    """What is assumed of one data set.

    Similarities are those of two outputs with one answer, and with two. `readers` are the lengths
    of agents that read others; those that read more than three drafts write `dense` times as much.
    """

    question: Length
    output: Length
    right: float
    confidence: float
    same: float
    different: float
    asked: float = 1.0
    readers: Length | None = None
    dense: float = 1.0

    def outputs(self, topology: Topology) -> Mapping[str, Length]:
        """Lengths by model, and by agent where its own differs."""
        readers = self.readers or self.output
        longer = (
            readers if readers.mean is None else replace(readers, mean=readers.mean * self.dense)
        )
        reading = {
            name: agent.precursors for name, agent in topology.agents.items() if agent.precursors
        }
        own = {name: longer if len(read) > 3 else readers for name, read in reading.items()}
        return {**dict.fromkeys(MODELS, self.output), **own}


@dataclass(frozen=True, slots=True)
class DataSets:
    """The file of assumptions."""

    data_sets: Mapping[str, DataSet]


@dataclass(frozen=True, slots=True)
class Bench:
    """The shipped simulation, and how much of it is run."""

    loaded: Loaded
    data_sets: Mapping[str, DataSet]
    requests: int
    programs: Sequence[int]
    seeds: int
    outputs: Sequence[int]

    def run(self, topology: Topology, data: DataSet, *, seed: int = 0, **changed: Any) -> Simulated:
        """One setting on one data set; `changed` are fields of the workload, or `engines`. No
        request fails.
        """
        workload = Workload(
            max(1, round(self.requests * data.asked)),
            data.outputs(topology),
            data.question,
            right=data.right,
            confidence=data.confidence,
        )
        whole = self.loaded.simulation
        engines = changed.pop("engines", "disaggregated")
        models = {name: replace(one, engines=engines) for name, one in whole.models.items()}
        embedder = replace(whole.embedder, same=data.same, different=data.different)
        asked = replace(workload, **changed)
        simulation = replace(whole, models=models, embedder=embedder, workload=asked, timeout_s=1e9)
        return simulate(simulation, topology, self.loaded.costs, seed)

    def topology(self, name: str) -> Topology:
        """One of the shipped settings, without the limits of time that the paper does not have."""
        shipped = self.loaded.topologies[name]
        patient = {agent: replace(one, timeout_s=1e9) for agent, one in shipped.agents.items()}
        return replace(shipped, agents=patient)

    def papers(self) -> dict[str, Topology]:
        """The four settings of section 5.3."""
        names = {
            BASELINE: BASELINE,
            "tree": "tree",
            "+ incremental": "tree-incremental",
            FULL: "full-paper",
        }
        return {setting: self.topology(name) for setting, name in names.items()}


def latencies(done: Simulated) -> list[float]:
    """Seconds of every question, in the order of asking."""
    return [run.trace["duration_s"] for run in done.runs]


def ratios(done: Simulated, baseline: Simulated) -> list[float]:
    """Per question the latency relative to the baseline's."""
    return [
        ours / theirs for ours, theirs in zip(latencies(done), latencies(baseline), strict=True)
    ]


def saving(done: Simulated, baseline: Simulated) -> float:
    """The paper's measure: 1 - the mean of per-sample normalized latencies."""
    return 1 - statistics.mean(ratios(done, baseline))


def exiting(topology: Topology, **changed: Any) -> Topology:
    """The topology with another setting of its early exits."""
    gates = [
        cluster.early_exit and replace(cluster.early_exit, **changed)
        for cluster in topology.clusters
    ]
    pairs = zip(topology.clusters, gates, strict=True)
    return replace(
        topology, clusters=tuple(replace(cluster, early_exit=gate) for cluster, gate in pairs)
    )


def with_models(topology: Topology, models: Mapping[str, str]) -> Topology:
    """The topology with other models for some of its agents."""
    changed = {name: replace(topology.agents[name], model=model) for name, model in models.items()}
    return replace(topology, agents={**topology.agents, **changed})


def rooted(topology: Topology, model: str) -> Topology:
    """The topology with another model as its root."""
    return with_models(topology, {topology.root.id: model})


def small_readers(topology: Topology) -> Topology:
    """The topology with small aggregators and root; all-to-all's second layer keeps its three
    sizes.
    """
    readers = [name for name, agent in topology.agents.items() if 0 < len(agent.precursors) <= 3]
    return with_models(topology, dict.fromkeys([*readers, topology.root.id], "small"))


def largest_first(topology: Topology) -> Topology:
    """The topology with every agent's precursors the other way round."""
    agents = {
        name: replace(agent, precursors=tuple(reversed(agent.precursors)))
        for name, agent in topology.agents.items()
    }
    return replace(topology, agents=agents)


def settings(bench: Bench) -> list[Row]:
    """Savings per data set, the largest of them, and the paper's; then what the online path leaves
    exposed.
    """
    ours = {"full: in flight": "full-in-flight", "full: as shipped": "full"}
    tried = bench.papers() | {name: bench.topology(file) for name, file in ours.items()}
    saved: dict[str, dict[str, float]] = {name: {} for name in tried if name != BASELINE}
    rows = []
    for data_set, data in bench.data_sets.items():
        done = {name: bench.run(topology, data) for name, topology in tried.items()}
        for name, found in saved.items():
            found[data_set] = saving(done[name], done[BASELINE])
        found = {name: summarize(done[name]) for name in (BASELINE, "tree", "+ incremental")}
        rows.append(
            {"data set": data_set, "all-to-all s": found[BASELINE].mean_s}
            | {name: f"{saved[name][data_set]:.0%}" for name in saved}
            | {
                f"over bound: {name}": f"{found[name].over_bound:.1%}"
                for name in ("tree", "+ incremental")
            }
            | {f"late: {name}": f"{found[name].late:.1%}" for name in ("tree", "+ incremental")}
        )
    blank = dict.fromkeys(rows[0], "")
    rows.append(
        blank
        | {"data set": "simulated"}
        | {name: _reached(found.values()) for name, found in saved.items()}
    )
    paper = {"tree": "up to 62 %", "+ incremental": "up to 76 %", FULL: "73 to 90 %"}
    return [*rows, blank | {"data set": "the paper"} | paper]


def _reached(found: Collection[float]) -> str:
    return f"{min(found):.0%} to {max(found):.0%}"


def exits(bench: Bench) -> list[Row]:
    """Early exit alone on the tree, relative to the tree; then who was asked, of all agents of a
    model.
    """
    tree = bench.topology("tree")
    topology = replace(bench.topology("full-paper"), prefill=tree.prefill)
    saved, costs, rows = [], [], []
    for data_set, data in bench.data_sets.items():
        plain, done = bench.run(tree, data), bench.run(topology, data)
        saved.append(saving(done, plain))
        costs.append(statistics.mean(judging_share(topology, run.trace) for run in done.runs))
        rows.append(
            {
                "data set": data_set,
                "confidence": f"{data.confidence:.2f}",
                "tree s": statistics.mean(latencies(plain)),
            }
            | {"less than the tree": f"{saved[-1]:.0%}", "judging costs": f"{costs[-1]:.1%}"}
            | _completed(summarize(done))
        )
    blank = dict.fromkeys(rows[0], "")
    reached = {"less than the tree": _reached(saved), "judging costs": _reached(costs)}
    paper = {
        "less than the tree": "10 to 50 %",
        "judging costs": "about 5 %",
        "large ran": "least, more if harder",
    }
    return [
        *rows,
        blank | {"data set": "simulated"} | reached,
        blank | {"data set": "the paper"} | paper,
    ]


def judging_share(topology: Topology, trace: Mapping[str, Any]) -> float:
    """Share of the latency that judging took where it led to an exit; of clusters side by side the
    longest counts.
    """
    longest_s = [0.0] * len(topology.layers)
    for judged in trace["exits"]:
        if judged["exited"]:
            layer = next(
                at for at, names in enumerate(topology.layers) if judged["completed"][0] in names
            )
            longest_s[layer] = max(longest_s[layer], judged["end_s"] - judged["start_s"])
    return sum(longest_s) / float(trace["duration_s"])


def _completed(one: Summary) -> Row:
    return {f"{model} ran": f"{one.completed[model] / one.agents[model]:.0%}" for model in MODELS}


def second(bench: Bench) -> list[Row]:
    """The second layer's latency; its inputs have 1 to 2048 tokens, and it writes a fixed
    number."""
    tree = bench.topology("tree")
    ways: Mapping[str, tuple[Topology, str]] = {
        "apart": (tree, "disaggregated"),
        "data parallel": (tree, "data_parallel"),
        "data parallel, chunked": (tree, "data_parallel_chunked"),
        "apart, incremental": (bench.topology("tree-incremental"), "disaggregated"),
    }
    random_input = replace(
        bench.data_sets["GSM8K"], output=Length(low=1, high=2048), readers=Length(tokens=2048)
    )
    rows = []
    for written in (16, 64, 256, 1024):
        seconds = {}
        for name, (topology, engines) in ways.items():
            found = summarize(
                bench.run(_writing(topology, written), random_input, engines=engines)
            ).second_layer_s
            assert found is not None
            seconds[name] = found
        less = {
            name: f"{1 - seconds[name] / seconds['apart']:.1%}" for name in ways if name != "apart"
        }
        rows.append({"tokens written": str(written), "apart s": seconds["apart"]} | less)
    baselines = dict.fromkeys(("data parallel", "data parallel, chunked"), "about 10 %")
    return [
        *rows,
        {"tokens written": "the paper", "apart s": ""}
        | baselines
        | {"apart, incremental": "up to 27.4 %"},
    ]


def _writing(topology: Topology, tokens: int) -> Topology:
    """The topology with aggregators that write `tokens`."""
    agents = {
        name: replace(agent, sampling={**agent.sampling, "max_new_tokens": tokens})
        if agent.precursors
        else agent
        for name, agent in topology.agents.items()
    }
    return replace(topology, agents=agents)


def sensitivity(bench: Bench) -> list[Row]:
    """GSM8K's row of 5.3 under other assumptions, of which the paper says nothing."""
    data, papers = bench.data_sets["GSM8K"], bench.papers()
    tried: dict[str, tuple[DataSet, Mapping[str, Topology]]] = {"as assumed": (data, papers)}
    for factor in (3, 5):
        tried[f"readers of nine drafts write {factor} times as much"] = (
            replace(data, dense=float(factor)),
            papers,
        )
    for share in (0.005, 0.01):
        endless = replace(data, output=replace(data.output, runaways=share))
        tried[f"{share:.1%} of outputs run to the cap"] = endless, papers
    tried["small aggregators and root"] = (
        data,
        {name: small_readers(one) for name, one in papers.items()},
    )
    for model in ("medium", "small"):
        tried[f"{model} root"] = data, {name: rooted(one, model) for name, one in papers.items()}
    tried["the gate waits for two outputs"] = (
        data,
        papers | {FULL: exiting(papers[FULL], min_completed=2)},
    )
    for confidence in (0.8, 0.98):
        tried[f"confidence {confidence}"] = replace(data, confidence=confidence), papers
    for same, different in ((0.6, 0.3), (0.95, 0.8)):
        alike = replace(data, same=same, different=different)
        tried[f"similarity {same} and {different}"] = alike, papers
    rows = []
    for name, (assumed, topologies) in tried.items():
        done = {setting: bench.run(topology, assumed) for setting, topology in topologies.items()}
        ours = [setting for setting in done if setting != BASELINE]
        mean_s = {setting: statistics.mean(latencies(one)) for setting, one in done.items()}
        rows.append(
            {"assumption": name, "all-to-all s": mean_s[BASELINE]}
            | {setting: f"{saving(done[setting], done[BASELINE]):.0%}" for setting in ours}
            | {
                f"of means: {setting}": f"{1 - mean_s[setting] / mean_s[BASELINE]:.0%}"
                for setting in ours
            }
            | {"large ran": _completed(summarize(done[FULL]))["large ran"]}
        )
    return rows


LOADS = (0.05, 0.25, 0.5, 0.75, 0.9)


def loads(bench: Bench) -> list[Row]:
    """The tree's saturation is found first; then both settings are asked the same questions at the
    same moments.

    The first half of the questions fills the engines and is not counted.
    """
    rows = []
    tree, incremental = bench.topology("tree"), bench.topology("tree-incremental")
    for tokens in bench.outputs:
        length, asked = Length(mean=tokens, cv=0.5), min(1.0, 1200 / tokens)
        data = replace(
            bench.data_sets["GSM8K"], output=length, asked=asked, right=0.8, confidence=0.9
        )
        per_s = saturation(bench, tree, data)
        tried = [(load, seed) for load in LOADS for seed in range(bench.seeds)]
        with ProcessPoolExecutor() as pool:
            found = list(
                pool.map(
                    partial(_at_load, bench, (tree, incremental), data, per_s),
                    *zip(*tried, strict=True),
                )
            )
        for at, load_share in enumerate(LOADS):
            seeds = found[at * bench.seeds : (at + 1) * bench.seeds]
            of_tree = sorted(one[0] for one in seeds)
            means = [statistics.mean(one[part] for one in seeds) for part in range(1, 6)]
            rows.append(
                {
                    "output": tokens,
                    "a root reads": 3 * tokens,
                    "load": f"{load_share:.0%}",
                    "programs/s": load_share * per_s,
                    "tree s": means[0],
                    "of tree": f"{statistics.median(of_tree):.3f}",
                    "smallest, largest": f"{of_tree[0]:.3f}, {of_tree[-1]:.3f}",
                    "exposed ms": f"{1000 * means[1]:.0f} to {1000 * means[2]:.0f}",
                    "prefill busy": f"{means[3]:.0%} to {means[4]:.0%}",
                }
            )
            print(*rows[-1].values(), sep=" | ", file=sys.stderr)
    return rows


def saturation(bench: Bench, topology: Topology, data: DataSet) -> float:
    """Programs per second of a closed loop, whose clients are doubled until that gains less than 5
    %.
    """
    best, clients = 0.0, 8
    while True:
        number = 3 * clients
        done = bench.run(topology, data, requests=number, arrivals="closed", clients=clients)
        ends_s = sorted(run.trace["started_at"] + run.trace["duration_s"] for run in done.runs)
        per_s = number / 2 / (ends_s[number * 3 // 4] - ends_s[number // 4])
        if per_s < 1.05 * best:
            return max(best, per_s)
        best, clients = per_s, 2 * clients


def _at_load(
    bench: Bench,
    both: tuple[Topology, Topology],
    data: DataSet,
    saturated_per_s: float,
    share: float,
    seed: int,
) -> tuple[float, ...]:
    """A seed's median ratio; the tree's seconds; of both the exposed prefill and how busy large
    prefill engines are.
    """
    done = [
        bench.run(one, data, seed=seed, arrivals="poisson", per_s=share * saturated_per_s)
        for one in both
    ]
    tree, incremental = (summarize(one) for one in done)
    counted = slice(len(done[0].runs) // 2, None)
    busy = [
        max(use.prefill_busy for use in one.engines if use.model == "large")
        for one in (tree, incremental)
    ]
    ratio = statistics.median(ratios(done[1], done[0])[counted])
    tree_s = statistics.mean(latencies(done[0])[counted])
    return (ratio, tree_s, tree.exposed_s or 0.0, incremental.exposed_s or 0.0, *busy)


def beyond(bench: Bench) -> list[Row]:
    """What is ours: each alone on top of the paper's incremental prefill, then together.

    The shipped tree names small models first, which end first; the slot order is tried on one that
    does not.
    """
    tree = bench.topology("tree-incremental")
    fixed = Prefill(incremental=True, chunk_tokens=256)
    slots = replace(fixed, slot_order="expected_finish")
    adaptive = Prefill()
    tried = {
        "chunks of 256": replace(tree, prefill=fixed),
        "largest models in the first slots": replace(largest_first(tree), prefill=fixed),
        "the same, slots by expected finish": replace(largest_first(tree), prefill=slots),
        "adaptive chunks": replace(tree, prefill=adaptive),
    }
    rows = []
    for data_set in ("GSM8K", "MATH-500"):
        for name, topology in tried.items():
            done = summarize(bench.run(topology, bench.data_sets[data_set]))
            rows.append(
                {"data set": data_set, "online path": name, "mean s": done.mean_s} | _exposed(done)
            )
    return rows


def _exposed(one: Summary) -> Row:
    exposed_ms = 1000 * (one.exposed_s or 0.0)
    return {
        "over bound": f"{one.over_bound:.2%}",
        "exposed ms": exposed_ms,
        "late": f"{one.late:.1%}",
    }


def busy(bench: Bench) -> list[Row]:
    """Chunk sizes under load: how busy the prefill engine of the large model is for what."""
    tree = bench.topology("tree-incremental")
    tried = {"none": bench.topology("tree")}
    for tokens in (8, 64, 256):
        tried[f"chunks of {tokens}"] = replace(tree, prefill=Prefill(chunk_tokens=tokens))
    tried["adaptive chunks"] = replace(tree, prefill=Prefill())
    rows = []
    for name, topology in tried.items():
        one = summarize(
            bench.run(topology, bench.data_sets["GSM8K"], arrivals="poisson", per_s=1.0)
        )
        prefill_busy = max(use.prefill_busy for use in one.engines if use.model == "large")
        rows.append(
            {
                "updates": name,
                "mean s": one.mean_s,
                **_exposed(one),
                "prefill engine busy": f"{prefill_busy:.0%}",
            }
        )
    return rows


def scale(bench: Bench) -> list[Row]:
    """Programs that all begin at once, and the simulator's own time."""
    topology, rows = bench.topology("full"), []
    for number in bench.programs:
        workload = replace(
            bench.loaded.simulation.workload, requests=number, arrivals="closed", clients=number
        )
        simulation = replace(bench.loaded.simulation, workload=workload, timeout_s=1e9)
        begun_s = time.perf_counter()
        done = simulate(simulation, topology, bench.loaded.costs)
        took_s = time.perf_counter() - begun_s
        rows.append(
            {
                "programs": number,
                "agents": number * len(topology.agents),
                "failed": sum(bool(run.error) for run in done.runs),
                "virtual s": done.elapsed_s,
                "p50 s": statistics.median(latencies(done)),
                "took s": took_s,
                "ms per agent": 1000 * took_s / number / len(topology.agents),
            }
        )
        print(f"{number} programs: {took_s:.0f} s", file=sys.stderr)
    return rows


PER_PASS = {
    "1.5": (1.5, 1.5),
    "2": (2.0, 2.0),
    "3": (3.0, 3.0),
    "4.4, root 7.8": (4.4, 7.8),  # as docs/benchmarks/drafts.md has them of the tiny models
}


def drafts(bench: Bench) -> list[Row]:
    """Savings as in 5.3, with and without drafts, and the tree's bound in passes beside that of a
    pass per token.

    The baseline of all is all-to-all without drafts.
    """
    names = {"all-to-all": BASELINE, "tree": "tree", "full": "full"}
    plain = {name: bench.topology(file) for name, file in names.items()}
    rows = []
    for data_set, data in bench.data_sets.items():
        before = {name: bench.run(topology, data) for name, topology in plain.items()}
        for words, (aggregator, root) in PER_PASS.items():
            gained = {"aggregator": Drafted(aggregator, cv=0.3), "root": Drafted(root, cv=0.3)}
            done = {
                name: bench.run(drafting(topology), data, drafts=gained)
                for name, topology in plain.items()
            }
            base, tree = before["all-to-all"], summarize(done["tree"])
            rows.append(
                {
                    "data set": data_set,
                    "tokens a pass": words,
                    "all-to-all s": summarize(base).mean_s,
                }
                | {"all-to-all + drafts": f"{saving(done['all-to-all'], base):.0%}"}
                | {
                    f"{name}, + drafts": (
                        f"{saving(before[name], base):.0%}, {saving(done[name], base):.0%}"
                    )
                    for name in ("tree", "full")
                }
                | {
                    "tree's bound s: a pass per token": summarize(before["tree"]).bound_s,
                    "in passes": tree.bound_s,
                }
                | {"tree + drafts s": tree.mean_s}
            )
    return rows


def stragglers(bench: Bench) -> list[Row]:
    """GSM8K with outputs that run to the cap, with and without a straggler cut."""
    data = bench.data_sets["GSM8K"]
    data = replace(data, output=replace(data.output, runaways=0.005))
    dense = bench.topology(BASELINE)
    cut = EarlyExit("in_flight", threshold=1.0, min_completed=5, straggler_factor=3)
    layers = [Cluster(str(names), names, cut) for names in dense.layers[:-1]]
    tree = bench.topology("tree-incremental")
    in_flight = bench.topology("full-in-flight")
    never = exiting(in_flight, threshold=1.0)
    graphs = {
        BASELINE: dense,
        f"{BASELINE}, cut": replace(dense, clusters=tuple(layers)),
        "tree, incremental": tree,
        "tree, incremental, cut": exiting(never, straggler_factor=3.0),
        "full-in-flight": in_flight,
        "full-in-flight, cut": exiting(in_flight, straggler_factor=3.0),
    }
    rows: list[Row] = []
    for name, topology in graphs.items():
        seconds = sorted(latencies(bench.run(topology, data)))
        rows.append(
            {
                "topology": name,
                "mean s": statistics.mean(seconds),
                "median s": statistics.median(seconds),
                "p99 s": seconds[round(0.99 * len(seconds)) - 1],
            }
        )
        print(*rows[-1].values(), sep=" | ", file=sys.stderr)
    return rows


def drafting(topology: Topology) -> Topology:
    """The topology with drafts in all agents that read others."""
    agents = {
        name: replace(agent, drafts=bool(agent.precursors))
        for name, agent in topology.agents.items()
    }
    return replace(topology, agents=agents)


Rows = Callable[[Bench], list[Row]]
TABLES: Mapping[str, tuple[str, Rows]] = {
    "settings": ("Faster-MoA 5.3: less latency than all-to-all", settings),
    "exit": ("Faster-MoA 5.2.1: the tree with early exit alone", exits),
    "second": (
        "Faster-MoA 5.2.2: less latency of the second layer than with prefill and decode apart",
        second,
    ),
    "sensitivity": (
        "Sensitivity, no reproduction: GSM8K's savings under other assumptions",
        sensitivity,
    ),
    "load": ("Tree + incremental prefill, relative to the tree, by load", loads),
    "beyond": ("Beyond the paper: the online path against its bound", beyond),
    "drafts": ("Beyond the paper: drafts, less latency than all-to-all without them", drafts),
    "stragglers": ("Beyond the paper: GSM8K, outputs that run to the cap", stragglers),
    "busy": (
        "GSM8K, one question a second: sizes of updates, the large model's prefill engine",
        busy,
    ),
    "scale": ("What a simulated agent costs the simulator", scale),
}


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=TABLES, nargs="+", default=list(TABLES), metavar="NAME")
    parser.add_argument("--requests", type=int, default=100, help="questions per row (default 100)")
    parser.add_argument("--seeds", type=int, default=3, help="for the table `load` (default 3)")
    parser.add_argument(
        "--outputs",
        type=int,
        nargs="+",
        default=[256, 1024, 4096],
        help="mean tokens, for the table `load`",
    )
    parser.add_argument(
        "--programs",
        type=int,
        nargs="+",
        default=[100, 1000, 10_000, 1000, 100],
        help="for the table `scale`",
    )
    parser.add_argument("--markdown", action="store_true", help="print tables for docs/benchmarks")
    parser.add_argument("--json", action="store_true", help="end each table with one JSON object")
    options = parser.parse_args()
    assumed, _ = read_file(DATA_SETS, DataSets, see="Its head explains it.")
    asked = (options.requests, options.programs, options.seeds, options.outputs)
    bench = Bench(load(SIMULATION), assumed.data_sets, *asked)
    for name in options.table:
        title, rows = TABLES[name]
        engine = "six H200s by roofline, three sizes of Qwen3-VL"
        forms = {"as_json": options.json, "markdown": options.markdown}
        report(title, rows(bench), engine=engine, simulated=True, **forms)


if __name__ == "__main__":
    main()
