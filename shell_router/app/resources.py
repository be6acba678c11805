"""The Agent Prompt Cache and the embedder that a deployment asks for."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agent_cache import AgentPromptCache, Journals, MemoryAgentPromptCache
from shell_router.config import CacheSettings, EmbedderSettings
from shell_router.config.models import secret
from shell_router.core.predictors import Embedder
from shell_router.engines.embedding import HashEmbedder, SentenceTransformerEmbedder
from shell_router.errors import ConfigError, EngineError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningCache:
    """The logs, whether they can be shared now, and whether they are being served from memory instead.

    `journals` are None where nothing outlives the router.
    """

    logs: AgentPromptCache
    healthy: Callable[[], Awaitable[bool]]
    degraded: Callable[[], bool]
    journals: Journals | None = None


@asynccontextmanager
async def running_cache(
    settings: CacheSettings, clock: Callable[[], float], environ: Mapping[str, str] = os.environ
) -> AsyncIterator[RunningCache]:
    """The cache while the context is open. Raises ConfigError without redis-py, or the password, that it needs."""
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
    options = {"password": secret(settings.password, "cache.password", environ)}
    if tls := settings.tls:
        tls.context("cache.tls")  # redis-py would ask the terminal for the password of an encrypted key
        files = {"ssl_ca_certs": tls.ca, "ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
        options |= {name: str(path) for name, path in files.items() if path}
    async with RedisAgentPromptCache(
        settings.url,
        clock=clock,
        ttl_s=settings.ttl_s,
        prefix=settings.prefix,
        journal_ttl_s=settings.run_ttl_s,
        lease_s=settings.lease_s,
        options=options,
    ) as shared:
        yield RunningCache(shared, shared.healthy, lambda: shared.stats.degraded, shared.journals)


async def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class RunningEmbedder:
    """The embedder, None where there is none, and whether its start has ended, well or not."""

    embedder: Embedder | None
    loaded: Callable[[], Awaitable[bool]]


@asynccontextmanager
async def running_embedder(settings: EmbedderSettings) -> AsyncIterator[RunningEmbedder]:
    """The embedder while the context is open; its model loads in the background. Raises ConfigError."""
    if settings.model in ("none", "hash"):
        yield RunningEmbedder(HashEmbedder() if settings.model == "hash" else None, _always)
        return
    model = None if settings.model == "default" else settings.model
    embedder = SentenceTransformerEmbedder(model, device=settings.device)
    loading = asyncio.create_task(_load(embedder), name="embedder-load")

    async def loaded() -> bool:
        return loading.done()

    try:
        yield RunningEmbedder(embedder, loaded)
    finally:
        loading.cancel()
        await asyncio.wait({loading})
        await embedder.aclose()


async def _load(embedder: SentenceTransformerEmbedder) -> None:
    """Log a failed start; each run that needs the embedder reports it again, and tries again."""
    try:
        await embedder.start()
    except EngineError as error:
        log.error("the embedder did not start, so no early exit: %s", error)
