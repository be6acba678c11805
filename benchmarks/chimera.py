"""Chimera's main result in virtual time: latency and score of workflows on models of several sizes,
one A6000 each.

    python benchmarks/chimera.py [--table NAME ...] [--data NAME ...] [--tasks N] [--seeds N]
    [--per-s R ...] [--json]

    latency   end-to-end latency per token and score, by policy, with vLLM's and the paper's figures
    oracle    the same with the true lengths, with the true outcomes, and with both
    decision  what one choice costs this machine, real time, with requests in flight

Engines cost what a roofline of the A6000 says (configs/engines/a6000.yaml). Workflows have one, two
or four stages, as users choose; lengths are those of MATH and APPS in section 4.1, scores those of
Qwen2.5's report for MATH, and assumed for APPS; how lengths and scores hang together is assumed
(chimera/tasks.py). Predictors are blurred until they are as good as the paper's (its tables 2 and
3, shown). Figures are means over the seeds, and their least and greatest.

    vLLM              fewest unfinished stages, first come, first served
    MLFQ              the same, the program that was served least first (nothing that runs is
    interrupted) LTR               the same, the shortest stage first, lengths predicted
    vLLM (STJF)       the same, the shortest rest of a program first, by the true lengths
    Chimera, slack S  Algorithm 1 and the shortest rest of a program first, all predicted
    worth, S s        our own: score less wait, where S seconds are worth one right answer
    best score        what is scored highest, whatever the load

A program keeps its model in all of them; vLLM's own balancing places each stage anew.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import Row, report

from benchmarks.chimera.picture import Point, draw
from benchmarks.chimera.tasks import Blur, Foreseen, tasks
from benchmarks.chimera.world import DATA, FLEETS, Arrivals, Outcome, Policy, oracles, policies, run
from shell_router.core.statistics import quantile, wilson
from shell_router.lab.simulation.settings import load_profiles
from shell_router.prediction.fitting import kendall_distance
from shell_router.routing.model_choice import Candidate, ModelChoiceSettings, choose_model
from shell_router.standins.simulated.costs import PairCosts

ROOT = Path(__file__).parents[1]
PROFILES = ROOT / "configs/engines/a6000.yaml"


@dataclass(frozen=True, slots=True)
class Bench:
    """What is run, and how much of it; `points` are for the picture."""

    data: Sequence[str]
    tasks: int
    per_s: Sequence[float]
    at_once: int
    seeds: int
    points: dict[str, dict[str, list[Point]]]


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=TABLES, nargs="+", default=list(TABLES), metavar="NAME")
    parser.add_argument("--tasks", type=int, default=300, help="workflows per run (default 300)")
    parser.add_argument(
        "--per-s", type=float, nargs="+", default=[16.0, 32.0], metavar="R", help="arrivals"
    )
    parser.add_argument(
        "--at-once",
        type=int,
        default=64,
        metavar="N",
        help="sequences that an engine decodes at once, which the paper leaves open (default 64)",
    )
    parser.add_argument(
        "--data", choices=DATA, nargs="+", default=list(DATA), metavar="NAME", help="MATH, APPS"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (default 3)")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="score against latency, as SVG"
    )
    parser.add_argument("--json", action="store_true", help="end each table with one JSON object")
    options = parser.parse_args()
    bench = Bench(options.data, options.tasks, options.per_s, options.at_once, options.seeds, {})
    for name in options.table:
        title, rows, simulated = TABLES[name]
        engine = "an A6000 per model by roofline, Qwen2.5" if simulated else "no engine"
        report(title, rows(bench), engine=engine, simulated=simulated, as_json=options.json)
    if options.picture is not None and bench.points:
        options.picture.write_text(draw(bench.points), encoding="utf-8")


def latency_rows(bench: Bench) -> list[Row]:
    """All data sets, fleets, rates and policies."""
    return _tables(bench, list(FLEETS), policies)


def oracle_rows(bench: Bench) -> list[Row]:
    """The two fleets of the paper's figure 7."""
    return _tables(bench, list(FLEETS)[:2], oracles)


def _tables(
    bench: Bench, fleets: Sequence[str], compared: Callable[[Blur], Mapping[str, Policy]]
) -> list[Row]:
    return [
        row
        for data in bench.data
        for fleet in fleets
        for per_s in bench.per_s
        for row in _rows(bench, data, fleet, per_s, compared(DATA[data].blur))
    ]


