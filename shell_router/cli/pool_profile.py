"""`shell-router experts profile`."""

# ruff: noqa: PLC0415 - see the package's docstring

import argparse
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from shell_router.cli.arguments import names, positive, whole_numbers
from shell_router.cli.running import run

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
POLICIES = ("ours", "coserve", "samba-coe", "samba-coe-fifo")
"""The keys of `expert_pools.POLICIES`, which would have to be imported for `--help`."""


def add_profile(profile: argparse.ArgumentParser) -> None:
    """What `profile` takes."""
    profile.add_argument("pool", type=Path, metavar="POOL", help="the pool's YAML file, which is written to")
    profile.add_argument("--devices", type=names, default=(), help="measure only these: cuda:0,cpu (default: all)")
    profile.add_argument("--keep-costs", action="store_true", help="measure nothing: only usage and the split")
    profile.add_argument("--rounds", type=positive, default=5, help="medians of so many rounds (default 5)")
    listed = ",".join(map(str, BATCHES))
    profile.add_argument("--batches", type=whole_numbers, default=BATCHES, help=f"samples at once (default {listed})")
    profile.add_argument("--warm-files", action="store_true", help="time loads of files that the system has in memory")
    profile.add_argument(
        "--sample", type=Path, metavar="FILE", help='what is asked: JSONL, one {"chain": […]} per line'
    )
    profile.add_argument("--requests", type=positive, default=2000, help="drawn from rules to try splits on (2000)")
    profile.add_argument(
        "--every-s", type=float, default=0.0, metavar="S", help="one each S seconds (default 0: at once)"
    )
    profile.add_argument("--policies", choices=POLICIES, default=POLICIES[0], help="that the pool will have (ours)")
    profile.set_defaults(command=_profile)


def _profile(chosen: argparse.Namespace) -> int:
    sys.path.insert(0, str(Path.cwd()))  # where the modules that the pool names lie, unless they are installed
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or torch's profiler tells on stderr when it starts and stops
    from shell_router.errors import ConfigError
    from shell_router.expert_pools.measuring import Amount
    from shell_router.simulation.expert_profile import ProfileOptions, know_experts, measure_costs, require_devices
    from shell_router.simulation.expert_profile_file import require_writable
    from shell_router.simulation.expert_split import SplitOptions, find_split, know_usage

    if not chosen.every_s >= 0:
        raise ConfigError(f"--every-s is {chosen.every_s}.", remedy="Give 0 or more seconds.")
    date = datetime.now(UTC).date().isoformat()
    amount = Amount(chosen.batches, chosen.rounds)
    require_writable(chosen.pool)
    require_devices(chosen.pool, chosen.devices)
    know_experts(chosen.pool, _tell)
    splitting = SplitOptions(
        chosen.pool, date, chosen.sample, chosen.requests, chosen.every_s, policies=chosen.policies
    )
    chains = know_usage(splitting, _tell)  # before what takes long: bad samples are told at once
    if not chosen.keep_costs:
        options = ProfileOptions(chosen.pool, date, chosen.devices, amount, not chosen.warm_files)
        if code := run(measure_costs(options, _tell)):
            return code
    if chains:
        find_split(splitting, chains, _tell)
    return 0


def _tell(line: str) -> None:
    print(line, flush=True)
