"""Gimbal's evaluation (section V) in virtual time: the router's dispatcher in front of two
simulated A100s.

    python benchmarks/gimbal.py [--table NAME ...] [--requests N] [--seeds N] [--burstgpt CSV]
    [--json]

    rates        the paper's 1.0, 1.2 and 1.4 requests a second, over its five distributions of
                 lengths
    scaled       the same at higher rates: the highest is where round robin's 99th percentile of
                 TTFT is 4.9 s, as the paper's is at 1.4 a second, the others 1.0 / 1.4 and
                 1.2 / 1.4 of it
    lengths      the highest of these by distribution, with the paper's figures at 1.4 a second
    room         the highest rate, by what engines do where KV runs out: claim all that will be
                 written, or let requests in by their prompts and preempt some, with prefill and
                 decode in parallel; then vLLM's scheduler step by step (all other tables but the
                 next); and the same in step, as expert parallelism has it
    experts      the experts on both GPUs, half of them on each (experts.py): what their placement
                 changes, by roofline and where all of experts' time grows with the fullest GPU's
                 load; `over even` is that GPU's load over the mean, `traffic` the share of
                 transitions to the other GPU, `experts' share` is of a decode step of both engines
                 with 50 sequences each of 1000 tokens
    synchronized the same by roofline, where each layer takes a time on top of its slowest GPU's:
                 sensitivity; with the last, round robin's 99th percentile of TTFT is the paper's at
                 1.4 a second
    prefixes     users who talk: prompts found in prefix caches
    siblings     bursts of eight requests that share 16,000 tokens, and random traffic, on four
                 pairs of GPUs, and on four GPUs that prefill and decode; `copies` is how often a
                 burst's shared tokens are computed
    decisions    what a decision costs, by this machine's clock, which is not simulated
    fairness     ten users, one of whom asks five times as often: tokens each was served, by Jain's
                 index

Latencies are seconds, TPOT milliseconds; changes are against round robin in front of engines that
serve in order of arrival. How long prompts and outputs are, and what engines cost, is said in
benchmarks/gimbal.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
from report import Row, report

from benchmarks.gimbal.decisions import decision_rows
from benchmarks.gimbal.experts import ExpertParallel, Slowed, placements
from benchmarks.gimbal.requests import (
    PROMPTS,
    SIBLINGS,
    Request,
    conversations,
    fan_outs,
    from_burstgpt,
    requests,
)
from benchmarks.gimbal.serving import (
    ENGINES,
    VLLM_RESERVES,
    Kind,
    Served,
    Setting,
    costs,
    scheduling,
    served,
    settings,
)
from shell_router.routing.queue import ORDERS
from shell_router.standins.simulated.costs import UNLIMITED, PairCosts

PAPER_RATES = (1.0, 1.2, 1.4)
PAPER_TTFT = {
    "Random": -17.6,
    "Central": -18.7,
    "Descending": -16.4,
    "Two-end": -17.8,
    "Average": -18.3,
}
PAPER_TPOT = {
    "Random": -13.5,
    "Central": -17.6,
    "Descending": -7.9,
    "Two-end": -12.6,
    "Average": -15.1,
}
SATURATED_S = 4.9
"""The paper's 99th percentile of TTFT at its highest rate (section V-A.2)."""
WHOLE = "two A100s by roofline, each with all of Qwen3-30B-A3B"
FOUR = "four A100s by roofline, each with all of Qwen3-30B-A3B"
HALVES = "two A100s by roofline, each with half of the experts of Qwen3-30B-A3B"
ENGINES_OF = {"experts": HALVES, "synchronized": HALVES, "siblings": FOUR}
SLOWEST, HALVINGS = 1.0, 8
SYNCHRONIZATIONS_S = (0.0, 20e-6, 50e-6)
"""Of a layer: a launch and the first byte of its two exchanges take tens of microseconds."""
LONGEST_SYNCHRONIZATION_S = 0.1
FASTEST_SHARED = 40.0
"""Requests a second: GPUs that hold half of the experts have KV for four times as many."""
LATENCIES = ("TTFT", "p99 TTFT", "TPOT", "p99 TPOT")
WARM_S, USERS, HEAVY = 120.0, 10, 5


