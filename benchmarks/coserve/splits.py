"""How long decisions take, and how shares of memory for components compare."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from statistics import fmean, quantiles
from typing import Any

from benchmarks.coserve.pool import ExecutorSettings
from benchmarks.coserve.pool.executor import ComponentExecutor
from benchmarks.coserve.pool.memory import Shelf
from benchmarks.coserve.pool.pool import ComponentPool
from benchmarks.coserve.pool.profiling import ComponentTrials
from benchmarks.coserve.pool.queue import ComponentQueue
from benchmarks.coserve.pool.splitting import (
    CASUAL_SHARE,
    PERCENT,
    chosen,
    decay_window,
    executor_counts,
    refined,
    share_next_to_largest_batch,
)
from benchmarks.coserve.runs import (
    BYTES,
    DEVICES,
    IMAGE_EVERY_S,
    POLICIES,
    Device,
    Task,
    components,
    requests,
    run,
)
from benchmarks.report import Row

EXPERTS = 400
DECISIONS: tuple[tuple[str, type, str], ...] = (
    ("which executor", ComponentPool, "_chosen"),
    ("where in its queue", ComponentExecutor, "add"),
    ("the next batch", ComponentQueue, "take"),
    ("what leaves: what lies here", Shelf, "_residents"),
)


def deciding(requests: int) -> list[Row]:
    """One row per decision, and their sum as a share of the run's virtual time, on the NUMA
    device."""
    device, task = DEVICES[0], Task("B", EXPERTS - 12, requests)
    with _timed() as seconds:
        outcome = run(task, device, device.several(task), POLICIES["ours"], seed=0, every_s=0.0)
    rows = [_decision_row(name, seconds[name], outcome.seconds) for name, _, _ in DECISIONS]
    return [
        *rows,
        _decision_row(
            "all", [one for name, _, _ in DECISIONS for one in seconds[name]], outcome.seconds
        ),
    ]


def _decision_row(name: str, seconds: list[float], run_s: float) -> Row:
    cuts = quantiles(seconds, n=100)
    return {
        "decision": name,
        "times": len(seconds),
        "p50_us": 1e6 * cuts[49],
        "p99_us": 1e6 * cuts[98],
        "sum_s": sum(seconds),
        "of_run_percent": 100 * sum(seconds) / run_s,
    }


@contextmanager
def _timed() -> Iterator[dict[str, list[float]]]:
    """The decisions' methods report how long they took, while the context is open."""
    seconds: dict[str, list[float]] = defaultdict(list)
    originals = [(kind, method, getattr(kind, method)) for _, kind, method in DECISIONS]
    for (name, kind, method), (_, _, original) in zip(DECISIONS, originals, strict=True):
        setattr(kind, method, _timing(original, seconds[name]))
    try:
        yield seconds
    finally:
        for kind, method, original in originals:
            setattr(kind, method, original)


def _timing(original: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def timed(*args: Any, **more: Any) -> Any:
        begun_s = time.thread_time()
        try:
            return original(*args, **more)
        finally:
            seconds.append(time.thread_time() - begun_s)

    return timed


CASUAL = PERCENT * CASUAL_SHARE
STEP = 10
DRAWS = 3
"""The paper draws the share from the last window; evenly spread shares stand for that here."""
Throughput = Callable[[float], float]
"""Images a second, of a percentage of the GPU's memory for components."""


def splits(device: Device, tasks: Sequence[Task], policies: str, seed: int) -> list[Row]:
    """One row per task: what was chosen on a sample, and what that and others give on the task."""
    return [_row(device, task, policies, seed) for task in tasks]


def _row(device: Device, task: Task, policies: str, seed: int) -> Row:
    sample = replace(
        task, name=f"{task.name}/sample"
    )  # drawn apart, as long: a short one favors components over batches
    per_s = cache(_throughput(device, task, policies, seed))
    tried = cache(_throughput(device, sample, policies, seed))
    gpu, largest_bytes = (
        device.several(task)[0],
        max(one.memory_bytes for one in components(task.types, task.skew)),
    )
    least = PERCENT * (largest_bytes + 1) / gpu.memory_bytes
    window = decay_window(tried, least=least)
    one = PERCENT * BYTES["ResNet101"] / device.gpu_bytes
    counted = decay_window(lambda held: tried(min(PERCENT, held * one)), least=least / one)
    whole = max(least, PERCENT * share_next_to_largest_batch(gpu))
    others = {share: tried(share) for share in (CASUAL, whole)}
    known = refined({**window.tried, **others}, tried, least)
    ours = chosen(known)
    best = max((share for share in range(STEP, 101, STEP) if share >= least), key=per_s)
    return {
        "device": device.name,
        "task": task.name,
        "policies": policies,
        "best": best,
        "best_per_s": per_s(best),
        "components": f"{counted.lower:.0f} to {counted.upper:.0f}",
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
    """The mean of shares that are spread over a window, as far as components fit into them and they
    into the memory.
    """
    shares = [lower + (upper - lower) * (number + 0.5) / DRAWS for number in range(DRAWS)]
    return fmean(per_s(min(PERCENT, max(least, share))) for share in shares)


def counts(device: Device, tasks: Sequence[Task], policies: str, seed: int) -> list[Row]:
    """One row per task, processor and number of executors there, tried on a sample as long as the
    task.
    """
    rows = []
    for task in tasks:
        sample = replace(task, name=f"{task.name}/sample")
        trials = _trials(device, sample, policies, seed)
        by_device: dict[str, list[ExecutorSettings]] = {}
        for one in device.several(task):
            by_device.setdefault(trials.device_of[one.name], []).append(one)
        largest = max(one.memory_bytes for one in trials.catalog)
        tried = executor_counts(by_device, dict.fromkeys(by_device, largest), trials.throughput_of)
        rows += [
            {
                "device": device.name,
                "task": task.name,
                "policies": policies,
                "on": name,
                "executors": count,
                "per_s": per_s,
                "of_best": per_s / max(found.values()),
                "paper": "best" if count == len(by_device[name]) else "",
            }
            for name, found in tried.items()
            for count, per_s in found.items()
        ]
    return rows


def _throughput(device: Device, task: Task, policies: str, seed: int) -> Throughput:
    executors, trials = device.several(task), _trials(device, task, policies, seed)
    return lambda percent: trials.throughput([_with_share(one, percent) for one in executors])


def _trials(device: Device, task: Task, policies: str, seed: int) -> ComponentTrials:
    executors = device.several(task)
    chains = [request.chain[: 1 if request.sample else None] for request in requests(task, seed)]
    return ComponentTrials(
        components(task.types, task.skew),
        {one.name: one.name.split("-")[0] for one in executors},
        chains,
        POLICIES[policies],
        device.cache_bytes(len(executors)),
        IMAGE_EVERY_S,
    )


def _with_share(executor: ExecutorSettings, percent: float) -> ExecutorSettings:
    """The CPU's executor keeps its own."""
    return (
        executor
        if executor.name == "cpu"
        else replace(executor, component_share=min(1.0, percent / PERCENT))
    )
