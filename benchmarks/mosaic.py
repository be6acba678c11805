"""MOSAIC's planner on the paper's own workloads, and on larger ones.

    python benchmarks/mosaic.py [--limit-s SECONDS] [--rounds N] [--json]

The paper's six models on four workers that load two each (its Tables 2 and 3). It gives no costs per prompt; they are
worked out so that round-robin takes as long as in the paper: the ratios between the models from the four workers of
Figure 2b, and one factor per benchmark from Figure 6. Loads lie between the 38 and 47 s that it states.
Larger workloads are drawn at random, in the same ranges.

    makespan_s   of the plan; round_robin, data_parallel and longest_first: theirs, as multiples of it
    paper        how much faster than round-robin the paper's plan was, as measured there
    wrap_around  the quick plan from which the solver starts, as a multiple
    bound_s      no plan is shorter: the counting bound, or what the solver proved
    gap          how much shorter than this plan the best may be; optimal: whether less than 0.01 %
    solve_ms     median over the rounds, the solver's start included
"""

import argparse
import random
import statistics
import time

from report import Row, report

from shell_router.batch.planner import (
    ModelWork,
    Plan,
    Session,
    Workload,
    counting_bound_s,
    longest_first,
    plan,
    round_robin,
    wrap_around,
)

TITLE = "MOSAIC: plans, with the paper's costs"
WORKERS, CAPACITY = 4, 2
LOAD_S = {"Gemma": 43.0, "QwenR1": 46.0, "Qwen": 38.0, "LlamaR1": 47.0, "Exaone": 40.0, "GLM": 42.0}
"""In the order in which round-robin meets them: workers 0 to 3 of Figure 2b, then 0 and 1."""
PER_PROMPT_S = {
    "Gemma": (430 - 43 - 40) / (1632 + 547),
    "QwenR1": (2620 - 46 - 42 - 667 * (430 - 43 - 40) / (1632 + 547)) / 1428,
    "Qwen": (165 - 38) / 956,
    "LlamaR1": (2546 - 47) / 1070,
    "Exaone": (430 - 43 - 40) / (1632 + 547),
    "GLM": (430 - 43 - 40) / (1632 + 547),
}
PROMPTS = {
    "MMLU-Pro": {"Gemma": 1632, "QwenR1": 1428, "Qwen": 956, "LlamaR1": 1070, "Exaone": 547, "GLM": 667},
    "MedMCQA": {"Gemma": 4195, "QwenR1": 144, "Qwen": 5682, "LlamaR1": 620, "Exaone": 625, "GLM": 1283},
    "GPQA": {"Gemma": 4, "QwenR1": 158, "Qwen": 0, "LlamaR1": 429, "Exaone": 3, "GLM": 0},
}
ROUND_ROBIN_S = {"MMLU-Pro": 4149.9 - 1514.7, "MedMCQA": 1321.0 - 516.49, "GPQA": 2696.4 - 348.0}
"""End to end less the aggregator (section 5.3)."""
PAPER = {"MMLU-Pro": 1.69, "MedMCQA": 1.53, "GPQA": 2.54}
LARGER = ((16, 8, 3), (32, 16, 3), (64, 100, 2), (64, 100, 3), (100, 64, 2), (100, 64, 3))


def main() -> None:
    """Plan everything and print the table; with `--json` the last line is one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=10.0, help="for one plan")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    rows = [
        {"workload": name, **_row(paper_workload(name), options.limit_s, options.rounds), "paper": PAPER[name]}
        for name in PROMPTS
    ]
    for models, workers, capacity in LARGER:
        row = _row(drawn(models, workers, capacity), options.limit_s, 1)
        rows.append({"workload": f"{models} models, {capacity} a worker", **row, "paper": None})
    report(TITLE, rows, engine="OR-tools CP-SAT", simulated=True, as_json=options.json)


def paper_workload(name: str) -> Workload:
    """One of the paper's benchmarks, with costs for which round-robin takes as long as it did there."""
    low, high = 0.0, 10.0
    for _ in range(60):  # the makespan grows with the factor
        middle = (low + high) / 2
        shorter = round_robin(_paper_workload(name, middle)).makespan_s < ROUND_ROBIN_S[name]
        low, high = (middle, high) if shorter else (low, middle)
    return _paper_workload(name, high)


def _paper_workload(name: str, factor: float) -> Workload:
    models = [ModelWork(one, PROMPTS[name][one], LOAD_S[one], factor * PER_PROMPT_S[one]) for one in LOAD_S]
    return Workload(tuple(models), WORKERS, CAPACITY)


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
    times_ms, made = [], Plan("", (), 0.0)
    for _ in range(rounds):
        started_s = time.perf_counter()
        made = plan(workload, limit_s)
        times_ms.append(1e3 * (time.perf_counter() - started_s))
    return {
        "workers": workload.workers,
        "makespan_s": made.makespan_s,
        "round_robin": round_robin(workload).makespan_s / made.makespan_s,
        "data_parallel": data_parallel(workload).makespan_s / made.makespan_s,
        "longest_first": longest_first(workload).makespan_s / made.makespan_s,
        "wrap_around": wrap_around(workload).makespan_s / made.makespan_s,
        "bound_s": made.bound_s,
        "gap": made.gap,
        "optimal": made.optimal,
        "solve_ms": statistics.median(times_ms),
    }


def data_parallel(workload: Workload) -> Plan:
    """Every model on all workers at once, one model after the other (section A.6). It knows no limits."""
    sessions: list[Session] = []
    begin_s = 0.0
    for model in workload.asked:
        each, rest = divmod(model.prompts, workload.workers)
        counts = [each + (worker < rest) for worker in range(workload.workers)]
        sessions += [
            Session(worker, model.name, count, begin_s, begin_s + model.session_s(count))
            for worker, count in enumerate(counts)
            if count
        ]
        begin_s = max(session.end_s for session in sessions)
    ordered = sorted(sessions, key=lambda session: (session.worker, session.begin_s))
    return Plan("data-parallel", tuple(ordered), counting_bound_s(workload))


if __name__ == "__main__":
    main()
