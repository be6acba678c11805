"""The early-exit gate's embedding model that a deployment asks for."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from shell_router.config import EmbedderSettings
from shell_router.core.embedding import Embedder
from shell_router.engines.embedder import HashEmbedder, SentenceTransformerEmbedder
from shell_router.errors import EngineError

log = logging.getLogger(__name__)


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
    """A failed start is told here and again to each run that needs it; the next call tries once more."""
    try:
        await embedder.start()
    except EngineError as error:
        log.error("the embedder did not start, so no early exit: %s", error)


async def _always() -> bool:
    return True
