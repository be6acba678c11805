"""Chimera's main result in virtual time: latency and score of workflows on models of several sizes, one A6000 each.

    python benchmarks/chimera.py [--table NAME ...] [--tasks N] [--per-s R ...] [--seed N] [--picture FILE] [--json]

    latency   end-to-end latency per token and score, by policy, beside vLLM's and the paper's figures
    oracle    the same with the true lengths, with the true outcomes, and with both
    decision  what one choice costs this machine, real time, with requests in flight

Engines cost what a roofline of the A6000 says (configs/engines/a6000.yaml). Workflows have one, two or four stages, as
users choose; lengths are those of MATH in section 4.1, scores those of Qwen2.5's report; how both hang together is
assumed (choosing/tasks.py). Predictors are blurred until they are as good as the paper's (its tables 2 and 3, shown).

    vLLM              fewest unfinished stages, first come, first served
    MLFQ              the same, the program that was served least first (nothing that runs is interrupted)
    LTR               the same, the shortest stage first, lengths predicted
    vLLM (STJF)       the same, the shortest rest of a program first, by the true lengths
    Chimera, slack S  Algorithm 1 and the shortest rest of a program first, all predicted
    worth, S s        our own: score less wait, where so many seconds make up for a right answer
    best score        what is scored highest, whatever the load

A program keeps its model in all of them; vLLM's own balancing places each stage anew.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from choosing.picture import Point, draw
from choosing.predicting import Blur, Foreseen
from choosing.tasks import MATH, Task, tasks
from choosing.world import Outcome, Policy, run
from report import Row, report

from shell_router.core.intervals import quantile, wilson
from shell_router.engines.simulated import PairCosts
from shell_router.prediction.ranking import kendall_distance
from shell_router.scheduling.model_choice import Candidate, ModelChoiceSettings, choose_model
from shell_router.simulation.settings import load_profiles

ROOT = Path(__file__).parents[1]
PROFILES = ROOT / "configs/engines/a6000.yaml"
FLEETS = {
    "Qwen1.5+7B": ("qwen2.5-1.5b", "qwen2.5-7b"),
    "Qwen1.5+14B": ("qwen2.5-1.5b", "qwen2.5-14b"),
    "Qwen1.5+3+14B": ("qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-14b"),
}
PAPER = {
    "Qwen1.5+7B": "2.5x, +2.2",
    "Qwen1.5+14B": "2.1x, +5.0",
    "Qwen1.5+3+14B": "2.1x, +1.6",
}
"""Chimera over vLLM on MATH, section 4.3: speed-up, and points of score."""
PREDICTED = Blur(scores=2.0, lengths=0.6, cost_s=0.02)
"""As good as the paper's predictors, and as slow as this router's on a busy CPU."""
COUNTED = Blur(scores=None, flat=True)
SLACKS = (0.0, 1.0, 2.0, 4.0)
WORTHS = (10.0, 40.0, 160.0)

POLICIES = {
    "vLLM": Policy(ModelChoiceSettings("least_loaded"), "fcfs", COUNTED),
    "MLFQ": Policy(ModelChoiceSettings("least_loaded"), "least_attained", COUNTED, by_program=True),
    "LTR": Policy(ModelChoiceSettings("least_loaded"), "shortest_total", replace(PREDICTED, scores=None, whole=False)),
    "vLLM (STJF)": Policy(ModelChoiceSettings("least_loaded"), "shortest_total", Blur(scores=None)),
    **{f"Chimera, slack {s:g}": Policy(ModelChoiceSettings("chimera", s), "shortest_total", PREDICTED) for s in SLACKS},
    **{
        f"worth, {s:g} s": Policy(ModelChoiceSettings("worth", answer_worth_s=s), "shortest_total", PREDICTED)
        for s in WORTHS
    },
    "best score": Policy(ModelChoiceSettings("best_score"), "shortest_total", PREDICTED),
}
ORACLES = {
    "Chimera, slack 1": POLICIES["Chimera, slack 1"],
    "oracle lengths": Policy(ModelChoiceSettings("chimera"), "shortest_total", replace(PREDICTED, lengths=0.0)),
    "oracle router": Policy(ModelChoiceSettings("chimera"), "shortest_total", replace(PREDICTED, oracle_scores=True)),
    "oracle both": Policy(
        ModelChoiceSettings("chimera"), "shortest_total", replace(PREDICTED, lengths=0.0, oracle_scores=True)
    ),
}


@dataclass(frozen=True, slots=True)
class Bench:
    """What is run, and how much of it."""

    tasks: int
    per_s: Sequence[float]
    seed: int
    picture: Path | None
    points: dict[str, dict[str, list[Point]]]


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=TABLES, nargs="+", default=list(TABLES), metavar="NAME")
    parser.add_argument("--tasks", type=int, default=500, help="workflows per row (default 500)")
    parser.add_argument("--per-s", type=float, nargs="+", default=[8.0, 16.0, 32.0], metavar="R", help="arrivals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="score against latency, as SVG")
    parser.add_argument("--json", action="store_true", help="end each table with one JSON object")
    options = parser.parse_args()
    bench = Bench(options.tasks, options.per_s, options.seed, options.picture, {})
    for name in options.table:
        title, rows, simulated = TABLES[name]
        engine = "an A6000 per model by roofline, Qwen2.5" if simulated else "no engine"
        report(title, rows(bench), engine=engine, simulated=simulated, as_json=options.json)
    if options.picture is not None and bench.points:
        options.picture.write_text(draw(bench.points), encoding="utf-8")


def latency_rows(bench: Bench) -> list[Row]:
    """All fleets, rates and policies."""
    return [row for fleet in FLEETS for per_s in bench.per_s for row in _rows(bench, fleet, per_s, POLICIES)]


def oracle_rows(bench: Bench) -> list[Row]:
    """The two fleets of the paper's figure 7."""
    fleets = list(FLEETS)[:2]
    return [row for fleet in fleets for per_s in bench.per_s for row in _rows(bench, fleet, per_s, ORACLES)]