def _rows(
    bench: Bench, data: str, fleet: str, per_s: float, compared: Mapping[str, Policy]
) -> list[Row]:
    costs = costs_of(fleet)
    abilities = {name: DATA[data].abilities[name] for name in FLEETS[fleet]}
    asked = [tasks(bench.tasks, abilities, seed) for seed in range(bench.seeds)]
    arrivals = Arrivals(per_s, bench.at_once)
    outcomes = {
        name: [run(one, asked[seed], costs, arrivals, seed) for seed in range(bench.seeds)]
        for name, one in compared.items()
    }
    if "vLLM" in compared:
        panel = bench.points.setdefault(f"{data}, {fleet}, {per_s:g} a second", {})
        for name, runs in outcomes.items():
            point = (
                statistics.fmean(map(right_pct, runs)),
                statistics.fmean(one.ms_per_token for one in runs),
            )
            panel.setdefault(name.split(",")[0], []).append(point)
    first = next(iter(outcomes.values()))
    place = {"data": data, "models": fleet, "per_s": per_s}
    return [
        {
            **place,
            "policy": name,
            **_figures(runs, first, FLEETS[fleet][0]),
            "paper": _paper(data, fleet, name),
        }
        for name, runs in outcomes.items()
    ]


def _paper(data: str, fleet: str, policy: str) -> str:
    return DATA[data].paper[fleet] if policy == "Chimera, slack 1" else ""


def costs_of(fleet: str) -> dict[str, PairCosts]:
    """Of its engines, the smallest first."""
    profiles = load_profiles(PROFILES)
    return {name: profiles.models[name].costs(profiles.gpus) for name in FLEETS[fleet]}


def right_pct(run: Outcome) -> float:
    """Right answers in percent."""
    return 100 * statistics.fmean(run.right)


def _figures(runs: Sequence[Outcome], first: Sequence[Outcome], smallest: str) -> Row:
    """Means over the runs; ratios and differences are to the first policy's run of the same
    seed."""
    faster = [other.ms_per_token / one.ms_per_token for one, other in zip(runs, first, strict=True)]
    points = [right_pct(one) - right_pct(other) for one, other in zip(runs, first, strict=True)]
    answers = [answer for one in runs for answer in one.right]
    seconds = [took_s for one in runs for took_s in one.seconds]
    right = wilson(statistics.fmean(answers), len(answers))
    return {
        "ms_per_token": statistics.fmean(one.ms_per_token for one in runs),
        "speedup": statistics.fmean(faster),
        "speedups": f"{min(faster):.2f} to {max(faster):.2f}",
        "right_pct": 100 * right.value,
        "interval": f"{100 * right.low:.0f}-{100 * right.high:.0f}",
        "points": round(statistics.fmean(points), 3),
        "all points": f"{min(points):+.1f} to {max(points):+.1f}",
        "mean_s": statistics.fmean(seconds),
        "p95_s": quantile(seconds, 0.95),
        "smallest_pct": 100 * sum(one.models[smallest] for one in runs) / len(answers),
        "choice_pct": 100
        * statistics.fmean(took for one in runs for took in one.choice_s)
        / statistics.fmean(seconds),
    }


def decision_rows(bench: Bench) -> list[Row]:
    """Real time of one choice among N models."""
    rows = []
    for models in (2, 3, 64):
        draws = random.Random(0)
        took_us = []
        for _ in range(max(200, bench.tasks)):
            found = [
                Candidate(
                    str(n), draws.random(), draws.uniform(0, 1e5), draws.uniform(0.01, 0.1), 64
                )
                for n in range(models)
            ]
            began = time.perf_counter()
            choose_model(found, ModelChoiceSettings())
            took_us.append(1e6 * (time.perf_counter() - began))
        rows.append(
            {"models": models, "p50_us": quantile(took_us, 0.5), "p99_us": quantile(took_us, 0.99)}
        )
    return rows


def predictor_rows(bench: Bench) -> list[Row]:
    """How good the blurred predictors are, compared with the paper's."""
    return [row for data in bench.data for row in _predictors(data, max(500, bench.tasks))]


def _predictors(data: str, count: int) -> list[Row]:
    found, rows = DATA[data], []
    asked = tasks(count, found.abilities, 0)
    foreseen = Foreseen(asked, found.blur, 0)
    for name in found.abilities:
        predicted = [
            foreseen.lengths(number, task, name, 1)[1] for number, task in enumerate(asked)
        ]
        true = [float(sum(task.tokens[name])) for task in asked]
        scores = [foreseen.scores(number, task, (name,))[name] for number, task in enumerate(asked)]
        rows.append(
            {
                "data": data,
                "model": name,
                "right_pct": 100 * statistics.fmean(task.right[name] for task in asked),
                "tokens_mean": statistics.fmean(true),
                "tokens_deviation": statistics.stdev(true),
                "kendall_distance": kendall_distance(predicted, true),
                "paper_distance": found.distance[name],
                "average_precision": average_precision(
                    scores, [task.right[name] for task in asked]
                ),
                "paper_macro_precision": found.precision,
            }
        )
    return rows


def average_precision(scores: Sequence[float], right: Sequence[bool]) -> float:
    """The mean, over right answers, of the share of right ones among all that are scored as
    high."""
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
    "latency": ("Chimera: latency and score of workflows", latency_rows, True),
    "oracle": ("Chimera: with oracles", oracle_rows, True),
    "decision": ("Chimera: one choice, microseconds", decision_rows, False),
}


if __name__ == "__main__":
    main()
