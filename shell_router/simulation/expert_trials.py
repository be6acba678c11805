"""An expert pool that exists as figures only, tried on sample requests in virtual time."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shell_router.engines.simulated.experts import SimulatedExperts
from shell_router.expert_pools import ExecutorSettings, Expert, ExpertPool, Policies, Request
from shell_router.simulation.virtual_time import run_virtual

INSTANT_S = 1e-9
"""Of a pool whose costs are all 0."""


@dataclass(frozen=True, slots=True)
class ExpertTrials:
    """What is tried: `chains`, one each `every_s` seconds, all that a pool is but its executors.

    `device_of` names each executor's device; executors of one share its processor.
    """

    catalogue: Sequence[Expert]
    device_of: Mapping[str, str]
    chains: Sequence[tuple[str, ...]]
    policies: Policies
    host_bytes: int = 0
    every_s: float = 0.0

    def throughput(self, executors: Sequence[ExecutorSettings]) -> float:
        """Requests a second, until the last is answered, of a pool that begins with its most probable experts."""
        return len(self.chains) / max(INSTANT_S, run_virtual(self._seconds(executors)))

    async def _seconds(self, executors: Sequence[ExecutorSettings]) -> float:
        loop, experts = asyncio.get_running_loop(), SimulatedExperts(executors, self.device_of)
        async with ExpertPool(self.catalogue, executors, experts, self.policies, host_bytes=self.host_bytes) as pool:
            begun_s = loop.time()
            async with asyncio.TaskGroup() as tasks:
                for number, chain in enumerate(self.chains):
                    tasks.create_task(pool.ask(Request(str(number), chain)))
                    await asyncio.sleep(self.every_s)
            return loop.time() - begun_s
