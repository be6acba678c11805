"""Components that fail as a test says."""

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.coserve.pool import Component, Costs, ExecutorSettings

COSTS = Costs(
    sample_s=0.01,
    batch_s=0.02,
    largest_batch=4,
    activation_bytes=10,
    host_load_s=0.1,
    disk_load_s=0.5,
)


def component(
    name: str, usage: float = 0.1, after: tuple[str, ...] = (), memory_bytes: int = 100
) -> Component:
    """A small component of the architecture that `executor` has costs for."""
    return Component(name, "net", memory_bytes, usage, frozenset(after))


def executor(
    name: str = "gpu", room: int = 2, costs: Costs = COSTS, share: float = 0.5
) -> ExecutorSettings:
    """Memory for `room` components of 100 bytes, and for as much again of samples."""
    return ExecutorSettings(name, room * 200, {"net": costs}, component_share=share)


class ScriptedExperts:
    """Loads take 0.5 s, batches 0.1 s. Outputs are the component's name and the sample.

    `corrupt` components do not load, `broken` ones load and fail on every batch.
    """

    def __init__(self, corrupt: Sequence[str] = (), broken: Sequence[str] = ()) -> None:
        self._corrupt = corrupt
        self._broken = broken
        self.loaded: set[tuple[str, str]] = set()
        self.loads: list[tuple[str, str]] = []
        self.batches: list[tuple[str, tuple[Any, ...]]] = []

    async def load(self, component: Component, place: str) -> None:
        await asyncio.sleep(0.5)
        if component.name in self._corrupt:
            raise OSError("the file is cut off")
        self.loads.append((component.name, place))
        self.loaded.add((component.name, place))

    async def unload(self, component: Component, place: str) -> None:
        self.loaded.remove((component.name, place))

    async def run(self, component: Component, place: str, samples: Sequence[Any]) -> Sequence[Any]:
        assert (component.name, place) in self.loaded
        self.batches.append((component.name, tuple(samples)))
        await asyncio.sleep(0.1)
        assert (component.name, place) in self.loaded
        if component.name in self._broken:
            raise ValueError("weights of another shape")
        return [(component.name, sample) for sample in samples]
