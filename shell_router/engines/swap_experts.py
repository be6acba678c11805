"""Experts that are checkpoints of one shape, whose weights take turns on SGLang servers that keep running."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shell_router.engines.checkpoints import TensorShape, read_tensors
from shell_router.engines.prompted import Generates, generate_all, refuse_host_memory
from shell_router.engines.weight_swapping import WeightServer
from shell_router.errors import ConfigError, ExpertFailed
from shell_router.expert_pools.values import Costs, ExecutorSettings, Expert

log = logging.getLogger(__name__)

SLOT_BYTES = 1
"""What an expert counts for: a server holds the weights of one, whatever their bytes."""


@dataclass(frozen=True, slots=True)
class SwapPlace:
    """What one executor swaps weights on: a server, or the two of a pair, and the engine that asks them.

    Nobody else may ask them: what another asks is answered by whichever expert is there. `expert` is the one that they
    were started with, if it is one.
    """

    servers: tuple[WeightServer, ...]
    engine: Generates
    expert: str | None = None


def swapped_expert(name: str, architecture: str, usage: float = 0.0, after: frozenset[str] = frozenset()) -> Expert:
    """An expert whose weights are swapped. It takes the server's only slot."""
    return Expert(name, architecture, SLOT_BYTES, usage, after)


def swap_executor(name: str, costs: Mapping[str, Costs]) -> ExecutorSettings:
    """An executor of one server or pair, with room for one expert. Raises ConfigError for costs that count bytes.

    The KV is the server's own, reserved at its start, so that samples take nothing from the pool's memory.
    """
    if counted := [architecture for architecture, one in costs.items() if one.activation_bytes]:
        raise ConfigError(
            f"The costs of {counted[0]} on {name} have activation_bytes.", remedy="Give 0: the server reserves its KV."
        )
    return ExecutorSettings(name, SLOT_BYTES, costs, expert_share=1.0)


class SwapExperts:
    """Meets `expert_pools.Experts`. A sample is a `Prompt`, an output a `Generated`.

    `folder_of` names an expert's checkpoint, which lies at the same path on the servers' machines; all have tensors of
    the same names, types and sizes. There is no host tier. Unloading leaves the weights where they are, until others
    take their place: an expert that comes back in between needs no swap.
    """

    def __init__(self, folder_of: Callable[[str], Path], places: Mapping[str, SwapPlace]) -> None:
        self._folder_of = folder_of
        self._places = places
        self._holds: dict[str, str | None] = {name: place.expert for name, place in places.items()}
        self._loaded: dict[str, str] = {}
        self._swapped_in: dict[str, Path] = {}
        self._shapes: dict[str, Mapping[str, TensorShape]] = {}

    async def load(self, expert: Expert, place: str) -> None:
        """Have all servers of the place read the weights, and drop the KV of those before.

        Raises ConfigError for a checkpoint that is missing, cut off or of another shape: servers are not asked then,
        and go on with what they had. (SGLang 0.5.23 ends where it is asked for one that it cannot read to the end.)
        Raises EngineError where a server fails; then nothing is known of what it holds, and the next load sets it.
        """
        refuse_host_memory(place)
        if other := self._loaded.get(place):
            raise ConfigError(
                f"{place} holds {other} already, and one at a time.", remedy="Make its executor with swap_executor."
            )
        if self._holds[place] != expert.name:
            await self._swap(expert.name, place)
        self._loaded[place] = expert.name

    async def _swap(self, name: str, place: str) -> None:
        folder, servers = self._folder_of(name), self._places[place].servers
        await self._check(folder, place)
        self._holds[place] = None
        outcomes = await asyncio.gather(*(server.swap(folder) for server in servers), return_exceptions=True)
        if failed := [one for one in outcomes if isinstance(one, BaseException)]:
            raise failed[0]
        self._holds[place], self._swapped_in[place] = name, folder

    async def _has(self, name: str, place: str) -> bool:
        """Whether its servers have these weights still: one that was started again has those of its start."""
        folder = self._swapped_in.get(place)
        if self._holds[place] == name and folder is not None:
            served = await asyncio.gather(*(server.model_path() for server in self._places[place].servers))
            return all(path == folder for path in served)
        return self._holds[place] == name

    async def _check(self, folder: Path, place: str) -> None:
        found = await asyncio.to_thread(read_tensors, folder)
        wanted = self._shapes.get(place)
        if wanted is None:
            served = await self._places[place].servers[0].model_path()
            wanted = self._shapes[place] = await asyncio.to_thread(read_tensors, served)
        if found != wanted:
            other = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
            raise ConfigError(
                f"{folder} is of another shape than {place} serves: {len(other)} tensors differ, {other[0]} first.",
                remedy="Swap checkpoints of one architecture and one type of numbers.",
            )

    async def unload(self, expert: Expert, place: str) -> None:
        """At once: see above."""
        del self._loaded[place]

    async def run(self, expert: Expert, place: str, samples: Sequence[Any]) -> Sequence[Any]:
        """One `Generated` per `Prompt`; one that the engine refuses has an ExpertFailed in its place.

        Servers that have lost the weights get them again. Raises ExpertFailed where they lose them meanwhile, and
        EngineError where a server fails.
        """
        if not await self._has(expert.name, place):
            log.warning("%s has not the weights of %s any more: they are swapped in again", place, expert.name)
            await self._swap(expert.name, place)
        outputs = await generate_all(self._places[place].engine, expert, samples)
        if not await self._has(expert.name, place):
            raise ExpertFailed(f"{place} lost the weights of {expert.name} while it answered.", remedy="Ask again.")
        return outputs
