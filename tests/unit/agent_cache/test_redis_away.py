"""Redis killed, restarted, stalled, or never there: running logs go on, nothing hangs, and it is
said once.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent_cache import CacheUnavailable, Chunk, End, LogKey, LogRead, LogTimeout
from agent_cache.redis import RedisAgentPromptCache
from tests.fakes.redis_server import RedisServer

KEY = LogKey("tenant", "program", "agent")
OTHER = LogKey("tenant", "program", "other")
LIMIT_S = 20.0
IMPATIENT_S = 0.2


@asynccontextmanager
async def caches(
    server: RedisServer, reply_limit_s: float = LIMIT_S
) -> AsyncIterator[tuple[RedisAgentPromptCache, RedisAgentPromptCache]]:
    """A writer's cache and a cache of another process."""
    async with (
        RedisAgentPromptCache(
            server.url, clock=time.monotonic, reply_limit_s=reply_limit_s
        ) as here,
        RedisAgentPromptCache(
            server.url, clock=time.monotonic, reply_limit_s=reply_limit_s
        ) as elsewhere,
    ):
        yield here, elsewhere


async def read_all(cache: RedisAgentPromptCache, key: LogKey = KEY) -> LogRead:
    text, position = "", 0
    while True:
        read = await cache.read(key, position, wait_s=LIMIT_S)
        text, position = text + read.text, read.position
        if read.end is not None:
            return LogRead(text, (), position, read.end, read.detail)


async def turn() -> None:
    await asyncio.sleep(0)


async def until_degraded(cache: RedisAgentPromptCache) -> None:
    while not cache.stats.degraded:
        await turn()


