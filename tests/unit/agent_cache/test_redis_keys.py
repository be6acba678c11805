"""What lies in Redis, read without the cache."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from agent_cache import CacheError, CacheUnavailable, Chunk, End, LogKey, LogRead, LogTimeout
from agent_cache.redis import RedisAgentPromptCache
from tests.fakes.redis_server import RedisServer

KEY = LogKey("tenant", "program", "agent")
LIMIT_S = 20.0


async def turn() -> None:
    await asyncio.sleep(0)


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_every_key_expires_and_writes_renew_it(server: RedisServer) -> None:
    clock = Clock()
    async with RedisAgentPromptCache(server.url, clock=clock, ttl_s=160) as cache:
        log = await cache.create(KEY)
        assert len(server.keys()) == 2
        writes: list[Callable[[], None]] = [
            lambda: log.append(Chunk("a")),
            lambda: log.end(End.FINISHED),
        ]
        for write in writes:
            for name in list(server.keys()):
                server.ask("PEXPIRE", name, 50_000)
            clock.now_s += 10
            write()
            assert await cache.flush(limit_s=LIMIT_S)
            assert all(160_000 < ttl_ms <= 170_000 for ttl_ms in server.keys().values())


async def test_frequent_writes_renew_the_time_to_live_only_now_and_then(
    server: RedisServer,
) -> None:
    clock = Clock()
    async with RedisAgentPromptCache(server.url, clock=clock, ttl_s=160) as cache:
        log = await cache.create(KEY)
        for _ in range(100):
            clock.now_s += 1
            log.append(Chunk("a"))
            assert await cache.flush(limit_s=LIMIT_S)
        statistics = server.ask("INFO", "commandstats")
        assert isinstance(statistics, dict)
        assert statistics["cmdstat_pexpire"]["calls"] == 2 * (1 + 10)


async def test_a_reader_that_wants_all_of_a_log_begun_here_leaves_redis_alone(
    server: RedisServer,
) -> None:
    async with (
        RedisAgentPromptCache(server.url, clock=time.monotonic) as cache,
        asyncio.TaskGroup() as group,
    ):
        reading = group.create_task(cache.read(KEY, at_least=1000, wait_s=LIMIT_S))
        while server.blocked_readers() < 1:
            await turn()
        log = await cache.create(KEY)
        log.append(Chunk("first ", (1,)))
        while server.blocked_readers():
            await turn()
        for name in list(server.keys()):
            server.ask("UNLINK", name)
        log.append(Chunk("second", (2,)))
        log.end(End.FINISHED)
        assert await reading == LogRead("first second", (1, 2), 2, End.FINISHED)


async def test_nothing_is_left_once_all_programs_are_forgotten(server: RedisServer) -> None:
    async with (
        RedisAgentPromptCache(server.url, clock=time.monotonic) as one,
        RedisAgentPromptCache(server.url, clock=time.monotonic) as other,
    ):
        for number in range(20):
            for cache, agent in ((one, "a"), (other, "b")):
                log = await cache.create(LogKey("tenant", f"p{number}", agent))
                log.append(Chunk("a"))
        await asyncio.gather(*(one.forget("tenant", f"p{number}") for number in range(20)))
        assert await other.flush(limit_s=LIMIT_S)
        assert server.keys() == {}
        assert len(one) == 0


async def test_a_deletion_wakes_a_blocked_reader_and_does_not_wait_until_it_looks_again(
    server: RedisServer,
) -> None:
    async with (
        RedisAgentPromptCache(server.url, clock=time.monotonic) as writer,
        RedisAgentPromptCache(server.url, clock=time.monotonic) as reader,
        asyncio.TaskGroup() as group,
    ):
        log = await writer.create(KEY)
        log.append(Chunk("a"))
        assert await writer.flush(limit_s=LIMIT_S)
        reading = group.create_task(reader.read(KEY, 1, wait_s=LIMIT_S))
        while not server.blocked_readers():
            await turn()
        await writer.forget("tenant", "program")
        assert (await reading).end is End.ABORTED
        statistics = server.ask("INFO", "commandstats")
        assert isinstance(statistics, dict)
        assert statistics["cmdstat_xread"]["calls"] == 1
        assert "cmdstat_exists" not in statistics


async def test_closing_publishes_what_waits(server: RedisServer) -> None:
    async with RedisAgentPromptCache(server.url, clock=time.monotonic) as writer:
        log = await writer.create(KEY)
        log.append(Chunk("a"))
        log.end(End.FINISHED)
    async with RedisAgentPromptCache(server.url, clock=time.monotonic) as reader:
        read = await reader.read(KEY, wait_s=LIMIT_S)
    assert (read.text, read.end) == ("a", End.FINISHED)


@pytest.mark.parametrize(("chunks", "entries"), [(200, 2), (1000, 5)])
async def test_chunks_that_wait_together_become_one_entry_of_limited_size(
    server: RedisServer, chunks: int, entries: int
) -> None:
    async with RedisAgentPromptCache(server.url, clock=time.monotonic) as cache:
        log = await cache.create(KEY)
        for token in range(chunks):
            log.append(Chunk("a", (token,)))
        assert await cache.flush(limit_s=LIMIT_S)
        assert server.ask("XLEN", "agent-prompt-cache:{tenant:program}:log:agent") == entries
        assert cache.stats.published == entries


async def test_a_read_of_a_log_of_this_process_asks_redis_nothing(server: RedisServer) -> None:
    async with RedisAgentPromptCache(server.url, clock=time.monotonic) as cache:
        log = await cache.create(KEY)
        for token in range(10):
            log.append(Chunk("a", (token,)))
            await cache.read(KEY, token, wait_s=LIMIT_S)
        assert await cache.flush(limit_s=LIMIT_S)
        calls = str(server.ask("INFO", "commandstats"))
    assert "xadd" in calls
    assert "xread" not in calls


async def test_deployments_with_different_prefixes_do_not_meet(server: RedisServer) -> None:
    async with (
        RedisAgentPromptCache(server.url, clock=time.monotonic, prefix="one") as one,
        RedisAgentPromptCache(server.url, clock=time.monotonic, prefix="two") as two,
    ):
        await one.create(KEY)
        await two.create(KEY)
        assert len(server.keys()) == 4


@pytest.mark.parametrize("option", ["decode_responses=true", "protocol=3"])
async def test_a_url_that_changes_what_replies_look_like_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match="leave them out"):
        RedisAgentPromptCache(f"redis://localhost?{option}", clock=time.monotonic)


async def test_a_closed_cache_says_so(server: RedisServer) -> None:
    async with RedisAgentPromptCache(server.url, clock=time.monotonic) as cache:
        log = await cache.create(KEY)
    log.append(Chunk("ignored"))
    await cache.close()
    with pytest.raises(CacheError, match="closed"):
        await cache.create(KEY)


async def test_a_log_that_redis_dropped_goes_on_in_its_own_process(server: RedisServer) -> None:
    async with RedisAgentPromptCache(server.url, clock=time.monotonic) as cache:
        log = await cache.create(KEY)
        server.ask("FLUSHALL")
        log.append(Chunk("a"))
        log.end(End.FINISHED)
        assert await cache.flush(limit_s=LIMIT_S)
        assert (await cache.read(KEY, wait_s=0)).end is End.FINISHED
        assert cache.stats.withdrawn == 1
        assert not cache.stats.degraded
        assert server.ask("EXISTS", "agent-prompt-cache:{tenant:program}:log:agent") == 0


LOG, AGENTS = "agent-prompt-cache:{tenant:bad}:log:agent", "agent-prompt-cache:{tenant:bad}:agents"
BAD = LogKey("tenant", "bad", "agent")


@asynccontextmanager
async def writer_and_reader(
    server: RedisServer,
) -> AsyncIterator[tuple[RedisAgentPromptCache, RedisAgentPromptCache]]:
    async with (
        RedisAgentPromptCache(server.url, clock=time.monotonic) as writer,
        RedisAgentPromptCache(server.url, clock=time.monotonic) as reader,
    ):
        yield writer, reader


async def of_the_others(writer: RedisAgentPromptCache, reader: RedisAgentPromptCache) -> str:
    """What another process reads of a program that is none of the bad one's business."""
    log = await writer.create(KEY)
    log.append(Chunk("shared"))
    assert await writer.flush(limit_s=LIMIT_S)
    return (await reader.read(KEY, wait_s=LIMIT_S)).text


