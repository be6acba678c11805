import asyncio
import gc
from dataclasses import dataclass

import pytest

from agent_cache import Chunk, End, LogExists, LogKey, LogTimeout, MemoryAgentPromptCache
from agent_cache.memory import Log

KEY = LogKey("tenant", "program", "agent")


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_log_expires_after_its_last_write() -> None:
    clock = Clock()
    cache = MemoryAgentPromptCache(clock=clock, ttl_s=10)
    log = await cache.create(KEY)
    clock.now_s += 9
    log.append(Chunk("a"))
    clock.now_s += 9
    log.end(End.FINISHED)
    clock.now_s += 9
    assert (await cache.read(KEY, wait_s=0)).text == "a"
    clock.now_s += 1
    assert len(cache) == 0
    with pytest.raises(LogTimeout):
        await cache.read(KEY, wait_s=0)


async def test_a_position_in_an_expired_log_reads_as_aborted() -> None:
    clock = Clock()
    cache = MemoryAgentPromptCache(clock=clock, ttl_s=10)
    (await cache.create(KEY)).append(Chunk("a"))
    clock.now_s += 10
    assert (await cache.read(KEY, 1, wait_s=0)).end is End.ABORTED


async def test_the_key_of_an_expired_log_may_begin_again() -> None:
    clock = Clock()
    cache = MemoryAgentPromptCache(clock=clock, ttl_s=10)
    stale = await cache.create(KEY)
    clock.now_s += 9.9
    with pytest.raises(LogExists):
        await cache.create(KEY)
    clock.now_s += 0.1
    (await cache.create(KEY)).append(Chunk("new"))
    stale.append(Chunk("stale"))
    assert (await cache.read(KEY, wait_s=0)).text == "new"


async def test_beginning_a_log_sweeps_out_the_expired_and_ends_their_readers() -> None:
    clock = Clock()
    cache = MemoryAgentPromptCache(clock=clock, ttl_s=10)
    await cache.create(KEY)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(cache.read(KEY, wait_s=20))
        await asyncio.sleep(0)
        clock.now_s += 10
        await cache.create(LogKey("tenant", "program", "other"))
    assert reading.result().end is End.ABORTED
    assert len(cache) == 1


async def test_len_counts_logs_and_not_those_that_readers_wait_for() -> None:
    cache = MemoryAgentPromptCache(clock=Clock())
    with pytest.raises(LogTimeout):
        await cache.read(KEY, wait_s=0)
    assert len(cache) == 0
    for agent in "abc":
        await cache.create(LogKey("tenant", "program", agent))
    assert len(cache) == 3
    await cache.forget("tenant", "program")
    assert len(cache) == 0


async def test_closing_ends_every_reader() -> None:
    async with asyncio.TaskGroup() as group, MemoryAgentPromptCache(clock=Clock()) as cache:
        await cache.create(KEY)
        begun = group.create_task(cache.read(KEY, wait_s=20))
        awaited = group.create_task(cache.read(LogKey("tenant", "other", "agent"), wait_s=20))
        await asyncio.sleep(0)
    assert {begun.result().end, awaited.result().end} == {End.ABORTED}
    assert len(cache) == 0


@pytest.mark.parametrize("position", [-1, 1, 3, 4])
async def test_only_what_a_read_returned_is_a_position(position: int) -> None:
    cache = MemoryAgentPromptCache(clock=Clock())
    (await cache.create(KEY)).append(Chunk("ab", (7, 8)))
    with pytest.raises(ValueError, match=f"position {position} "):
        await cache.read(KEY, position, wait_s=0)


def test_a_time_to_live_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="ttl_s is 0"):
        MemoryAgentPromptCache(clock=Clock(), ttl_s=0)


def logs_held() -> int:
    gc.collect()
    return sum(type(one) is Log for one in gc.get_objects())


async def test_a_log_that_never_begins_is_given_up_with_its_last_reader() -> None:
    cache, before = MemoryAgentPromptCache(clock=Clock(), ttl_s=10), logs_held()
    readings = [
        asyncio.create_task(cache.wait(LogKey("tenant", "program", agent), 0, 1)) for agent in "aab"
    ]
    await asyncio.sleep(0)
    assert logs_held() == before + 2
    for reading in readings:
        reading.cancel()
    await asyncio.wait(readings)
    del reading, readings  # their errors know the frames that held the logs
    assert logs_held() == before


async def test_a_reader_is_not_woken_for_less_than_it_wants() -> None:
    cache = MemoryAgentPromptCache(clock=Clock())
    writer = await cache.create(KEY)
    reading = cache.read(KEY, at_least=3, wait_s=5)
    waits_for = reading.__await__()
    future = next(waits_for)
    writer.append(Chunk("one two", (1, 2)))
    assert not future.done()
    writer.append(Chunk("three", (3,)))
    assert future.done()
    reading.close()


async def test_readers_are_woken_in_the_order_in_which_they_came() -> None:
    async with MemoryAgentPromptCache(clock=lambda: 0.0) as cache:
        writer, woken = await cache.create(KEY), list[int]()

        async def read(number: int) -> None:
            await cache.read(KEY, wait_s=5)
            woken.append(number)

        readers = [asyncio.create_task(read(number)) for number in range(50)]
        await asyncio.sleep(0)
        writer.append(Chunk("word", (1,)))
        await asyncio.gather(*readers)
    assert woken == list(range(50))
