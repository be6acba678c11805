"""The Agent Prompt Cache that a deployment asks for."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agent_cache import AgentPromptCache, MemoryAgentPromptCache
from shell_router.config import CacheSettings
from shell_router.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunningCache:
    """The logs, whether they can be shared now, and whether they are being served from memory instead."""

    logs: AgentPromptCache
    healthy: Callable[[], Awaitable[bool]]
    degraded: Callable[[], bool]


@asynccontextmanager
async def running_cache(settings: CacheSettings, clock: Callable[[], float]) -> AsyncIterator[RunningCache]:
    """The cache while the context is open. Raises ConfigError without redis-py where it is needed."""
    if settings.backend == "memory":
        async with MemoryAgentPromptCache(clock=clock, ttl_s=settings.ttl_s) as logs:
            yield RunningCache(logs, healthy=_always, degraded=lambda: False)
        return
    try:
        from agent_cache.redis import RedisAgentPromptCache  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            "cache.backend is redis, and redis-py is not installed.", remedy="pip install 'shell-router[redis]'"
        ) from error
    async with RedisAgentPromptCache(settings.url, clock=clock, ttl_s=settings.ttl_s) as shared:
        yield RunningCache(shared, healthy=shared.healthy, degraded=lambda: shared.stats.degraded)


async def _always() -> bool:
    return True
