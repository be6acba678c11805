"""500 requests at once, a day of faults in virtual time, and a real hour at night: nothing may be
left.
"""

import asyncio
import gc
import random
import sys
import tracemalloc
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from agent_cache import AgentPromptCache
from agent_cache.memory import MemoryAgentPromptCache
from agent_cache.redis import RedisAgentPromptCache
from shell_router.core.engine import Finish, Generation, ServedModel, Tokens
from shell_router.core.events import Event
from shell_router.errors import EngineStalled, EngineUnreachable, ShellRouterError
from shell_router.lab.simulation.run import SimulatedFleet
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.moa.executor import Executor
from shell_router.moa.programs import Programs
from shell_router.moa.registry import ProgramLimits
from shell_router.moa.requests import AgentRequest, Answer, OutputOf
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.queue import QueueSettings
from shell_router.standins.simulated.costs import DecodeCosts, PairCosts, PrefillCosts
from shell_router.standins.simulated.pair import SimulatedPair
from shell_router.standins.simulated.text import SimulatedEmbedder, SimulatedTokenizer, Written
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


def list_lasting_tasks() -> set[asyncio.Task[object]]:
    """Return all tasks but the one that renews a lease, which comes and goes with open logs."""
    return {task for task in asyncio.all_tasks() if task.get_name() != "agent-cache-lease"}


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
        tasks, memory = list_lasting_tasks(), used_bytes()
        answered, cancelled = await soak(executor, range(100, 100 + REQUESTS), draws)
        assert answered + cancelled == REQUESTS
        assert cancelled > REQUESTS / 6  # of those meant to be cancelled some had ended before
        assert list_lasting_tasks() == tasks
        assert not moa.running
        assert await count_keys() == 0
        assert used_bytes() - memory < 2**20


def used_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


# --- a day

HOUR_S = 3_600.0
COSTS = PairCosts(
    PrefillCosts(0.01, 1e-5, cache_tokens=4_000),
    DecodeCosts(0.02, 1e-4, cache_tokens=20_000, reserved_tokens=64),
)


class FaultyPair(SimulatedPair):
    """It is away for five minutes of each hour, from `away_s` on. Otherwise some requests break off
    or fall silent.
    """

    def __init__(self, draws: random.Random, away_s: float) -> None:
        super().__init__(COSTS, self._written)
        self._draws = draws
        self._away_s = away_s
        self.asked = 0

    def _written(self, request: Generation) -> Written:
        return Written.after_filler(self._draws.randrange(20, 60), request.rid, " Answer: 1.", -0.1)

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        self.asked += 1
        if 0 <= asyncio.get_running_loop().time() % HOUR_S - self._away_s < 300:
            raise EngineUnreachable("away", remedy="Wait.")
        fate, left = self._draws.random(), self._draws.randrange(8)
        async with aclosing(super().generate(request)) as stream:
            async for event in stream:
                if fate < 0.01 and not left:
                    raise EngineStalled("broke off", remedy="Ask again.")
                if fate > 0.998 and not left:
                    await asyncio.Event().wait()
                left -= 1
                yield event


@dataclass
class Day:
    """Requests of a day, of many tenants; a fifth of the clients may leave early."""

    draws: random.Random
    executor: Executor
    programs: Programs
    outcomes: Counter[str] = field(default_factory=Counter)
    blocks: list[int] = field(default_factory=list)
    """Of memory, at the end of each hour, when nothing runs and the hour's programs are forgotten.
    """

    async def pass_by(self) -> None:
        loop, number = asyncio.get_running_loop(), 0
        for hour in range(1, 25):
            async with asyncio.TaskGroup() as group:
                while (now_s := loop.time()) < hour * HOUR_S - 700:
                    busy = (
                        0 <= now_s % HOUR_S - 600 < 40
                    )  # more than the engines and the queue take
                    await asyncio.sleep(self.draws.expovariate(4 if busy else 1 / 60))
                    group.create_task(self._client(number))
                    number += 1
            assert loop.time() <= hour * HOUR_S, "no request takes longer than it may"
            await asyncio.sleep(hour * HOUR_S - loop.time())
            await self._client(0)  # a new program has the old ones forgotten
            gc.collect()
            self.blocks.append(sys.getallocatedblocks())

    async def _client(self, number: int) -> None:
        asking = asyncio.gather(
            *(self._tree(number) if number % 2 else self._program(number)), return_exceptions=True
        )
        await asyncio.wait(
            [asking], timeout=self.draws.uniform(0, 10) if self.draws.random() < 0.2 else None
        )
        if not asking.done():
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            self.outcomes["left"] += 1
            return
        for ended in asking.result():
            assert isinstance(ended, Answer | ShellRouterError), ended
            self.outcomes[type(ended).__name__] += 1

    def _tree(self, number: int) -> Iterator[Coroutine[Any, Any, Answer]]:
        question = ask(f"{number}?", run_id=f"run{number}", seed=number, timeout_s=60.0)
        yield self.executor.run(
            TREE, replace(question, tenant=f"tenant{number % 100}"), lambda _: None
        )

    def _program(self, number: int) -> Iterator[Coroutine[Any, Any, Answer]]:
        """An agent's reader, then the agent, which now and then never comes."""
        asked = AgentRequest(
            f"tenant{number % 100}",
            f"p{number}",
            "writer",
            "small",
            (f"{number}?",),
            timeout_s=60.0,
        )
        reader = replace(
            asked,
            agent="reader",
            model="large",
            prompt=("Judge: ", OutputOf("writer")),
            wait_s=30.0,
        )
        yield self.programs.run(reader, lambda _: None)
        if number % 20:
            yield self.programs.run(asked, lambda _: None)


@pytest.mark.slow
def test_a_day_of_faults_and_bursts_leaves_nothing() -> None:
    async def a_day() -> tuple[Day, int]:
        loop, draws = asyncio.get_running_loop(), random.Random(24)
        scheduling = SchedulingSettings(
            queue=QueueSettings("least_attained", max_running=8, max_waiting=24)
        )
        fleets = {
            alias: SimulatedFleet(
                alias, [FaultyPair(draws, away_s) for away_s in (1000.0, 1200.0)], scheduling
            )
            for alias in ("small", "medium", "large")
        }
        models = {
            alias: ServedModel(alias, one, SimulatedTokenizer(), 32_768)
            for alias, one in fleets.items()
        }
        embedder = SimulatedEmbedder(0.9, 0.3, 0.001)
        async with MemoryAgentPromptCache(clock=loop.time) as cache:
            executor = Executor(models, cache, embedder, clock=loop.time)
            day = Day(
                draws,
                executor,
                Programs(executor, ProgramLimits(ttl_s=300.0)),
            )
            tasks = asyncio.all_tasks()
            await day.pass_by()
            assert asyncio.all_tasks() == tasks
            assert len(cache) <= 2, "more than the last program's logs"
            pairs = [pair for fleet in fleets.values() for pair in fleet.pairs]
            assert {pair.decoding.requests for pair in pairs} == {(0, 0)}
            return day, sum(pair.asked for pair in pairs if isinstance(pair, FaultyPair))

    day, asked = run_virtual(a_day())
    assert day.outcomes["Answer"] > 1000
    # dispatchers keep where the last 65,536 growing prompts went, in a few blocks each
    assert day.blocks[-1] - day.blocks[11] < 3 * asked, (asked, day.outcomes, day.blocks)
