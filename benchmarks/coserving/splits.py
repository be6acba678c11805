"""How good the memory split is that is searched for (CoServe, section 4.4 and figure 18), beside every share tried."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean

from benchmarks.coserving.boards import BYTES, IMAGE_EVERY_S, Task, experts, requests
from benchmarks.coserving.devices import Device
from benchmarks.report import Row
from shell_router.expert_pools import POLICIES, ExecutorSettings
from shell_router.expert_pools.splitting import (
    CASUAL_SHARE,
    PERCENT,
    SplitSettings,
    chosen,
    decay_window,
    refined,
    share_beside_largest_batch,
)
from shell_router.simulation.expert_trials import ExpertTrials

CASUAL = PERCENT * CASUAL_SHARE
STEP = 10
DRAWS = 3
"""The paper draws the share from the last window; so many, evenly spread over it, stand for that here."""
Throughput = Callable[[float], float]
"""Images a second, of a percentage of the GPU's memory for experts."""


def splits(device: Device, tasks: Sequence[Task], policies: str, seed: int) -> list[Row]:
    """One row per task: what was chosen on a sample, and what that and others give on the task."""
    return [_row(device, task, policies, seed) for task in tasks]


def _row(device: Device, task: Task, policies: str, seed: int) -> Row:
    sample = replace(task, name=f"{task.name}/sample")  # drawn apart, as long: a short one favours experts over batches
    per_s = cache(_throughput(device, task, policies, seed))
    tried = cache(_throughput(device, sample, policies, seed))
    gpu, largest_bytes = device.several(task)[0], max(one.memory_bytes for one in experts(task.types))
    least = PERCENT * (largest_bytes + 1) / gpu.memory_bytes
    window = decay_window(tried, SplitSettings(), least=least)
    one = PERCENT * BYTES["ResNet101"] / device.gpu_bytes
    counted = decay_window(lambda held: tried(min(PERCENT, held * one)), SplitSettings(), least=least / one)
    whole = max(least, PERCENT * share_beside_largest_batch(gpu))
    others = {share: tried(share) for share in (CASUAL, whole)}
    known = refined({**window.tried, **others}, tried, least, SplitSettings().refinements)
    ours = chosen(known, SplitSettings().error_margin)
    best = max((share for share in range(STEP, 101, STEP) if share >= least), key=per_s)
    return {
        "device": device.name,
        "task": task.name,
        "policies": policies,
        "best": best,
        "best_per_s": per_s(best),
        "experts": f"{counted.lower:.0f} to {counted.upper:.0f}",
        "of_experts": _drawn(per_s, counted.lower * one, counted.upper * one, least) / per_s(best),
        "window": f"{window.lower:.0f} to {window.upper:.0f}",
        "of_window": _drawn(per_s, window.lower, window.upper, least) / per_s(best),
        "ours": ours,
        "ours_of_best": per_s(ours) / per_s(best),
        "trials": len(known),
        "whole_batch": whole,
        "whole_of_best": per_s(whole) / per_s(best),
        "casual_of_best": per_s(CASUAL) / per_s(best),
    }


def _drawn(per_s: Throughput, lower: float, upper: float, least: float) -> float:
    """The mean of shares that are spread over a window, as far as experts fit into them and they into the memory."""
    shares = [lower + (upper - lower) * (number + 0.5) / DRAWS for number in range(DRAWS)]
    return fmean(per_s(min(PERCENT, max(least, share))) for share in shares)


def _throughput(device: Device, task: Task, policies: str, seed: int) -> Throughput:
    executors = device.several(task)
    chains = [request.chain[: 1 if request.sample else None] for request in requests(task, seed)]
    trials = ExpertTrials(
        experts(task.types),
        {one.name: one.name.split("-")[0] for one in executors},
        chains,
        POLICIES[policies],
        device.cache_bytes(len(executors)),
        IMAGE_EVERY_S,
    )
    return lambda percent: trials.throughput([_with_share(one, percent) for one in executors])


def _with_share(executor: ExecutorSettings, percent: float) -> ExecutorSettings:
    """The CPU's executor keeps its own."""
    return executor if executor.name == "cpu" else replace(executor, expert_share=min(1.0, percent / PERCENT))
