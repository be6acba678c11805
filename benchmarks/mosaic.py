"""MOSAIC: plans, the stages of a whole batch, and runs that do not go as planned, at the paper's
costs.

    python benchmarks/mosaic.py [--limit-s SECONDS] [--rounds N] [--json]

The paper's six models on four workers that load two each (its Tables 2 and 3). It gives no costs
per prompt; they are worked out so that round-robin takes as long as in the paper: the ratios
between the models from the four workers of Figure 2b, and one factor per benchmark from Figure 6.
Loads lie between the 38 and 47 s that it states. Larger workloads are drawn at random, in the same
ranges.

    makespan_s   of the plan; round_robin, data_parallel and longest_first: theirs, as multiples of
    it paper        how much faster than round-robin the paper's plan was, as measured there
    wrap_around  the quick plan from which the solver starts, as a multiple
    bound_s      no plan is shorter: the counting bound, or what the solver proved
    gap          how much shorter than this plan the best may be; optimal: whether less than 0.01 %
    solve_ms     median over the rounds, the solver's start included

Then both stages of a batch. The aggregator's costs are the line through the two times that the
paper reports (always asked, tau 2/3), tensor-parallel on all GPUs; on each GPU alone they are
worked out by a roofline (benchmarks/mosaic).

    proposers_s, aggregator_s, whole_s   seconds; speedup: times as fast as round-robin with every
    question aggregated paper                                the same, as measured there

Then the proposers' stage by the product's own sessions in virtual time, where per prompt each model
costs a random factor more or less than its profile says (lognormal, `spread`), and answers differ
in length. Medians over the rounds.

    kept, taken, replanned   seconds if prompts stay, idle workers take some, or the rest is planned
    again, too round_robin              seconds of that plan, kept
    known                    seconds, by the formula, of a plan that knows the real costs
    moved                    prompts that went to another worker
"""

import argparse
import random
import statistics
import time

from report import Row, report

from benchmarks.mosaic.off_plan import off, run, with_tails
from benchmarks.mosaic.paper import (
    EXPERT_SPEEDUP,
    PROMPTS,
    REPORTED,
    data_parallel,
    on_each_gpu,
    paper_workload,
    tensor_parallel,
)
from shell_router.batch.planner import (
    BatchPlan,
    ModelWork,
    Workload,
    plan,
    plan_longest_first,
    plan_round_robin,
    plan_wrap_around,
)

TITLE = "MOSAIC: plans, with the paper's costs"
LARGER = ((16, 8, 3), (32, 16, 3), (64, 100, 2), (64, 100, 3), (100, 64, 2), (100, 64, 3))
SPREADS = (0.0, 0.2, 0.5)


def main() -> None:
    """Plan everything and print the tables; with `--json` each ends with one object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit-s", type=float, default=10.0, help="for one plan")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="end each table with one JSON object")
    options = parser.parse_args()
    rows = [
        {
            "workload": name,
            **_row(paper_workload(name), options.limit_s, options.rounds),
            "paper": EXPERT_SPEEDUP[name],
        }
        for name in PROMPTS
    ]
    for models, workers, capacity in LARGER:
        row = _row(drawn(models, workers, capacity), options.limit_s, 1)
        rows.append({"workload": f"{models} models, {capacity} a worker", **row, "paper": None})
    report(TITLE, rows, engine="OR-tools CP-SAT", simulated=True, as_json=options.json)
    rows = [row for name in PROMPTS for row in _stages(name, options.limit_s)]
    report(
        "MOSAIC: both stages",
        rows,
        engine="costs from the paper",
        simulated=True,
        as_json=options.json,
    )
    rows = [_off_plan(name, spread, options.rounds) for name in PROMPTS for spread in SPREADS]
    report(
        "MOSAIC: off the plan", rows, engine="virtual time", simulated=True, as_json=options.json
    )


def _stages(name: str, limit_s: float) -> list[Row]:
    """A row per way to run both stages."""
    paper, work = REPORTED[name], paper_workload(name)
    proposers_s = {
        "round-robin": plan_round_robin(work).makespan_s,
        "data-parallel": data_parallel(work).makespan_s,
        "ilp": plan(work, limit_s).makespan_s,
    }

    def row(schedule: str, gate: str, parallel: str, measured: float | None = None) -> Row:
        whole = tensor_parallel(name, gate)
        if parallel == "data":
            aggregator_s = data_parallel(on_each_gpu(whole)).makespan_s
        else:
            aggregator_s = whole.session_s(whole.prompts)
        whole_s = proposers_s[schedule] + aggregator_s
        return {
            "workload": name,
            "proposers": schedule,
            "aggregator": f"{gate}, {parallel}-parallel",
            "proposers_s": proposers_s[schedule],
            "aggregator_s": aggregator_s,
            "whole_s": whole_s,
            "speedup": paper.whole_s / whole_s,
            "paper": measured,
        }

    return [
        row("round-robin", "always asked", "tensor", 1.0),
        row("data-parallel", "always asked", "data"),
        row("ilp", "always asked", "tensor"),
        row("ilp", "tau 1", "tensor"),
        row("ilp", "tau 2/3", "tensor", paper.whole_s / paper.ours_s),
        row("ilp", "tau 2/3", "data"),
    ]


def _off_plan(name: str, spread: float, rounds: int) -> Row:
    work = with_tails(paper_workload(name))
    made, baseline = plan_wrap_around(work), plan_round_robin(work)
    found: dict[str, list[float]] = {}
    for seed in range(rounds):
        real = off(work, spread, seed)
        kept_s, _ = run(work, made, real, "none")
        taken_s, _ = run(work, made, real, "taken")
        replanned_s, moved = run(work, made, real, "all")
        values = {
            "round_robin": run(work, baseline, real, "none")[0],
            "kept": kept_s,
            "taken": taken_s,
            "replanned": replanned_s,
            "known": plan_wrap_around(real[0]).makespan_s,
            "moved": moved.total(),
        }
        for column, value in values.items():
            found.setdefault(column, []).append(value)
    return {
        "workload": name,
        "spread": spread,
        **{column: statistics.median(v) for column, v in found.items()},
    }


def drawn(models: int, workers: int, capacity: int) -> Workload:
    """A random workload; a third of the models reason, and take ten times as long for a prompt."""
    draw = random.Random(f"{models}/{workers}/{capacity}")
    return Workload(
        tuple(
            ModelWork(
                f"e{number}",
                draw.randint(50, 2000),
                draw.uniform(38, 47),
                draw.uniform(0.1, 0.2) * draw.choice((1, 1, 12)),
            )
            for number in range(models)
        ),
        workers,
        capacity,
    )


def _row(workload: Workload, limit_s: float, rounds: int) -> Row:
    times_ms, made = [], BatchPlan("", (), 0.0)
    for _ in range(rounds):
        started_s = time.perf_counter()
        made = plan(workload, limit_s)
        times_ms.append(1e3 * (time.perf_counter() - started_s))
    return {
        "workers": workload.workers,
        "makespan_s": made.makespan_s,
        "round_robin": plan_round_robin(workload).makespan_s / made.makespan_s,
        "data_parallel": data_parallel(workload).makespan_s / made.makespan_s,
        "longest_first": plan_longest_first(workload).makespan_s / made.makespan_s,
        "wrap_around": plan_wrap_around(workload).makespan_s / made.makespan_s,
        "bound_s": made.bound_s,
        "gap": made.gap,
        "optimal": made.optimal,
        "solve_ms": statistics.median(times_ms),
    }


if __name__ == "__main__":
    main()
