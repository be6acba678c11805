"""What a pool needs of whoever holds the real experts."""

from collections.abc import Sequence
from typing import Any, Protocol

from shell_router.expert_pools.values import Expert


class Loader(Protocol):
    """Loads and unloads experts at places. It is asked for one load at a time per place."""

    async def load(self, expert: Expert, place: str) -> None:
        """Weights into a place's memory: from host memory where they are loaded there, from disk otherwise.

        A load that raises, or is cancelled, leaves nothing behind.
        """
        ...

    async def unload(self, expert: Expert, place: str) -> None:
        """Give the memory back. What this raises is logged, and costs nobody anything."""
        ...


class Experts(Loader, Protocol):
    """Loads, unloads and runs experts at places: an executor's name, or `Tier.HOST` for host memory.

    A pool calls nothing for an expert at a place where it is not loaded, but `load`. Whatever `load` and `run` raise
    costs the requests for that expert, and nobody else.
    """

    async def run(self, expert: Expert, place: str, samples: Sequence[Any]) -> Sequence[Any]:
        """One output per sample, in their order; an ExpertError in the place of one fails that request alone."""
        ...
