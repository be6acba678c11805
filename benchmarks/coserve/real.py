"""Real torch modules on disk, served by the pool; and the same runs predicted from measured
costs."""

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

from benchmarks.coserve.pool import (
    Component,
    ComponentPool,
    Costs,
    Event,
    ExecutorSettings,
    Policies,
    Request,
    Served,
    Switched,
)
from benchmarks.coserve.pool.measuring import Amount, Bench, Measured, measured
from benchmarks.coserve.pool.profiling import ComponentTrials
from benchmarks.coserve.pool.torch_components import TorchComponents, components_in
from benchmarks.coserve.runs import POLICIES, fewest_switches_in_any_order, shares
from benchmarks.report import Row

EXPERTS, SHARED, ROOM, WIDTH = 150, 10, 20, 768
EVERY_S = 0.0
PLACE = "cpu"
MMAP_THRESHOLD = -3
"""Of glibc's `mallopt`. Unless it is fixed, freed weights stay with the process, and its size tells
nothing.
"""
ARRANGEMENTS: Mapping[str, tuple[int, Policies]] = {
    "Samba-CoE": (1, POLICIES["samba-coe"]),
    "Samba-CoE Parallel": (2, POLICIES["samba-coe"]),
    "CoServe, one executor": (1, POLICIES["coserve"]),
    "CoServe, two": (2, POLICIES["coserve"]),
    "ours, one executor": (1, POLICIES["ours"]),
    "ours, two": (2, POLICIES["ours"]),
}


def real(images: int, seeds: int, device: str) -> list[Row]:
    """One row per arrangement, all executors on `device`; rounds take turns, so that what else the
    machine does falls on all alike.
    """
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 1_000_000)
    with tempfile.TemporaryDirectory() as folder:
        write_components(Path(folder))
        costs = asyncio.run(_costs(Path(folder), device))
        rows: dict[str, list[Row]] = {name: [] for name in ARRANGEMENTS}
        for seed in range(seeds):
            for name, (count, policies) in ARRANGEMENTS.items():
                rows[name].append(
                    asyncio.run(
                        run_real(Path(folder), costs, count, policies, images, seed, device)
                    )
                )
    slow = fmean(row["per_s"] for row in rows["Samba-CoE"])
    means = {
        name: {key: fmean(row[key] for row in found) for key in found[0]}
        for name, found in rows.items()
    }
    return [{"system": name, "x": mean["per_s"] / slow, **mean} for name, mean in means.items()]


def _module() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def write_components(folder: Path) -> None:
    """The components' files."""
    for number in range(EXPERTS):
        save_file(_module().state_dict(), folder / f"e{number}.safetensors")


def catalog_of(folder: Path) -> list[Component]:
    """With usage and predecessors as the stream has them."""
    usage = dict(enumerate(shares(EXPERTS - SHARED)))
    after: dict[int, set[str]] = {number: set() for number in range(EXPERTS - SHARED, EXPERTS)}
    for number, share in list(usage.items()):
        if number % 3:
            successor = EXPERTS - SHARED + number % SHARED
            usage[successor] = usage.get(successor, 0.0) + share
            after[successor].add(f"e{number}")
    found = components_in(
        folder, lambda _: "net", lambda name: min(1.0, usage.get(int(name[1:]), 0.0))
    )
    return [
        replace(component, after=frozenset(after.get(int(component.name[1:]), ())))
        for component in found
    ]


def components_of(folder: Path, names: list[str], device: str = PLACE) -> TorchComponents:
    """On executors of these names, all on `device`."""
    return TorchComponents(folder, {"net": _module}, dict.fromkeys(names, torch.device(device)))


async def _costs(folder: Path, device: str) -> Costs:
    """Measured: the best of several of each, so that what else the machine does counts little."""
    components, component = components_of(folder, [PLACE], device), catalog_of(folder)[0]
    disk_s, host_s, one_s, many_s = [], [], [], []
    for _ in range(20):
        disk_s.append(await _timed(components.load(component, "host")))
        host_s.append(await _timed(components.load(component, PLACE)))
        one_s.append(await _timed(components.run(component, PLACE, [torch.zeros(WIDTH)])))
        many_s.append(await _timed(components.run(component, PLACE, [torch.zeros(WIDTH)] * 16)))
        await components.unload(component, PLACE)
        await components.unload(component, "host")
    sample_s = max(0.0, (min(many_s) - min(one_s)) / 15)
    batch_s = max(0.0, min(one_s) - sample_s)
    return Costs(sample_s, batch_s, 16, 8 * WIDTH, min(host_s), min(host_s) + min(disk_s))


