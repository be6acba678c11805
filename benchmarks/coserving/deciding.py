"""What a pool's decisions cost in CPU time: each of a run timed, with the whole task waiting from the start."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import quantiles
from typing import Any

from benchmarks.coserving.boards import Task
from benchmarks.coserving.devices import DEVICES
from benchmarks.coserving.runs import run
from benchmarks.report import Row
from shell_router.expert_pools import POLICIES
from shell_router.expert_pools.executor import Executor
from shell_router.expert_pools.pool import ExpertPool
from shell_router.expert_pools.shelf import Shelf
from shell_router.expert_pools.waiting import WaitingLine

EXPERTS = 400
DECISIONS: tuple[tuple[str, type, str], ...] = (
    ("which executor", ExpertPool, "_chosen"),
    ("where in its queue", Executor, "add"),
    ("the next batch", WaitingLine, "take"),
    ("what leaves: what lies here", Shelf, "_residents"),
)


def deciding(requests: int) -> list[Row]:
    """One row per decision, and their sum beside the run's virtual time, on the NUMA device."""
    device, task = DEVICES[0], Task("B", EXPERTS - 12, requests)
    with _timed() as seconds:
        outcome = run(task, device, device.several(task), POLICIES["ours"], seed=0, every_s=0.0)
    rows = [_row(name, seconds[name], outcome.seconds) for name, _, _ in DECISIONS]
    return [*rows, _row("all", [one for name, _, _ in DECISIONS for one in seconds[name]], outcome.seconds)]


def _row(name: str, seconds: list[float], run_s: float) -> Row:
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