@dataclass(frozen=True)
class Bench:
    """How much is run, and on which lengths."""

    count: int
    seeds: int
    decisions: int
    pool: Sequence[tuple[int, int]]
    reserved_tokens: int | None = VLLM_RESERVES
    kind: Kind = "stepped"
    experts: ExpertParallel | None = None
    fastest: float = 16.0
    found: dict[str, float] = field(default_factory=dict)

    @property
    def costs(self) -> PairCosts:
        """Of an engine that keeps no prefixes."""
        if self.experts is not None:
            return self.experts.costs
        return costs(cached=False, reserved_tokens=self.reserved_tokens)

    @property
    def room(self) -> int:
        """Tokens of an engine's KV."""
        return self.costs.decode.cache_tokens

    def asked(self, distribution: str, per_s: float, seed: int) -> list[Request]:
        """The requests of a run."""
        return requests(distribution, self.count, per_s, seed, self.pool)

    def figures(self, setting: Setting, distribution: str, per_s: float) -> np.ndarray:
        """See `_figures`; means over the seeds."""
        runs = [
            served(
                self.asked(distribution, per_s, seed),
                self.costs,
                setting.scheduling,
                kind=self.kind,
                known=setting.known,
                experts=self.experts.step_s if self.experts else None,
            )
            for seed in range(self.seeds)
        ]
        return np.mean([_figures(run) for run in runs], axis=0)

    def saturating(self, distribution: str) -> float:
        """Requests a second at which round robin's 99th percentile is the paper's."""
        if distribution not in self.found:
            low, high = SLOWEST, self.fastest
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                slow = (
                    self.figures(Setting(scheduling("round_robin")), distribution, middle)[1]
                    > SATURATED_S
                )
                low, high = (low, middle) if slow else (middle, high)
            self.found[distribution] = round(low, 2)
        return self.found[distribution]


def _figures(run: Served) -> list[float]:
    """Mean and 99th percentile of TTFT, of TPOT, the rate of answers, and how often KV was taken
    from a request.
    """
    return [
        float(np.mean(run.ttft_s)),
        float(np.percentile(run.ttft_s, 99)),
        float(1e3 * np.mean(run.tpot_s)),
        float(1e3 * np.percentile(run.tpot_s, 99)),
        len(run.ttft_s) / run.elapsed_s,
        run.preemptions / len(run.ttft_s),
    ]


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=TABLES, nargs="+", default=list(TABLES), metavar="NAME")
    parser.add_argument(
        "--requests", type=int, default=1000, help="of a run (default 1000, as in the paper)"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="runs of each row, whose means are shown (default 3)"
    )
    parser.add_argument("--decisions", type=int, default=5000, help="that are timed (default 5000)")
    parser.add_argument(
        "--burstgpt", type=Path, help="a file of BurstGPT: its lengths instead of drawn ones"
    )
    parser.add_argument("--json", action="store_true", help="end each table with one JSON object")
    options = parser.parse_args()
    pool = from_burstgpt(options.burstgpt) if options.burstgpt else ()
    bench = Bench(options.requests, options.seeds, options.decisions, pool)
    for name in options.table:
        title, rows = TABLES[name]
        simulated = name != "decisions"
        engine = ENGINES_OF.get(name, WHOLE) if simulated else "no engines"
        report(title, rows(bench), engine=engine, simulated=simulated, as_json=options.json)


def _over_distributions(bench: Bench, rate_of: Callable[[str, float], float]) -> list[Row]:
    """Rows by rate and setting: means over the distributions, and of the changes on each of
    them."""
    rows = []
    for rate in PAPER_RATES:
        rates = {name: rate_of(name, rate) for name in PROMPTS}
        done = {
            setting: {name: bench.figures(how, name, rates[name]) for name in PROMPTS}
            for setting, how in settings(bench.room).items()
        }
        for setting, by_name in done.items():
            change = np.mean(
                [_change(by_name[name], done["round robin"][name]) for name in PROMPTS], axis=0
            )
            mean = np.mean(list(by_name.values()), axis=0)
            per_s = (
                f"{min(rates.values()):.2g} to {max(rates.values()):.2g}"
                if len(set(rates.values())) > 1
                else rate
            )
            rows.append(
                {
                    "requests/s": str(per_s),
                    "setting": setting,
                    **_columns(mean, change),
                    "answers/s": mean[4],
                }
            )
    return rows