async def _timed(work: Awaitable[Any]) -> float:
    begun_s = time.perf_counter()
    await work
    return time.perf_counter() - begun_s


def executors_of(catalog: list[Component], costs: Costs, count: int) -> list[ExecutorSettings]:
    """`count` executors with equal shares of the memory."""
    memory_bytes = int(ROOM * catalog[0].memory_bytes * 1.1) // count
    return [
        ExecutorSettings(f"cpu-{one}", memory_bytes, {"net": costs}, 1 / 1.1)
        for one in range(count)
    ]


def chains_of(images: int, seed: int) -> list[tuple[str, ...]]:
    """The requests of a run, in order."""
    draw, upto = random.Random(seed), list(accumulate(shares(EXPERTS - SHARED)))
    drawn = draw.choices(range(EXPERTS - SHARED), cum_weights=upto, k=images)
    return [
        (f"e{one}", f"e{EXPERTS - SHARED + one % SHARED}") if one % 3 else (f"e{one}",)
        for one in drawn
    ]


async def run_real(
    folder: Path,
    costs: Costs,
    count: int,
    policies: Policies,
    images: int,
    seed: int,
    device: str = PLACE,
) -> Row:
    """What an arrangement does on one stream."""
    catalog, events = catalog_of(folder), list[Event]()
    executors = executors_of(catalog, costs, count)
    components = components_of(folder, [executor.name for executor in executors], device)
    sample = torch.zeros(WIDTH)
    peak_bytes, begun_bytes = 0, _resident_bytes()

    def watch(event: Event) -> None:
        nonlocal peak_bytes
        peak_bytes = max(peak_bytes, _resident_bytes())
        events.append(event)

    async with ComponentPool(catalog, executors, components, policies, watch=watch) as pool:
        loaded, begun_s = (
            set(sum((pool.loaded()[executor.name] for executor in executors), ())),
            time.perf_counter(),
        )
        async with asyncio.TaskGroup() as tasks:
            for number, chain in enumerate(chains_of(images, seed)):
                tasks.create_task(pool.ask(Request(str(number), chain, sample)))
                await asyncio.sleep(EVERY_S)
        seconds = time.perf_counter() - begun_s
    switches = sum(isinstance(event, Switched) for event in events)
    fewest = fewest_switches_in_any_order(
        (event.component for event in events if isinstance(event, Served)), loaded
    )
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


def predicted(images: int, seeds: int) -> list[Row]:
    """One row per arrangement and seed. Each is profiled anew right before: what else the machine
    does changes.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_components(Path(folder))
        return [
            _row(Path(folder), name, images, seed) for seed in range(seeds) for name in ARRANGEMENTS
        ]


def _row(folder: Path, name: str, images: int, seed: int) -> Row:
    count, policies = ARRANGEMENTS[name]
    found = asyncio.run(_profiled(folder))
    catalog, chains = catalog_of(folder), chains_of(images, seed)
    executors = executors_of(catalog, found.costs, count)
    apart = {executor.name: executor.name for executor in executors}
    trials = ComponentTrials(catalog, apart, chains, policies)
    per_s = trials.throughput(executors)
    real = asyncio.run(run_real(folder, found.costs, count, policies, images, seed))
    return {
        "system": name,
        "seed": seed,
        "sample_us": 1e6 * found.costs.sample_s,
        "batch_us": 1e6 * found.costs.batch_s,
        "largest": found.costs.largest_batch,
        "load_ms": 1e3 * found.costs.disk_load_s,
        "predicted_per_s": per_s,
        "real_per_s": real["per_s"],
        "off_percent": 100 * (per_s / real["per_s"] - 1),
        "switches": real["switches"],
    }


async def _profiled(folder: Path) -> Measured:
    """Files are in the system's page cache, as in the run."""
    some, components = catalog_of(folder), components_of(folder, [PLACE])
    sample, room_bytes = torch.zeros(WIDTH), ROOM * some[0].memory_bytes
    bench = Bench(
        components, some, PLACE, room_bytes, sample, components.working_bytes, time.perf_counter
    )
    return await measured(bench, Amount(rounds=20))
