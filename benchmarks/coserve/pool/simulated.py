"""Components whose work takes the seconds that their costs say, on processors and a disk that
executors share.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.coserve.pool.values import Component, ExecutorSettings, Tier
from shell_router.standins.simulated.processor import Processor


class SimulatedComponents:
    """Meets `values.Components`. Outputs are what `answer` gives for a component's name and a
    sample.

    `processor_of` names each executor's processor: executors of one share it evenly while they run
    batches. A load from disk occupies the only disk for `disk_load_s` - `host_load_s`, one after
    the other, and then nothing that is shared.
    """

    def __init__(
        self,
        executors: Sequence[ExecutorSettings],
        processor_of: Mapping[str, str],
        answer: Callable[[str, Any], Any] = lambda _, sample: sample,
    ) -> None:
        self._settings = {executor.name: executor for executor in executors}
        processors = {name: Processor() for name in set(processor_of.values())}
        self._processor = {
            executor.name: processors[processor_of[executor.name]] for executor in executors
        }
        self._answer = answer
        self._disk = asyncio.Lock()
        self._in_host: set[str] = set()

    async def load(self, component: Component, place: str) -> None:
        """From disk, where host memory does not hold it, and on to the executor."""
        if component.name not in self._in_host:
            async with self._disk:
                await asyncio.sleep(self._read_s(component, place))
        if place == Tier.HOST:
            self._in_host.add(component.name)
        else:
            await asyncio.sleep(self._settings[place].costs[component.architecture].host_load_s)

    async def unload(self, component: Component, place: str) -> None:
        """At once."""
        if place == Tier.HOST:
            self._in_host.discard(component.name)

    async def run(self, component: Component, place: str, samples: Sequence[Any]) -> Sequence[Any]:
        """K * n + B of the processor's time."""
        await self._processor[place].work(
            self._settings[place].costs[component.architecture].batch_seconds(len(samples))
        )
        return [self._answer(component.name, sample) for sample in samples]

    def _read_s(self, component: Component, place: str) -> float:
        """Of the disk alone; into host memory, the same for every executor that will load it from
        there.
        """
        known = (self._settings.values()) if (place == Tier.HOST) else ([self._settings[place]])
        costs = [
            one.costs[component.architecture]
            for one in known
            if component.architecture in one.costs
        ]
        return min(one.disk_load_s - one.host_load_s for one in costs)
