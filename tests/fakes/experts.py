"""Experts that fail as told, and tell what they were asked."""

import asyncio
from collections.abc import Sequence
from typing import Any

from shell_router.expert_pools import Costs, ExecutorSettings, Expert

COSTS = Costs(sample_s=0.01, batch_s=0.02, largest_batch=4, activation_bytes=10, host_load_s=0.1, disk_load_s=0.5)


def expert(name: str, usage: float = 0.1, after: tuple[str, ...] = (), memory_bytes: int = 100) -> Expert:
    """A small expert of the architecture that `executor` has costs for."""
    return Expert(name, "net", memory_bytes, usage, frozenset(after))


def executor(name: str = "gpu", room: int = 2, costs: Costs = COSTS, share: float = 0.5) -> ExecutorSettings:
    """Memory for `room` experts of 100 bytes, and for as much again of samples."""
    return ExecutorSettings(name, room * 200, {"net": costs}, expert_share=share)


class ScriptedExperts:
    """Loads take 0.5 s, batches 0.1 s. Outputs are the expert's name and the sample.

    `corrupt` experts do not load, `broken` ones load and fail on every batch.
    """

    def __init__(self, corrupt: Sequence[str] = (), broken: Sequence[str] = ()) -> None:
        self._corrupt = corrupt
        self._broken = broken
        self.loaded: set[tuple[str, str]] = set()
        self.loads: list[tuple[str, str]] = []
        self.batches: list[tuple[str, tuple[Any, ...]]] = []

    async def load(self, expert: Expert, place: str) -> None:
        await asyncio.sleep(0.5)
        if expert.name in self._corrupt:
            raise OSError("the file is cut off")
        self.loads.append((expert.name, place))
        self.loaded.add((expert.name, place))

    async def unload(self, expert: Expert, place: str) -> None:
        self.loaded.remove((expert.name, place))

    async def run(self, expert: Expert, place: str, samples: Sequence[Any]) -> Sequence[Any]:
        assert (expert.name, place) in self.loaded
        self.batches.append((expert.name, tuple(samples)))
        await asyncio.sleep(0.1)
        assert (expert.name, place) in self.loaded
        if expert.name in self._broken:
            raise ValueError("weights of another shape")
        return [(expert.name, sample) for sample in samples]
