"""What a pool loads before its first request (CoServe, section 4.1), and that nothing is left after its last."""

import asyncio
import logging
from collections.abc import Collection, Sequence

from shell_router.errors import ExpertFailed
from shell_router.expert_pools.executor import Executor
from shell_router.expert_pools.host import HostTier
from shell_router.expert_pools.placing import host_placement, initial_placement
from shell_router.expert_pools.values import Expert

log = logging.getLogger(__name__)


async def fill(catalogue: Collection[Expert], executors: Sequence[Executor], host: HostTier, host_bytes: int) -> None:
    """Load the most probable experts, the next ones into host memory; one that fails is left out, with a warning."""
    placed = initial_placement(catalogue, [executor.settings for executor in executors])
    await asyncio.gather(*(_fill_executor(executor, placed[executor.settings.name]) for executor in executors))
    elsewhere = frozenset(expert.name for experts in placed.values() for expert in experts)
    for expert in host_placement(catalogue, host_bytes, elsewhere):
        try:
            async with host.through(expert):
                pass
        except Exception as error:
            log.warning("%s could not be read (%s). The pool starts without it.", expert.name, error)


async def _fill_executor(executor: Executor, experts: Sequence[Expert]) -> None:
    for expert in experts:
        try:
            await executor.bring(expert, told=False)
        except ExpertFailed as error:
            log.warning("%s The pool starts without it.", error)


async def empty(executors: Sequence[Executor], host: HostTier) -> None:
    """Unload everything, wherever it is."""
    for shelf in (*(executor.shelf for executor in executors), host.shelf):
        for name in tuple(shelf):
            await shelf.drop(name)