@pytest.mark.parametrize("name", [LOG, AGENTS])
async def test_a_key_of_another_kind_ends_the_sharing_of_its_own_program_alone(
    server: RedisServer, name: str
) -> None:
    async with writer_and_reader(server) as (writer, reader):
        server.ask("SET", name, "w")
        log = await writer.create(BAD)
        log.append(Chunk("a"))
        log.end(End.FINISHED)
        assert await of_the_others(writer, reader) == "shared"
        assert (await writer.read(BAD, wait_s=0)).text == "a"
        assert (writer.stats.degraded, writer.stats.withdrawn) == (False, 1)
        await writer.forget("tenant", "bad")
        assert not server.ask("EXISTS", name)


@pytest.mark.parametrize("odd", [("SET", LOG, "w"), ("XADD", LOG, "9999-9", "x", "y")])
async def test_a_log_that_is_spoiled_while_it_is_written_goes_on_in_its_own_process(
    server: RedisServer, odd: tuple[str, ...]
) -> None:
    async with writer_and_reader(server) as (writer, reader):
        log = await writer.create(BAD)
        server.ask(*odd)
        log.append(Chunk("a"))
        log.end(End.FINISHED)
        assert await of_the_others(writer, reader) == "shared"
        assert (await writer.read(BAD, wait_s=0)).end is End.FINISHED
        assert (writer.stats.degraded, writer.stats.withdrawn) == (False, 1)


