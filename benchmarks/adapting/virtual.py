"""How long requests for loaded adapters should go first: one simulated server in virtual time, the router's own leases.

A step of its batch takes `STEP_S` and `REQUEST_S` for each request in it; a request takes as many steps as it writes
tokens. What is simulated is the server alone: leases, queue, eviction and draining are those that serve.
"""

import asyncio
from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np

from benchmarks.adapting.stream import Amount, Asked, stream
from benchmarks.report import Row
from shell_router.engines.adapters.leases import AdapterLeases
from shell_router.engines.adapters.settings import AdapterSettings
from shell_router.engines.task_owner import TaskOwner
from shell_router.expert_pools import Expert
from shell_router.expert_pools.bounds import fewest_switches_in_this_order
from shell_router.simulation.virtual_time import run_virtual

STEP_S, REQUEST_S, UNLOAD_S = 0.010, 0.002, 0.005
LOADS_S = (0.05, 0.5)
WINDOWS_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
EVICT = ("lru", "queue-aware")
SEEDS = 3


class VirtualServer:
    """Loads take `load_s`. `at_work` requests are in its batch."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s
        self.at_work = 0

    async def load(self, expert: Expert, place: str) -> None:
        """See `Loader`."""
        await asyncio.sleep(self._load_s)

    async def unload(self, expert: Expert, place: str) -> None:
        """See `Loader`."""
        await asyncio.sleep(UNLOAD_S)

    async def decode(self, tokens: int) -> None:
        """Return when so many are written."""
        self.at_work += 1
        for _ in range(tokens):
            await asyncio.sleep(STEP_S + REQUEST_S * self.at_work)
        self.at_work -= 1


def windows(amount: Amount) -> list[Row]:
    """One row per load time, order of eviction and window: means over the seeds."""
    rows = []
    for load_s in LOADS_S:
        for evict in EVICT:
            for window_s in WINDOWS_S:
                settings = AdapterSettings(room=amount.room, window_s=window_s, evict=evict, wait_s=1e6)
                runs = [_run(amount, settings, load_s, seed) for seed in range(SEEDS)]
                means = {key: fmean(run[key] for run in runs) for key in runs[0]}
                rows.append({"load_s": load_s, "evict": evict, "window_s": window_s, **means})
    return rows


def _run(amount: Amount, settings: AdapterSettings, load_s: float, seed: int) -> Row:
    asked = stream(amount, 1000, seed)

    async def whole() -> Row:
        now = asyncio.get_running_loop().time
        server = VirtualServer(load_s)
        leases = AdapterLeases("the server", server, settings, TaskOwner(), now)
        latencies_s: list[float] = []
        waiting = iter(asked)
        begun_s = now()
        await asyncio.gather(*(_client(leases, server, waiting, latencies_s) for _ in range(amount.clients)))
        return _row(asked, amount, leases.counts.loads, latencies_s, now() - begun_s)

    return run_virtual(whole())


async def _client(
    leases: AdapterLeases, server: VirtualServer, waiting: Iterator[Asked], latencies_s: list[float]
) -> None:
    now = asyncio.get_running_loop().time
    for one in waiting:
        asked_s = now()
        lease = await leases.lease(one.adapter)
        await server.decode(one.tokens)
        lease.close()
        latencies_s.append(now() - asked_s)


def _row(asked: Sequence[Asked], amount: Amount, loads: int, latencies_s: Sequence[float], elapsed_s: float) -> Row:
    order = [one.adapter for one in asked]
    return {
        "per_s": len(asked) / elapsed_s,
        **{f"p{share}_s": float(np.percentile(latencies_s, share)) for share in (50, 95, 99)},
        "loads": loads,
        "fewest_in_order": fewest_switches_in_this_order(order, (), dict.fromkeys(order, 1), amount.room),
    }