def _rows(bench: Bench, fleet: str, per_s: float, policies: Mapping[str, Policy]) -> list[Row]:
    asked = tasks(bench.tasks, FLEETS[fleet], bench.seed)
    outcomes = {name: run(one, asked, costs_of(fleet), per_s, bench.seed) for name, one in policies.items()}
    if policies is POLICIES:
        panel = bench.points.setdefault(f"{fleet}, {per_s:g} a second", {})
        for name, one in outcomes.items():
            family = name.split(",")[0]
            panel.setdefault(family, []).append((100 * statistics.fmean(one.right), one.ms_per_token))
    first = next(iter(outcomes.values()))
    return [_row(fleet, per_s, name, one, first, asked) for name, one in outcomes.items()]


def costs_of(fleet: str) -> dict[str, PairCosts]:
    """Of its engines, the smallest first."""
    profiles = load_profiles(PROFILES)
    return {name: profiles.models[name].costs(profiles.gpus) for name in FLEETS[fleet]}


def _row(fleet: str, per_s: float, name: str, one: Outcome, first: Outcome, asked: Sequence[Task]) -> Row:
    right = wilson(statistics.fmean(one.right), len(one.right))
    return {
        "models": fleet,
        "per_s": per_s,
        "policy": name,
        "ms_per_token": one.ms_per_token,
        "speedup": first.ms_per_token / one.ms_per_token,
        "right_pct": 100 * right.value,
        "interval": f"{100 * right.low:.0f}-{100 * right.high:.0f}",
        "points": 100 * (right.value - statistics.fmean(first.right)),
        "mean_s": statistics.fmean(one.seconds),
        "p95_s": quantile(one.seconds, 0.95),
        "smallest_pct": 100 * one.models[FLEETS[fleet][0]] / len(asked),
        "choice_pct": 100 * statistics.fmean(one.choice_s) / statistics.fmean(one.seconds),
        "paper": PAPER[fleet] if name.startswith("Chimera, slack 1") else "",
    }


def decision_rows(bench: Bench) -> list[Row]:
    """Real time of one choice among so many models."""
    rows = []
    for models in (2, 3, 64):
        draws = random.Random(bench.seed)
        took_us = []
        for _ in range(max(200, bench.tasks)):
            found = [
                Candidate(str(n), draws.random(), draws.uniform(0, 1e5), draws.uniform(0.01, 0.1), 64)
                for n in range(models)
            ]
            began = time.perf_counter()
            choose_model(found, ModelChoiceSettings())
            took_us.append(1e6 * (time.perf_counter() - began))
        rows.append({"models": models, "p50_us": quantile(took_us, 0.5), "p99_us": quantile(took_us, 0.99)})
    return rows


def predictor_rows(bench: Bench) -> list[Row]:
    """How good the blurred predictors are, beside the paper's."""
    names = tuple(MATH)
    asked = tasks(max(500, bench.tasks), names, bench.seed)
    foreseen = Foreseen(asked, PREDICTED, bench.seed)
    rows = []
    for name in names:
        told = [foreseen.lengths(number, task, name, 1)[1] for number, task in enumerate(asked)]
        true = [float(sum(task.tokens[name])) for task in asked]
        scores = [foreseen.scores(number, task, (name,))[name] for number, task in enumerate(asked)]
        rows.append(
            {
                "model": name,
                "right_pct": 100 * statistics.fmean(task.right[name] for task in asked),
                "tokens_mean": statistics.fmean(true),
                "tokens_deviation": statistics.stdev(true),
                "kendall_distance": kendall_distance(told, true),
                "paper_distance": PAPER_DISTANCE[name],
                "average_precision": average_precision(scores, [task.right[name] for task in asked]),
                "paper_macro_precision": 0.740,
            }
        )
    return rows


PAPER_DISTANCE = {"qwen2.5-1.5b": 0.146, "qwen2.5-3b": 0.195, "qwen2.5-7b": 0.185, "qwen2.5-14b": 0.222}
"""Table 3, MATH."""


def average_precision(scores: Sequence[float], right: Sequence[bool]) -> float:
    """The mean, over right answers, of the share of right ones among all that are scored as high."""
    ordered = [answer for _, answer in sorted(zip(scores, right, strict=True), reverse=True)]
    hits, precisions = 0, []
    for place, answer in enumerate(ordered, start=1):
        hits += answer
        if answer:
            precisions.append(hits / place)
    return statistics.fmean(precisions)


Rows = Callable[[Bench], list[Row]]
TABLES: Mapping[str, tuple[str, Rows, bool]] = {
    "predictors": ("Chimera: how good the predictors are that were assumed", predictor_rows, True),
    "latency": ("Chimera: latency and score of workflows, MATH", latency_rows, True),
    "oracle": ("Chimera: with oracles", oracle_rows, True),
    "decision": ("Chimera: one choice, microseconds", decision_rows, False),
}


if __name__ == "__main__":
    main()