async def test_a_key_of_another_kind_is_no_obstacle_after_an_outage(server: RedisServer) -> None:
    async with writer_and_reader(server) as (writer, reader):
        await writer.create(BAD)
        server.kill()
        (await writer.create(LogKey("tenant", "bad", "second"))).append(Chunk("a"))
        while not writer.stats.degraded:
            await turn()
        server.start()
        server.ask("SET", LOG, "w")
        assert await writer.flush(limit_s=LIMIT_S)
        assert await of_the_others(writer, reader) == "shared"
        assert (writer.stats.degraded, writer.stats.withdrawn) == (False, 1)


async def test_a_reader_of_what_is_no_log_hears_so_at_once(server: RedisServer) -> None:
    async with writer_and_reader(server) as (_, reader):
        server.ask("SET", LOG, "w")
        with pytest.raises(CacheUnavailable, match="is no log"):
            await reader.read(BAD, wait_s=3600)


@pytest.mark.parametrize(
    ("field", "value"), [("evil", "x"), ("end", "perhaps"), ("chunks", "a" * 30_000_000)]
)
async def test_a_reader_of_an_entry_that_makes_no_sense_hears_so_at_once(
    server: RedisServer, field: str, value: str
) -> None:
    async with writer_and_reader(server) as (_, reader), asyncio.TaskGroup() as group:
        server.ask("XADD", LOG, "0-1", "owner", "x")
        reading = group.create_task(reader.read(BAD, at_least=9, wait_s=3600))
        while not server.blocked_readers():
            await turn()
        server.ask("XADD", LOG, "1-0", "chunks", '[["a",[7]]]')
        server.ask("XADD", LOG, "1-5", field, value)
        read = await reading
        assert (read.text, read.end, reader.stats.skipped) == ("a", End.FAILED, 1)
        assert "Entry 1-5 is neither" in read.detail


