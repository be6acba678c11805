"""The Agent Prompt Cache of a single process."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from agent_cache.log import Writer
from agent_cache.protocol import LogKey, LogRead, LogWriter
from agent_cache.shelf import LogShelf


class MemoryAgentPromptCache:
    """An `AgentPromptCache` in this process's memory: no network, no background task.

    `clock` returns monotonic seconds. Logs expire `ttl_s` after their last write. `len` counts the logs held.
    """

    def __init__(self, *, clock: Callable[[], float], ttl_s: float = 3600.0) -> None:
        self._shelf = LogShelf(clock=clock, ttl_s=ttl_s)

    def __len__(self) -> int:
        return len(self._shelf)

    async def create(self, key: LogKey) -> LogWriter:
        log = self._shelf.begin(key)
        return Writer(log, lambda: self._shelf.touch(log))

    async def read(self, key: LogKey, position: int = 0, *, at_least: int = 1, wait_s: float) -> LogRead:
        return await self._shelf.read(key, position, at_least=at_least, wait_s=wait_s)

    async def forget(self, tenant: str, program: str) -> None:
        self._shelf.forget(tenant, program)

    async def close(self) -> None:
        """Forget everything."""
        self._shelf.forget_all()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
