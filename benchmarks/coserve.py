"""CoServe's circuit boards: hundreds of components, memory for a few dozen, in virtual time.

    python benchmarks/coserve.py [--table NAME] [--images N] [--seeds N] [--device NAME]
        [--json]

The paper's tasks and devices (section 5.1); what it leaves open is assumed in `coserve/runs.py`,
with reasons. Means over the seeds; each seed draws another stream of images.

    systems     Samba-CoE and its variants, CoServe as published, and ours
    boards      the same where boards of 350 components come one after the other (Zipf 1.0):
                sensitivity, chosen after the paper's figures were known
    ablations   CoServe's techniques added one after the other (section 5.3), then ours
    splits      how much of the GPU's memory holds components: as searched for on other images, and
                all shares
    executors   how many executors serve most, tried on other images: first on the GPU, then on the
                CPU (figure 17)
    deciding    what assigning, taking and evicting cost at 400 components with 10,000 requests
                waiting
    real        150 small torch modules on this machine's disk, memory for 20: nothing is simulated
    predicted   the same modules profiled, and their pools in virtual time and for real

    per_s       images a second; x: times Samba-CoE's; switches: loads after the start; from_disk:
                of these
    fewer       switches, less than those of Samba-CoE Parallel, in percent, which has as many
                executors
    over_any    switches over the fewest in any order; over_order: over the fewest for the batches
                as they were served
    paper       what the paper measured, where it says so
    best        percent of the memory, of every tenth the one with which the task is done soonest;
                best_per_s with it
    components  the last window of the paper's search, which counts components on the GPU; window:
                of ours, in percent of the memory; of_experts, of_window: shares drawn from it, as
                in the paper, over best_per_s
    ours        what is taken of all that was tried; trials: how many were
    whole_batch what the largest useful batch leaves; casual: 75 %
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from report import Row, report

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.coserve.pool import Policies
from benchmarks.coserve.pool.memory import two_stage
from benchmarks.coserve.pool.policies import least_extension_and_reading
from benchmarks.coserve.runs import (
    DEVICES,
    IMAGE_EVERY_S,
    POLICIES,
    TASKS,
    Device,
    Outcome,
    Task,
    run,
)
from benchmarks.coserve.splits import counts, deciding, splits

COSERVE, SAMBA, FIFO = POLICIES["coserve"], POLICIES["samba-coe"], POLICIES["samba-coe-fifo"]
ONE = {"Samba-CoE": SAMBA, "Samba-CoE FIFO": FIFO}
"""On one executor with the whole GPU."""
SEVERAL = {"Samba-CoE Parallel": SAMBA, "CoServe": COSERVE, "ours": POLICIES["ours"]}
NONE = replace(FIFO, evict_host=two_stage)
ABLATIONS = {
    "none": NONE,
    "component management": replace(NONE, evict=two_stage),
    "+ arranging": replace(NONE, evict=two_stage, window_s=COSERVE.window_s),
    "+ assigning: CoServe": COSERVE,
    "+ the disk is a queue": replace(COSERVE, assign=least_extension_and_reading),
    "+ eviction reads the queue": replace(POLICIES["ours"], prefetch=0),
    "+ loading ahead: ours": POLICIES["ours"],
}
PAPER = {"Samba-CoE": "1", "CoServe": "4.5 to 12", "ours": "-"}


def main() -> None:
    """Run everything and print one table; with `--json` the last line is one object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--table",
        choices=(
            "systems",
            "boards",
            "ablations",
            "splits",
            "executors",
            "deciding",
            "real",
            "predicted",
        ),
        default="systems",
    )
    parser.add_argument("--images", type=int, help="of each task, instead of 2,500 and 3,500")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--device", default="cpu", help="of --table real: a device of torch's, as cuda:0"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    tasks = [replace(task, images=options.images or task.images) for task in TASKS]
    if options.table == "boards":
        tasks = [replace(task, skew=1.0, placements=350) for task in tasks]
    if options.table in ("systems", "boards"):
        rows = [
            row
            for device in DEVICES
            for task in tasks
            for row in systems(device, task, range(options.seeds))
        ]
    elif options.table == "ablations":
        rows = [
            row
            for device in DEVICES
            for task in tasks[::3]
            for row in ablations(device, task, options.seeds)
        ]
    elif options.table in ("splits", "executors"):
        compared = splits if options.table == "splits" else counts
        rows = [
            row
            for device in DEVICES
            for name in ("coserve", "ours")
            for row in compared(device, tasks[::3], name, seed=0)
        ]
    elif options.table == "deciding":
        rows = deciding(options.images or 10_000)
    elif options.table == "predicted":
        os.environ["KINETO_LOG_LEVEL"] = "99"  # or torch's profiler writes lines of its own
        from benchmarks.coserve.real import predicted  # see below

        rows = predicted(options.images or 2000, options.seeds)
    else:
        from benchmarks.coserve.real import real  # the other tables need no torch

        rows = real(options.images or 2000, options.seeds, options.device)
    real_run = options.table in ("real", "predicted")
    report(
        f"CoServe: {options.table}",
        rows,
        engine="component pools",
        simulated=not real_run,
        as_json=options.json,
    )


def systems(device: Device, task: Task, seeds: Sequence[int]) -> list[Row]:
    """One row per system."""
    found = {
        name: _runs(device, task, policies, seeds, several=False) for name, policies in ONE.items()
    }
    found |= {
        name: _runs(device, task, policies, seeds, several=True)
        for name, policies in SEVERAL.items()
    }
    return _rows(device, task, found, "Samba-CoE", "Samba-CoE Parallel")


def ablations(device: Device, task: Task, seeds: int) -> list[Row]:
    """One row per technique."""
    found = {
        name: _runs(device, task, policies, range(seeds), several=True)
        for name, policies in ABLATIONS.items()
    }
    return _rows(device, task, found, "none", "none")


def _runs(
    device: Device, task: Task, policies: Policies, seeds: Sequence[int], *, several: bool
) -> list[Outcome]:
    executors = device.several(task) if several else device.one()
    return [
        run(task, device, executors, policies, seed=seed, every_s=IMAGE_EVERY_S) for seed in seeds
    ]


def _rows(
    device: Device, task: Task, found: dict[str, list[Outcome]], slow: str, switching: str
) -> list[Row]:
    per_s = {name: fmean(one.throughput for one in runs) for name, runs in found.items()}
    switches = {name: fmean(one.switches for one in runs) for name, runs in found.items()}
    return [
        {
            "device": device.name,
            "task": task.name,
            "system": name,
            "per_s": per_s[name],
            "x": per_s[name] / per_s[slow],
            "paper": PAPER.get(name),
            "switches": round(switches[name]),
            "from_disk": round(fmean(one.from_disk for one in runs)),
            "fewer": 100 * (1 - switches[name] / switches[switching]),
            "over_any": switches[name] / fmean(one.fewest for one in runs),
            "over_order": switches[name] / fmean(one.fewest_so for one in runs),
        }
        for name, runs in found.items()
    ]


if __name__ == "__main__":
    main()
