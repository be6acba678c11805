"""500 requests at concurrency 32, a third of them cancelled at random moments: nothing may be left."""

import asyncio
import gc
import random
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic

import pytest

from agent_cache import AgentPromptCache
from agent_cache.memory import MemoryAgentPromptCache
from agent_cache.redis import RedisAgentPromptCache
from shell_router.core.events import Event
from shell_router.moa.executor import Executor
from shell_router.topology.load import load_topology
from tests.fakes.moa import ScriptedMoa, ask
from tests.fakes.redis_server import own_redis

TREE = load_topology(Path("topologies/tree-9-3-1.yaml"))
REQUESTS, CONCURRENCY = 500, 32

CountKeys = Callable[[], Awaitable[int]]


@asynccontextmanager
async def memory_cache() -> AsyncIterator[tuple[AgentPromptCache, CountKeys]]:
    cache = MemoryAgentPromptCache(clock=monotonic)

    async def keys() -> int:
        return len(cache)

    yield cache, keys


@asynccontextmanager
async def redis_cache() -> AsyncIterator[tuple[AgentPromptCache, CountKeys]]:
    with contextmanager(own_redis)() as server:
        cache = RedisAgentPromptCache(server.url, clock=monotonic)

        async def keys() -> int:
            assert await cache.flush(limit_s=10.0)
            return len(server.keys()) + len(cache)

        async with cache:
            yield cache, keys


class CancelAfter:
    """Cancels a run after `events` events."""

    def __init__(self, events: int) -> None:
        self._left = events
        self.task: asyncio.Task[object] | None = None

    def emit(self, _event: Event) -> None:
        self._left -= 1
        if self._left == 0 and self.task:
            self.task.cancel()


async def soak(executor: Executor, requests: range, draws: random.Random) -> tuple[int, int]:
    """Answered and cancelled requests."""
    room, outcomes = asyncio.Semaphore(CONCURRENCY), [0, 0]

    async def one(number: int) -> None:
        cancel = CancelAfter(draws.randrange(1, 60) if number % 3 == 0 else -1)
        async with room:
            request = ask(f"Question {number}?", run_id=f"run{number}", seed=number)
            cancel.task = asyncio.create_task(executor.run(TREE, request, cancel.emit))
            done, _ = await asyncio.wait([cancel.task])
            outcomes[done.pop().cancelled()] += 1

    await asyncio.gather(*(one(number) for number in requests))
    return outcomes[0], outcomes[1]


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("backend", [memory_cache, redis_cache])
async def test_a_soak_with_cancellations_leaves_nothing(
    backend: Callable[[], AbstractAsyncContextManager[tuple[AgentPromptCache, CountKeys]]],
) -> None:
    moa, draws = ScriptedMoa(kept_requests=0, cached_tokens=1_000), random.Random(7)
    async with backend() as (cache, count_keys):
        executor = Executor(moa.models, cache, moa.embedder, clock=monotonic)
        await soak(executor, range(100), draws)
        tasks, memory = asyncio.all_tasks(), used_bytes()
        answered, cancelled = await soak(executor, range(100, 100 + REQUESTS), draws)
        assert answered + cancelled == REQUESTS
        assert cancelled > REQUESTS / 6  # of those meant to be cancelled some had ended before
        assert asyncio.all_tasks() == tasks
        assert not moa.running
        assert await count_keys() == 0
        assert used_bytes() - memory < 2**20


def used_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]