def _change(figures: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Of the latencies, which stand first in what `_figures` tells."""
    return figures[..., : len(LATENCIES)] / first[..., : len(LATENCIES)] - 1


def _columns(figures: np.ndarray, change: np.ndarray) -> Row:
    found: Row = {}
    for at, name in enumerate(LATENCIES):
        found[name] = float(figures[at])
        found[f"{name} change"] = f"{change[at]:+.1%}"
    return found


def rates(bench: Bench) -> list[Row]:
    """At the paper's own rates, which these engines hardly notice."""
    return _over_distributions(bench, lambda _, rate: rate)


def scaled(bench: Bench) -> list[Row]:
    """At rates that load these engines as the paper's were."""
    return _over_distributions(
        bench, lambda name, rate: bench.saturating(name) * rate / PAPER_RATES[-1]
    )


def lengths(bench: Bench) -> list[Row]:
    """By distribution."""
    rows = []
    for name in PROMPTS:
        per_s = bench.saturating(name)
        done = {
            setting: bench.figures(how, name, per_s)
            for setting, how in settings(bench.room).items()
        }
        for setting, found in done.items():
            known = setting == "DPLB+SJFS"
            rows.append(
                {
                    "lengths": name,
                    "requests/s": per_s,
                    "setting": setting,
                    **_columns(found, _change(found, done["round robin"])),
                    "paper TTFT": f"{PAPER_TTFT[name]:+.1f}%" if known else "",
                    "paper TPOT": f"{PAPER_TPOT[name]:+.1f}%" if known else "",
                }
            )
    return rows


def room(bench: Bench) -> list[Row]:
    """By what engines do where KV runs out: means over the distributions, and of the changes on
    each of them.
    """
    kinds = {
        "claim KV": replace(bench, kind="shared", reserved_tokens=None, found={}),
        "take it back": replace(bench, kind="shared", found={}),
        "step by step": bench,
        "all in step": replace(bench, kind="in step", found={}),
    }
    rows = []
    for kind, engines in kinds.items():
        rates = {name: engines.saturating(name) for name in PROMPTS}
        done = {
            setting: np.array([engines.figures(how, name, rates[name]) for name in PROMPTS])
            for setting, how in settings(engines.room).items()
        }
        for setting, found in done.items():
            change = _change(found, done["round robin"])
            rows.append(
                {
                    "engines": kind,
                    "requests/s": f"{min(rates.values()):.2g} to {max(rates.values()):.2g}",
                    "setting": setting,
                    **_columns(found.mean(axis=0), change.mean(axis=0)),
                    "TTFT changes": _range(change[:, 0]),
                    "TPOT changes": _range(change[:, 2]),
                    "preemptions": float(found[:, 5].mean()),
                }
            )
    return rows


PLACED_ALONE = tuple(("round robin", name) for name in ("contiguous", "gimbal", "swap", "stacked"))
PLACED = (*PLACED_ALONE, ("DPLB+SJFS", "contiguous"), ("DPLB+SJFS", "gimbal"), ("ours", "swap"))
"""At the paper's own rates no request waits, so that placement alone is left to compare."""


def experts(bench: Bench) -> list[Row]:
    """At the paper's highest rate and at those that saturate contiguous experts by roofline, by
    what a load costs.
    """
    record, placed = placements()
    engines = replace(bench, kind="in step", fastest=FASTEST_SHARED, found={})
    first = replace(engines, experts=ExpertParallel(record, placed["contiguous"]))
    saturating = {name: first.saturating(name) for name in PROMPTS}
    rows = []
    for rates, compared in (
        (dict.fromkeys(PROMPTS, PAPER_RATES[-1]), PLACED_ALONE),
        (saturating, PLACED),
    ):
        for slowed in get_args(Slowed):
            shared = {
                name: ExpertParallel(record, placement, slowed)
                for name, placement in placed.items()
            }
            rows += _placed(engines, shared, rates, compared)
    return rows


SYNCHRONIZED = (*PLACED_ALONE[:-1], ("DPLB+SJFS", "gimbal"), ("ours", "swap"))


def synchronized(bench: Bench) -> list[Row]:
    """By the time that each layer takes on top of its slowest GPU, and rates as in `experts`."""
    record, placed = placements()
    engines = replace(bench, kind="in step", fastest=FASTEST_SHARED, found={})
    paper = dict.fromkeys(PROMPTS, PAPER_RATES[-1])
    first = ExpertParallel(record, placed["contiguous"])
    rows: list[Row] = []
    for each_s in (*SYNCHRONIZATIONS_S, _as_slow(engines, first)):
        shared = {
            name: ExpertParallel(record, placement, synchronization_s=each_s)
            for name, placement in placed.items()
        }
        rates = [paper]
        if each_s in SYNCHRONIZATIONS_S:
            slowed = replace(engines, experts=shared["contiguous"], found={})
            rates.append({name: slowed.saturating(name) for name in PROMPTS})
        for per_s in rates:
            rows += [
                {"us a layer": round(1e6 * each_s), **row}
                for row in _placed(engines, shared, per_s, SYNCHRONIZED)
            ]
    return rows


def _as_slow(engines: Bench, first: ExpertParallel) -> float:
    """Seconds a layer with which the paper's highest rate saturates these engines as the
    paper's."""
    low, high = 0.0, LONGEST_SYNCHRONIZATION_S
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        bench = replace(engines, experts=replace(first, synchronization_s=middle))
        setting = Setting(scheduling("round_robin"))
        waits = [bench.figures(setting, name, PAPER_RATES[-1])[1] for name in PROMPTS]
        low, high = (low, middle) if np.mean(waits) > SATURATED_S else (middle, high)
    return low


def _placed(
    engines: Bench,
    shared: Mapping[str, ExpertParallel],
    rates: Mapping[str, float],
    compared: Sequence[tuple[str, str]],
) -> list[Row]:
    """By setting and placement: means over the distributions, and of the changes on each."""
    rows: list[Row] = []
    first = np.zeros(0)
    for setting, name in compared:
        bench, one = replace(engines, experts=shared[name]), shared[name]
        how = settings(bench.room)[setting]
        found = np.array(
            [bench.figures(how, distribution, per_s) for distribution, per_s in rates.items()]
        )
        first = first if len(first) else found
        change = _change(found, first)
        rows.append(
            {
                "requests/s": f"{min(rates.values()):.2g} to {max(rates.values()):.2g}",
                "experts' time": one.slowed,
                "setting": setting,
                "experts": name,
                "over even": f"{one.measures.balance - 1:.1%}",
                "traffic": f"{one.measures.traffic:.1%}",
                "experts' share": f"{_experts_share(one):.0%}",
                **_columns(found.mean(axis=0), change.mean(axis=0)),
                "TPOT changes": _range(change[:, 2]),
            }
        )
    return rows


def _experts_share(shared: ExpertParallel, sequences: int = 50, length: int = 1000) -> float:
    """Of a decode step of both engines."""
    added_s = shared.step_s(ENGINES * sequences)
    return added_s / (added_s + shared.costs.decode.steps_s(1, sequences, sequences * length))


def _range(changes: np.ndarray) -> str:
    return f"{changes.min():+.1%} to {changes.max():+.1%}"


def prefixes(bench: Bench) -> list[Row]:
    """Prompt tokens that were found cached, by policy; none of these waits in the router."""
    rows = []
    for policy in ("round_robin", "least_running", "gimbal", "scored"):
        runs = [
            served(conversations(bench.count, 4.0, seed), costs(cached=True), scheduling(policy))
            for seed in range(bench.seeds)
        ]
        hits = float(np.mean([run.cached_tokens / run.prompt_tokens for run in runs]))
        first = rows[0]["hit rate"] if rows else hits
        ttft, p99, tpot, *_ = np.mean([_figures(run) for run in runs], axis=0)
        paper = "+3 to +4.4%" if policy == "gimbal" else ""
        change = f"{hits / first - 1:+.1%}"
        rows.append(
            {
                "policy": policy,
                "hit rate": hits,
                "hits change": change,
                "paper": paper,
                "TTFT": float(ttft),
                "p99 TTFT": float(p99),
                "TPOT": float(tpot),
            }
        )
    return rows


def siblings(bench: Bench) -> list[Row]:
    """By engines and traffic: bursts where KV is short or ample, and random requests."""
    short = costs(cached=True)
    ample = replace(short, decode=replace(short.decode, cache_tokens=UNLIMITED))
    seeds = range(bench.seeds)
    many = max(1, bench.count // 25)
    traffic: dict[str, tuple[PairCosts, list[list[Request]]]] = {
        "one burst, an A100's KV": (short, [fan_outs(1, 1.0, seed) for seed in seeds]),
        "one burst": (ample, [fan_outs(1, 1.0, seed) for seed in seeds]),
        "0.3 bursts a second": (ample, [fan_outs(many, 0.3, seed) for seed in seeds]),
    }
    for per_s in (3.0, 10.0, 14.0):
        asked = [bench.asked(name, per_s, seed) for name in PROMPTS for seed in seeds]
        traffic[f"random, {per_s:g} a second"] = (short, asked)
    kinds: tuple[Kind, ...] = ("pair", "shared")
    return [
        row
        for kind in kinds
        for name, how in traffic.items()
        for row in _sibling_rows(kind, name, *how)
    ]


def _sibling_rows(
    kind: Kind, name: str, engines: PairCosts, asked: Sequence[Sequence[Request]]
) -> Iterator[Row]:
    """Yield a row per policy; changes are against `least_running` on the same requests."""
    old = sum(request.old for one in asked for request in one)
    new = sum(request.prompt - request.old for one in asked for request in one)
    first = np.empty(0)
    for policy in ("least_running", "scored"):
        runs = [served(one, engines, scheduling(policy), kind=kind, engines=4) for one in asked]
        computed = sum(run.prompt_tokens - run.cached_tokens for run in runs)
        figures = np.array([[*_figures(run)[:2], np.mean(run.total_s)] for run in runs])
        copies = (computed - new) * SIBLINGS / max(1, old)
        row: Row = {"engines": kind, "traffic": name, "policy": policy, "copies": round(copies, 2)}
        if not len(first):
            first = figures
        for at, measure in enumerate(("TTFT", "p99 TTFT", "latency")):
            row[measure] = float(figures[:, at].mean())
            row[f"{measure} change"] = _with_interval(figures[:, at] / first[:, at] - 1)
        yield row


def _with_interval(changes: np.ndarray) -> str:
    """Return the mean with its 95 % interval, which is normal."""
    error = 1.96 * changes.std(ddof=1) / len(changes) ** 0.5 if len(changes) > 1 else 0.0
    return f"{changes.mean():+.1%} ± {error:.1%}"


def decisions(bench: Bench) -> list[Row]:
    """By policy, then by order."""
    return asyncio.run(decision_rows(bench.decisions))


def fairness(bench: Bench) -> list[Row]:
    """Two minutes in which engines have more to do than they can, by order."""
    asked = _unevenly(bench)
    rows = []
    for order in ORDERS:
        order_alone = scheduling("scored", order, room=bench.room, age_s=600.0)
        run = served(asked, bench.costs, order_alone, kind=bench.kind)
        tokens = _tokens_by(run, WARM_S)
        shares = np.array([tokens.get(f"user-{user}", 0) for user in range(USERS)])
        jain = float(shares.sum() ** 2 / (len(shares) * (shares**2).sum())) if shares.any() else 0.0
        ttft, p99, *_ = _figures(run)
        rows.append(
            {
                "order": order,
                "Jain's index": jain,
                "the frequent user's share": float(shares[0] / max(1, shares.sum())),
                "TTFT": ttft,
                "p99 TTFT": p99,
                "longest": max(run.ttft_s),
            }
        )
    return rows


def _unevenly(bench: Bench) -> list[Request]:
    """Twice what saturates them; the first of ten users asks five times as often as any other."""
    users = [0] * HEAVY + list(range(1, USERS))
    asked = bench.asked("Random", 2 * bench.saturating("Random"), 0)
    return [
        Request(one.at_s, f"user-{users[number % len(users)]}", one.prompt, one.output)
        for number, one in enumerate(asked)
    ]


def _tokens_by(run: Served, until_s: float) -> Mapping[str, int]:
    """What each user was served by then, or by half of the run, where that is shorter."""
    until_s = min(until_s, run.elapsed_s / 2)
    found: dict[str, int] = {}
    for at_s, user, tokens in run.ended:
        if at_s <= until_s:
            found[user] = found.get(user, 0) + tokens
    return found


TABLES: Mapping[str, tuple[str, Callable[[Bench], list[Row]]]] = {
    "rates": ("Gimbal's setup at its own rates", rates),
    "scaled": ("Gimbal's setup at rates that load these engines as much", scaled),
    "lengths": ("Five distributions of lengths at the highest rate", lengths),
    "room": ("What becomes of TPOT where engines run out of KV", room),
    "experts": ("What placement of experts changes on two GPUs", experts),
    "synchronized": ("Experts on two GPUs, and a time of each layer's own", synchronized),
    "prefixes": ("Users who talk: prompts found in prefix caches", prefixes),
    "siblings": ("Siblings that share a prefix, and random traffic", siblings),
    "decisions": ("What a decision costs", decisions),
    "fairness": ("Ten users, one of whom asks five times as often", fairness),
}

if __name__ == "__main__":
    sys.exit(main())
