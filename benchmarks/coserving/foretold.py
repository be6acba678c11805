"""What a profile and virtual time foretell of pools on this machine, beside the same pools asked for real.

It wants a machine that does nothing else: what others take of a core stretches a run, and not the median of short
batches. What the pool's own loop takes, some tenths of a millisecond a request, is in no profile.
"""

import asyncio
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.coserving.real import (
    ARRANGEMENTS,
    ROOM,
    WIDTH,
    catalogue_of,
    chains_of,
    executors_of,
    experts_of,
    run_real,
    write_experts,
)
from benchmarks.report import Row
from shell_router.expert_pools.measuring import Amount, Bench, Measured, measured
from shell_router.simulation.expert_trials import ExpertTrials

PLACE = "cpu"


def foretold(images: int, seeds: int) -> list[Row]:
    """One row per arrangement and seed. Each is profiled anew right before: what else the machine does changes."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_experts(Path(folder))
        return [_row(Path(folder), name, images, seed) for seed in range(seeds) for name in ARRANGEMENTS]


def _row(folder: Path, name: str, images: int, seed: int) -> Row:
    count, policies = ARRANGEMENTS[name]
    found = asyncio.run(_profiled(folder))
    catalogue, chains = catalogue_of(folder), chains_of(images, seed)
    executors = executors_of(catalogue, found.costs, count)
    apart = {executor.name: executor.name for executor in executors}
    trials = ExpertTrials(catalogue, apart, chains, policies)
    per_s = trials.throughput(executors)
    real = asyncio.run(run_real(folder, found.costs, count, policies, images, seed))
    return {
        "system": name,
        "seed": seed,
        "sample_us": 1e6 * found.costs.sample_s,
        "batch_us": 1e6 * found.costs.batch_s,
        "largest": found.costs.largest_batch,
        "load_ms": 1e3 * found.costs.disk_load_s,
        "foretold_per_s": per_s,
        "real_per_s": real["per_s"],
        "off_percent": 100 * (per_s / real["per_s"] - 1),
        "switches": real["switches"],
    }


async def _profiled(folder: Path) -> Measured:
    """Files are in the system's page cache, as in the run."""
    some, experts = catalogue_of(folder), experts_of(folder, [PLACE])
    sample, room_bytes = torch.zeros(WIDTH), ROOM * some[0].memory_bytes
    bench = Bench(experts, some, PLACE, room_bytes, sample, experts.working_bytes, time.perf_counter)
    return await measured(bench, Amount(rounds=20))