@pytest.mark.parametrize("chunks", [[], [Chunk("a", (1,))]])
@pytest.mark.parametrize("at_least", [1, sys.maxsize])
async def test_the_log_of_a_process_that_has_gone_ends_as_failed_within_its_lease(
    server: RedisServer, chunks: list[Chunk], at_least: int
) -> None:
    async with RedisAgentPromptCache(server.url, clock=time.monotonic, lease_s=0.1) as reader:
        async with RedisAgentPromptCache(server.url, clock=time.monotonic, lease_s=0.1) as writer:
            log = await writer.create(KEY)
            for chunk in chunks:
                log.append(chunk)
            with pytest.raises(LogTimeout):  # a silent writer keeps its log for many leases
                await reader.read(KEY, position=len(chunks), wait_s=1.0)
        position = 0 if at_least > 1 else len(chunks)
        async with asyncio.timeout(LIMIT_S):
            read = await reader.read(KEY, position=position, at_least=at_least, wait_s=3600)
        assert (read.position, read.end) == (len(chunks), End.FAILED)
        assert read.detail.startswith("The process that wrote the log has ended")


DROP_LEASES = """
local leases = redis.call('KEYS', '*:lease:*')
return #leases > 0 and redis.call('DEL', unpack(leases)) or 0
"""


@pytest.mark.parametrize("redis_stalls", [False, True])
async def test_what_a_writer_adds_after_its_lease_contradicts_no_reader(
    server: RedisServer, redis_stalls: bool
) -> None:
    async with (
        RedisAgentPromptCache(
            server.url, clock=time.monotonic, lease_s=3600, reply_limit_s=0.2
        ) as writer,
        RedisAgentPromptCache(server.url, clock=time.monotonic, lease_s=0.1) as reader,
        asyncio.timeout(LIMIT_S),
    ):
        log = await writer.create(KEY)
        log.append(Chunk("a"))
        assert await writer.flush(limit_s=LIMIT_S)
        while not server.ask("EVAL", DROP_LEASES, 0):  # as if the writer had been frozen
            await turn()
        read = await reader.read(KEY, at_least=sys.maxsize, wait_s=3600)
        if redis_stalls:
            server.stall()
        log.append(Chunk("b"))
        while redis_stalls and not writer.stats.degraded:
            await turn()
        server.resume()
        log.end(End.FINISHED)
        assert await writer.flush(limit_s=LIMIT_S)
        again = await reader.read(KEY, at_least=sys.maxsize, wait_s=3600)
        assert again == read == LogRead("a", (), 1, End.FAILED, read.detail)
        assert (await writer.read(KEY, at_least=2, wait_s=0)).text == "ab"
        assert writer.stats.withdrawn == 1


async def test_a_long_output_becomes_entries_that_readers_take(server: RedisServer) -> None:
    async with (
        RedisAgentPromptCache(server.url, clock=time.monotonic) as writer,
        RedisAgentPromptCache(server.url, clock=time.monotonic) as reader,
    ):
        log_writer = await writer.create(KEY)
        for _ in range(20):
            log_writer.append(Chunk("ä" * 2**20))
        log_writer.end(End.FINISHED)
        assert await writer.flush(limit_s=LIMIT_S)
        read = await reader.read(KEY, at_least=sys.maxsize, wait_s=LIMIT_S)
        assert (len(read.text), read.end) == (20 * 2**20, End.FINISHED)


async def test_a_program_with_a_member_that_is_no_name_is_deleted(server: RedisServer) -> None:
    async with writer_and_reader(server) as (writer, reader):
        await writer.create(BAD)
        server.ask("SADD", AGENTS, b"\xff")  # type: ignore[arg-type]
        await writer.forget("tenant", "bad")
        assert server.keys() == {}
        assert await of_the_others(writer, reader) == "shared"


async def test_a_password_is_sent_and_a_wrong_one_counts_as_away(server: RedisServer) -> None:
    server.ask("CONFIG", "SET", "requirepass", "geheim")
    async with RedisAgentPromptCache(
        server.url, clock=time.monotonic, options={"password": "geheim"}
    ) as right:
        assert await right.healthy()
        await right.create(KEY)
        assert not right.stats.degraded
    async with RedisAgentPromptCache(
        server.url, clock=time.monotonic, options={"password": "x"}
    ) as wrong:
        assert not await wrong.healthy()
        (await wrong.create(BAD)).append(Chunk("a"))
        assert (await wrong.read(BAD, wait_s=0)).text == "a"
        assert wrong.stats.degraded