async def test_a_log_goes_on_in_memory_when_redis_is_killed(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with caches(server) as (here, _), asyncio.TaskGroup() as group:
        log = await here.create(KEY)
        reading = group.create_task(read_all(here))
        for token in range(100):
            if token == 50:
                server.kill()
            log.append(Chunk(f"{token} ", (token,)))
            await asyncio.sleep(0)
        await until_degraded(here)
        log.end(End.FINISHED)
        text = "".join(f"{token} " for token in range(100))
        assert await reading == LogRead(text, (), 100, End.FINISHED)
        assert here.stats.lost_writes > 0
        assert not await here.healthy()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "Redis is away" in warnings[0].message


async def test_a_reader_that_wanted_more_gets_what_was_written_here_while_redis_was_away(
    server: RedisServer,
) -> None:
    async with caches(server) as (here, _), asyncio.TaskGroup() as group:
        server.kill()
        reading = group.create_task(here.read(KEY, at_least=5, wait_s=1.0))
        await turn()
        (await here.create(KEY)).append(Chunk("two words", (1, 2)))
        assert await reading == LogRead("two words", (1, 2), 2)


async def test_a_restarted_empty_redis_gets_every_log_again(server: RedisServer) -> None:
    async with caches(server) as (here, elsewhere):
        log = await here.create(KEY)
        log.append(Chunk("before ", (1, 2)))
        assert await here.flush(limit_s=LIMIT_S)
        server.kill()
        log.append(Chunk("during ", (3,)))
        await until_degraded(here)
        begun_meanwhile = await here.create(OTHER)
        begun_meanwhile.append(Chunk("other"))
        begun_meanwhile.end(End.FINISHED)
        server.start()
        assert await here.flush(limit_s=LIMIT_S)
        log.append(Chunk("after", (4,)))
        log.end(End.FINISHED)
        assert (await read_all(elsewhere)).text == "before during after"
        assert (await read_all(elsewhere, OTHER)).text == "other"
        assert (here.stats.degraded, here.stats.withdrawn) == (False, 0)
        assert await here.healthy()
        await here.forget("tenant", "program")
        assert server.keys() == {}


async def test_an_unnoticed_restart_is_found_by_the_next_write(server: RedisServer) -> None:
    async with caches(server) as (here, elsewhere):
        log = await here.create(KEY)
        log.append(Chunk("before ", (1, 2)))
        assert await here.flush(limit_s=LIMIT_S)
        server.kill()
        server.start()
        while not await here.healthy():  # it is this that meets the broken connection
            await turn()
        log.append(Chunk("after", (3,)))
        log.end(End.FINISHED)
        assert await here.flush(limit_s=LIMIT_S)
        assert (await read_all(elsewhere)).text == "before after"


async def test_a_stalled_redis_delays_no_writer_and_no_local_reader(server: RedisServer) -> None:
    async with caches(server, IMPATIENT_S) as (here, elsewhere):
        log = await here.create(KEY)
        server.stall()
        for token in range(10):
            log.append(Chunk("a", (token,)))
            assert (await here.read(KEY, token, wait_s=LIMIT_S)).position == token + 1
        await until_degraded(here)
        (await here.create(OTHER)).end(End.ABORTED)
        await here.forget("tenant", "unknown")
        server.resume()
        assert await here.flush(limit_s=LIMIT_S)
        log.end(End.FINISHED)
        assert await read_all(elsewhere) == LogRead("a" * 10, (), 10, End.FINISHED)
        assert (await read_all(elsewhere, OTHER)).end is End.ABORTED


async def test_no_round_trip_is_waited_for_longer_than_its_limit(server: RedisServer) -> None:
    async with caches(server, IMPATIENT_S) as (here, elsewhere), asyncio.timeout(LIMIT_S):
        await here.create(KEY)
        server.stall()
        assert not await here.healthy()
        log = await here.create(OTHER)
        log.append(Chunk("local"))
        assert (await here.read(OTHER, wait_s=0)).text == "local"
        for position in (0, 1):
            with pytest.raises(CacheUnavailable):
                await elsewhere.read(KEY, position, wait_s=0.1)
        await here.forget("tenant", "program")
        await elsewhere.forget("tenant", "program")
        assert not await here.flush(limit_s=0.01)


async def test_a_remote_reader_outlives_a_restart(server: RedisServer) -> None:
    async with caches(server) as (here, elsewhere), asyncio.TaskGroup() as group:
        log = await here.create(KEY)
        reading = group.create_task(elsewhere.read(KEY, wait_s=LIMIT_S))
        while not server.blocked_readers():
            await turn()
        server.kill()
        log.append(Chunk("a"))
        await until_degraded(here)
        server.start()
        assert (await reading).text == "a"
        assert elsewhere.stats.failed_reads > 0


async def test_a_remote_read_says_that_redis_is_away(server: RedisServer) -> None:
    async with caches(server) as (_, elsewhere):
        server.kill()
        with pytest.raises(CacheUnavailable, match="Redis is away") as raised:
            await elsewhere.read(KEY, wait_s=0.01)
        assert isinstance(raised.value, LogTimeout)


async def test_all_works_in_memory_when_redis_was_never_there(server: RedisServer) -> None:
    server.kill()
    async with caches(server) as (here, _):
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(read_all(here))
            log = await here.create(KEY)
            log.append(Chunk("a"))
            log.end(End.FINISHED)
        assert reading.result().text == "a"
        assert here.stats.degraded
        await here.forget("tenant", "program")
        assert len(here) == 0


async def test_a_program_forgotten_in_an_outage_is_deleted_after_it(server: RedisServer) -> None:
    async with caches(server, IMPATIENT_S) as (here, _):
        await here.create(KEY)
        server.stall()
        await here.forget("tenant", "program")
        assert here.stats.degraded
        server.resume()
        assert await here.flush(limit_s=LIMIT_S)
        assert server.keys() == {}


async def test_of_two_logs_begun_in_an_outage_each_serves_its_own_process(
    server: RedisServer,
) -> None:
    async with caches(server) as (here, elsewhere):
        server.kill()
        (await here.create(KEY)).append(Chunk("mine"))
        (await elsewhere.create(KEY)).append(Chunk("theirs"))
        server.start()
        assert await here.flush(limit_s=LIMIT_S)
        assert await elsewhere.flush(limit_s=LIMIT_S)
        assert (await here.read(KEY, wait_s=0)).text == "mine"
        assert (await elsewhere.read(KEY, wait_s=0)).text == "theirs"
        assert here.stats.withdrawn + elsewhere.stats.withdrawn == 1


async def test_a_log_whose_begin_was_never_confirmed_is_recognised_as_ones_own(
    server: RedisServer,
) -> None:
    async with caches(server, IMPATIENT_S) as (here, elsewhere):
        await here.create(OTHER)
        server.stall()
        log = await here.create(KEY)  # sent, and done by the server once it goes on
        server.resume()
        log.append(Chunk("a"))
        log.end(End.FINISHED)
        assert await here.flush(limit_s=LIMIT_S)
        assert here.stats.withdrawn == 0
        assert (await read_all(elsewhere)).text == "a"


async def test_a_redis_without_memory_counts_as_away(server: RedisServer) -> None:
    async with caches(server) as (here, _):
        log = await here.create(KEY)
        server.ask("CONFIG", "SET", "maxmemory", "1")
        log.append(Chunk("a"))
        await until_degraded(here)
        server.ask("CONFIG", "SET", "maxmemory", "0")
        assert await here.flush(limit_s=LIMIT_S)
        assert not here.stats.degraded
