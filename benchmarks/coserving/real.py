"""Small torch modules on this machine's disk, in memory for a few of them.

Experts are three linear layers of random weights, 7 MB each; two thirds of the requests go on to one of ten shared
experts. They come as fast as they can be asked, in a small part of the run, as in the paper. Costs are measured before
the runs. Files lie in the system's page cache, as they would not where there are too many of them: loads cost what
reading, parsing and copying cost.
"""

import asyncio
import ctypes
import random
import tempfile
import time
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.coserving.boards import shares
from benchmarks.report import Row
from shell_router.engines.torch_experts import TorchExperts, experts_in
from shell_router.expert_pools import (
    POLICIES,
    Costs,
    Event,
    ExecutorSettings,
    Expert,
    ExpertPool,
    Policies,
    Request,
    Served,
    Switched,
)
from shell_router.expert_pools.bounds import fewest_switches_in_any_order

EXPERTS, SHARED, ROOM, WIDTH = 150, 10, 20, 768
EVERY_S = 0.0
MMAP_THRESHOLD = -3
"""Of glibc's `mallopt`. Unless it is fixed, freed weights stay with the process, and its size tells nothing."""
ARRANGEMENTS: Mapping[str, tuple[int, Policies]] = {
    "Samba-CoE": (1, POLICIES["samba-coe"]),
    "Samba-CoE Parallel": (2, POLICIES["samba-coe"]),
    "CoServe, one executor": (1, POLICIES["coserve"]),
    "CoServe, two": (2, POLICIES["coserve"]),
    "ours, one executor": (1, POLICIES["ours"]),
    "ours, two": (2, POLICIES["ours"]),
}


def real(images: int, seeds: int) -> list[Row]:
    """One row per arrangement; rounds take turns, so that what else the machine does falls on all alike."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        write_experts(Path(folder))
        costs = asyncio.run(_costs(Path(folder)))
        rows: dict[str, list[Row]] = {name: [] for name in ARRANGEMENTS}
        for seed in range(seeds):
            for name, (count, policies) in ARRANGEMENTS.items():
                rows[name].append(asyncio.run(run_real(Path(folder), costs, count, policies, images, seed)))
    slow = fmean(row["per_s"] for row in rows["Samba-CoE"])
    means = {name: {key: fmean(row[key] for row in found) for key in found[0]} for name, found in rows.items()}
    return [{"system": name, "x": mean["per_s"] / slow, **mean} for name, mean in means.items()]


def _module() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def write_experts(folder: Path) -> None:
    """The experts' files."""
    for number in range(EXPERTS):
        save_file(_module().state_dict(), folder / f"e{number}.safetensors")


def catalogue_of(folder: Path) -> list[Expert]:
    """With usage and predecessors as the stream has them."""
    usage = dict(enumerate(shares(EXPERTS - SHARED)))
    after: dict[int, set[str]] = {number: set() for number in range(EXPERTS - SHARED, EXPERTS)}
    for number, share in list(usage.items()):
        if number % 3:
            successor = EXPERTS - SHARED + number % SHARED
            usage[successor] = usage.get(successor, 0.0) + share
            after[successor].add(f"e{number}")
    found = experts_in(folder, lambda _: "net", lambda name: min(1.0, usage.get(int(name[1:]), 0.0)))
    return [replace(expert, after=frozenset(after.get(int(expert.name[1:]), ()))) for expert in found]


def experts_of(folder: Path, names: list[str]) -> TorchExperts:
    """On executors of these names."""
    return TorchExperts(folder, {"net": _module}, dict.fromkeys(names, torch.device("cpu")))


async def _costs(folder: Path) -> Costs:
    """Measured: the best of several of each, so that what else the machine does counts little."""
    experts, expert = experts_of(folder, ["cpu"]), catalogue_of(folder)[0]
    disk_s, host_s, one_s, many_s = [], [], [], []
    for _ in range(20):
        disk_s.append(await _timed(experts.load(expert, "host")))
        host_s.append(await _timed(experts.load(expert, "cpu")))
        one_s.append(await _timed(experts.run(expert, "cpu", [torch.zeros(WIDTH)])))
        many_s.append(await _timed(experts.run(expert, "cpu", [torch.zeros(WIDTH)] * 16)))
        await experts.unload(expert, "cpu")
        await experts.unload(expert, "host")
    sample_s = max(0.0, (min(many_s) - min(one_s)) / 15)
    batch_s = max(0.0, min(one_s) - sample_s)
    return Costs(sample_s, batch_s, 16, 8 * WIDTH, min(host_s), min(host_s) + min(disk_s))


async def _timed(work: Awaitable[Any]) -> float:
    begun_s = time.perf_counter()
    await work
    return time.perf_counter() - begun_s


def executors_of(catalogue: list[Expert], costs: Costs, count: int) -> list[ExecutorSettings]:
    """So many with equal shares of the memory."""
    memory_bytes = int(ROOM * catalogue[0].memory_bytes * 1.1) // count
    return [ExecutorSettings(f"cpu-{one}", memory_bytes, {"net": costs}, 1 / 1.1) for one in range(count)]


def chains_of(images: int, seed: int) -> list[tuple[str, ...]]:
    """The requests of a run, in order."""
    draw, upto = random.Random(seed), list(accumulate(shares(EXPERTS - SHARED)))
    drawn = draw.choices(range(EXPERTS - SHARED), cum_weights=upto, k=images)
    return [(f"e{one}", f"e{EXPERTS - SHARED + one % SHARED}") if one % 3 else (f"e{one}",) for one in drawn]


async def run_real(folder: Path, costs: Costs, count: int, policies: Policies, images: int, seed: int) -> Row:
    """What an arrangement does on one stream."""
    catalogue, events = catalogue_of(folder), list[Event]()
    executors = executors_of(catalogue, costs, count)
    experts = experts_of(folder, [executor.name for executor in executors])
    sample = torch.zeros(WIDTH)
    peak_bytes, begun_bytes = 0, _resident_bytes()

    def watch(event: Event) -> None:
        nonlocal peak_bytes
        peak_bytes = max(peak_bytes, _resident_bytes())
        events.append(event)

    async with ExpertPool(catalogue, executors, experts, policies, watch=watch) as pool:
        loaded, begun_s = set(sum((pool.loaded()[executor.name] for executor in executors), ())), time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number, chain in enumerate(chains_of(images, seed)):
                tasks.create_task(pool.ask(Request(str(number), chain, sample)))
                await asyncio.sleep(EVERY_S)
        seconds = time.perf_counter() - begun_s
    switches = sum(isinstance(event, Switched) for event in events)
    fewest = fewest_switches_in_any_order((event.expert for event in events if isinstance(event, Served)), loaded)
    return {
        "per_s": images / seconds,
        "switches": switches,
        "over_any": switches / fewest,
        "budget_mb": sum(executor.memory_bytes for executor in executors) / 1e6,
        "reserved_mb": sum(executor.memory.peak_bytes for executor in pool.executors) / 1e6,
        "grown_mb": (peak_bytes - begun_bytes) / 1e6,
    }


def _resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096
