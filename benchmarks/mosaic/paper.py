"""MOSAIC's own workloads and figures (its Tables 1 to 3, Figures 2b and 6), and the costs that they
lead to.
"""

from dataclasses import dataclass

from shell_router.batch.planner import (
    BatchPlan,
    ModelWork,
    Session,
    Workload,
    lower_bound_s,
    plan_round_robin,
)
from shell_router.standins.simulated.costs import Gpu, Roofline, costs_of

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
    "MMLU-Pro": {
        "Gemma": 1632,
        "QwenR1": 1428,
        "Qwen": 956,
        "LlamaR1": 1070,
        "Exaone": 547,
        "GLM": 667,
    },
    "MedMCQA": {
        "Gemma": 4195,
        "QwenR1": 144,
        "Qwen": 5682,
        "LlamaR1": 620,
        "Exaone": 625,
        "GLM": 1283,
    },
    "GPQA": {"Gemma": 4, "QwenR1": 158, "Qwen": 0, "LlamaR1": 429, "Exaone": 3, "GLM": 0},
}


@dataclass(frozen=True, slots=True)
class Reported:
    """What the paper reports of a benchmark; times in seconds, the aggregator's tensor-parallel
    over its four GPUs.
    """

    questions: int
    whole_s: float
    ours_s: float
    aggregator_s: float
    gated_s: float
    skipped: dict[str, float]

    @property
    def round_robin_s(self) -> float:
        """The proposers' stage by round-robin: end to end less the aggregator (section 5.3)."""
        return self.whole_s - self.aggregator_s

    def asked(self, gate: str) -> int:
        """Questions that the aggregator answers."""
        return round(self.questions * (1 - self.skipped[gate]))


REPORTED = {
    "MMLU-Pro": Reported(
        2100,
        4149.9,
        2427.6,
        1514.7,
        870.5,
        {"always asked": 0.0, "tau 1": 0.4571, "tau 2/3": 0.8462},
    ),
    "MedMCQA": Reported(
        4183,
        1321.0,
        648.6,
        516.49,
        122.09,
        {"always asked": 0.0, "tau 1": 0.4748, "tau 2/3": 0.9018},
    ),
    "GPQA": Reported(
        198,
        2696.4,
        1153.1,
        348.0,
        227.73,
        {"always asked": 0.0, "tau 1": 0.3737, "tau 2/3": 0.8737},
    ),
}
EXPERT_SPEEDUP = {"MMLU-Pro": 1.69, "MedMCQA": 1.53, "GPQA": 2.54}

A100 = Gpu(flops=312e12, bandwidth=2.039e12, memory=80e9, link=300e9)
"""NVIDIA's data sheet, A100 SXM 80 GB."""
ALL_REDUCES_S = 2 * 32 * 15e-6
"""Assumed: what a pass of 32 layers spends on two all-reduces each, of 15 microseconds, between
four such GPUs.
"""


def paper_workload(name: str) -> Workload:
    """The proposers of one of the benchmarks, with costs for which round-robin takes as long as it
    did there.
    """
    low, high = 0.0, 10.0
    for _ in range(60):  # the makespan grows with the factor
        middle = (low + high) / 2
        shorter = plan_round_robin(_scaled(name, middle)).makespan_s < REPORTED[name].round_robin_s
        low, high = (middle, high) if shorter else (low, middle)
    return _scaled(name, high)


def _scaled(name: str, factor: float) -> Workload:
    models = [
        ModelWork(one, PROMPTS[name][one], LOAD_S[one], factor * PER_PROMPT_S[one])
        for one in LOAD_S
    ]
    return Workload(tuple(models), WORKERS, CAPACITY)


def tensor_parallel(name: str, gate: str) -> ModelWork:
    """The aggregator on all GPUs at once: the line through the two times that the paper reports of
    it.

    What does not grow with the questions, a load and the longest output, is most of it.
    """
    found = REPORTED[name]
    always, few = found.asked("always asked"), found.asked("tau 2/3")
    per_prompt_s = (found.aggregator_s - found.gated_s) / (always - few)
    rest_s = found.aggregator_s - always * per_prompt_s
    load_s = sum(LOAD_S.values()) / len(LOAD_S)
    return ModelWork("aggregator", found.asked(gate), load_s, per_prompt_s, fixed_s=rest_s - load_s)


def on_each_gpu(whole: ModelWork) -> Workload:
    """The same aggregator loaded on every GPU, for a share of the questions each.

    Prompts per second are the same in all, but that no pass waits for the others' GPUs. The longest
    output takes as much longer as a pass of one sequence does, by the roofline of an 8B model.
    """
    alone_s, together_s = pass_s(1), pass_s(WORKERS)
    model = ModelWork(
        whole.name,
        whole.prompts,
        whole.load_s,
        whole.per_prompt_s * WORKERS * (together_s - ALL_REDUCES_S) / together_s,
        fixed_s=whole.fixed_s * alone_s / together_s,
        most_workers=WORKERS,
    )
    return Workload((model,), WORKERS, 1)


def pass_s(gpus: int) -> float:
    """Seconds of one decode pass of a single sequence of an 8B model."""
    shape = Roofline("a100", parameters=8e9, layers=32, heads=32, kv_heads=8, gpus=gpus)
    return costs_of(shape, A100).decode.step_s + (ALL_REDUCES_S if gpus > 1 else 0.0)


def data_parallel(workload: Workload) -> BatchPlan:
    """Every model on all workers at once, then a barrier and the next model (section A.6). It knows
    no limits.
    """
    sessions: list[Session] = []
    begin_s = 0.0
    for model in workload.active_models:
        each, rest = divmod(model.prompts, workload.workers)
        counts = [each + (worker < rest) for worker in range(workload.workers)]
        sessions += [
            Session(worker, model.name, count, begin_s, begin_s + model.session_s(count))
            for worker, count in enumerate(counts)
            if count
        ]
        begin_s = max(session.end_s for session in sessions)
    ordered = sorted(sessions, key=lambda session: (session.worker, session.begin_s))
    return BatchPlan("data-parallel", tuple(ordered), lower_bound_s(workload))
