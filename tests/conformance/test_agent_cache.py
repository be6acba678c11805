"""What every Agent Prompt Cache promises: in memory, over Redis, and over Redis between two
processes.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from agent_cache import (
    AgentPromptCache,
    Chunk,
    End,
    LogExists,
    LogKey,
    LogRead,
    LogTimeout,
    LogWriter,
    MemoryAgentPromptCache,
)
from agent_cache.redis import RedisAgentPromptCache
from tests.fakes.redis_server import RedisServer, own_redis

KEY = LogKey("tenant", "program", "agent")
LIMIT_S = 20.0
"""Far beyond what anything here takes; a read that reaches it is a failure."""


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Backend:
    """A cache as its writer sees it and as its reader does. `settle` waits until both agree."""

    writer: AgentPromptCache
    reader: AgentPromptCache
    settle: Callable[[], Awaitable[None]]
    blocked: Callable[[int], Awaitable[None]]
    """Waits until this number of reads wait."""


server = pytest.fixture(scope="module")(own_redis)


async def turns(count: int) -> None:
    """Let every task that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def memory_blocked(_count: int) -> None:
    await turns(10)


def memory_backend() -> Backend:
    cache = MemoryAgentPromptCache(clock=Clock())
    return Backend(cache, cache, lambda: turns(1), memory_blocked)


async def redis_backend(server: RedisServer, stack: AsyncExitStack, *, remote: bool) -> Backend:
    writer = await stack.enter_async_context(RedisAgentPromptCache(server.url, clock=Clock()))
    reader = writer
    if remote:
        reader = await stack.enter_async_context(RedisAgentPromptCache(server.url, clock=Clock()))

    async def settle() -> None:
        assert await writer.flush(limit_s=LIMIT_S)

    async def blocked(count: int) -> None:
        while server.blocked_readers() < count:
            await turns(1)

    return Backend(writer, reader, settle, blocked if remote else memory_blocked)


@pytest.fixture(params=["memory", "redis", "redis between processes"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    if request.param == "memory":
        yield memory_backend()
        return
    server: RedisServer = request.getfixturevalue("server")
    server.ask("FLUSHALL")
    async with AsyncExitStack() as stack:
        yield await redis_backend(server, stack, remote="between" in request.param)


async def read_all(
    cache: AgentPromptCache, key: LogKey = KEY, position: int = 0
) -> tuple[LogRead, list[LogRead]]:
    """Reads to the end mark: all of it as one, and the reads as they came."""
    reads = []
    while True:
        reads.append(await cache.read(key, position, wait_s=LIMIT_S))
        position = reads[-1].position
        if reads[-1].end is not None:
            text = "".join(read.text for read in reads)
            ids = tuple(token for read in reads for token in read.ids)
            return LogRead(text, ids, position, reads[-1].end, reads[-1].detail), reads


async def begin(
    cache: AgentPromptCache, key: LogKey, *chunks: Chunk, end: End | None = None
) -> LogWriter:
    log = await cache.create(key)
    for chunk in chunks:
        log.append(chunk)
    if end is not None:
        log.end(end)
    return log


HELLO, WORLD = Chunk("Hello", (1, 2)), Chunk(" world", (3,))


async def test_a_late_reader_sees_all(backend: Backend) -> None:
    await begin(backend.writer, KEY, HELLO, WORLD, end=End.FINISHED)
    await backend.settle()
    assert await backend.reader.read(KEY, wait_s=LIMIT_S) == LogRead(
        "Hello world", (1, 2, 3), 3, End.FINISHED
    )


async def test_a_reader_goes_on_from_the_position_it_was_given(backend: Backend) -> None:
    log = await begin(backend.writer, KEY, HELLO)
    first = await backend.reader.read(KEY, wait_s=LIMIT_S)
    log.append(WORLD)
    assert await backend.reader.read(KEY, first.position, wait_s=LIMIT_S) == LogRead(
        " world", (3,), 3
    )


async def test_a_read_names_the_vocabulary_that_all_its_chunks_have(backend: Backend) -> None:
    one, same, other = (Chunk(text, (1,), text[0]) for text in ("a.", "a,", "b"))
    log = await begin(backend.writer, KEY, one, same)
    await backend.settle()
    assert (await backend.reader.read(KEY, wait_s=LIMIT_S)).vocabulary == "a"
    log.append(other)
    await backend.settle()
    assert (await backend.reader.read(KEY, 2, wait_s=LIMIT_S)).vocabulary == "b"
    assert (await backend.reader.read(KEY, wait_s=LIMIT_S)).vocabulary == ""


async def test_every_boundary_between_chunks_is_a_position(backend: Backend) -> None:
    chunks = [Chunk(f"{number},", tuple(range(number))) for number in range(1, 20)]
    await begin(backend.writer, KEY, *chunks, end=End.FINISHED)
    await backend.settle()
    position = 0
    for index, chunk in enumerate(chunks):
        whole, _ = await read_all(backend.reader, KEY, position)
        assert whole.text == "".join(rest.text for rest in chunks[index:])
        position += len(chunk)


async def test_a_position_inside_a_chunk_is_refused(backend: Backend) -> None:
    await begin(backend.writer, KEY, HELLO, WORLD)
    with pytest.raises(ValueError, match="position 1 "):
        await backend.reader.read(KEY, 1, wait_s=LIMIT_S)


async def test_a_blocked_reader_gets_the_next_chunk(backend: Backend) -> None:
    log = await begin(backend.writer, KEY, HELLO)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(backend.reader.read(KEY, 2, wait_s=LIMIT_S))
        await backend.blocked(1)
        assert not reading.done()
        log.append(WORLD)
    assert reading.result() == LogRead(" world", (3,), 3)


async def test_a_blocked_reader_gets_the_end_mark(backend: Backend) -> None:
    log = await begin(backend.writer, KEY, HELLO)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(backend.reader.read(KEY, 2, wait_s=LIMIT_S))
        await backend.blocked(1)
        log.end(End.FAILED, "out of memory")
    assert reading.result() == LogRead("", (), 2, End.FAILED, "out of memory")


async def test_a_reader_waits_for_a_log_that_is_not_begun(backend: Backend) -> None:
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(backend.reader.read(KEY, wait_s=LIMIT_S))
        await backend.blocked(1)
        log = await backend.writer.create(KEY)
        await backend.settle()
        assert not reading.done()
        log.append(HELLO)
    assert reading.result() == LogRead("Hello", (1, 2), 2)


async def test_a_reader_that_wants_more_gets_it_at_once_when_it_is_there(backend: Backend) -> None:
    log = await begin(backend.writer, KEY, HELLO)
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(backend.reader.read(KEY, at_least=4, wait_s=LIMIT_S))
        after = group.create_task(backend.reader.read(KEY, 2, at_least=2, wait_s=LIMIT_S))
        await backend.blocked(2)
        log.append(WORLD)
        await backend.settle()
        await backend.blocked(2)
        assert not reading.done()
        assert not after.done()
        log.append(Chunk("!", (4,)))
    assert reading.result() == LogRead("Hello world!", (1, 2, 3, 4), 4)
    assert after.result() == LogRead(" world!", (3, 4), 4)


async def test_a_reader_that_wants_more_than_there_will_be_gets_all_with_the_end(
    backend: Backend,
) -> None:
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(backend.reader.read(KEY, at_least=1000, wait_s=LIMIT_S))
        await backend.blocked(1)
        log = await begin(backend.writer, KEY, HELLO)
        await backend.settle()
        log.append(WORLD)
        await backend.settle()
        assert not reading.done()
        log.end(End.ABORTED, "cut")
    assert reading.result() == LogRead("Hello world", (1, 2, 3), 3, End.ABORTED, "cut")


async def test_a_reader_that_wants_more_gets_what_there_is_when_its_time_is_over(
    backend: Backend,
) -> None:
    log = await begin(backend.writer, KEY, HELLO)
    await backend.settle()
    assert await backend.reader.read(KEY, at_least=3, wait_s=0.01) == LogRead("Hello", (1, 2), 2)
    log.append(WORLD)
    await backend.settle()
    assert await backend.reader.read(KEY, 2, at_least=2, wait_s=0) == LogRead(" world", (3,), 3)
    with pytest.raises(LogTimeout):
        await backend.reader.read(KEY, 3, at_least=2, wait_s=0.01)


async def test_many_readers_see_the_same(backend: Backend) -> None:
    async with asyncio.TaskGroup() as group:
        early = [group.create_task(read_all(backend.reader)) for _ in range(20)]
        await backend.blocked(20)
        log = await begin(backend.writer, KEY, HELLO)
        late = [group.create_task(read_all(backend.reader)) for _ in range(20)]
        for token in range(100):
            log.append(Chunk(f"{token} ", (token,)))
            await turns(token % 3)
        log.end(End.FINISHED, "stop")
    text = "Hello" + "".join(f"{token} " for token in range(100))
    expected = LogRead(text, (1, 2, *range(100)), 102, End.FINISHED, "stop")
    assert {reading.result()[0] for reading in early + late} == {expected}


@pytest.mark.parametrize("end", End)
async def test_an_end_mark_says_why_and_stays(backend: Backend, end: End) -> None:
    log = await begin(backend.writer, KEY, HELLO)
    log.end(end, "because: ä\n")
    for _ in range(2):
        whole, _reads = await read_all(backend.reader)
        assert whole == LogRead("Hello", (1, 2), 2, end, "because: ä\n")


async def test_a_read_at_the_end_returns_at_once(backend: Backend) -> None:
    await begin(backend.writer, KEY, HELLO, end=End.FINISHED)
    await backend.settle()
    assert await backend.reader.read(KEY, 2, wait_s=0) == LogRead("", (), 2, End.FINISHED)


async def test_a_log_may_end_empty(backend: Backend) -> None:
    await begin(backend.writer, KEY, end=End.ABORTED)
    assert await backend.reader.read(KEY, wait_s=LIMIT_S) == LogRead("", (), 0, End.ABORTED)


async def test_only_the_first_end_counts_and_nothing_follows_it(backend: Backend) -> None:
    log = await begin(backend.writer, KEY, HELLO, end=End.FINISHED)
    log.end(End.FAILED, "late")
    with pytest.raises(ValueError, match="ended"):
        log.append(WORLD)
    whole, _ = await read_all(backend.reader)
    assert whole == LogRead("Hello", (1, 2), 2, End.FINISHED)


async def test_an_empty_chunk_changes_nothing(backend: Backend) -> None:
    log = await begin(backend.writer, KEY, Chunk(""), HELLO, Chunk(""))
    assert (await backend.reader.read(KEY, wait_s=LIMIT_S)).position == 2
    log.append(Chunk(""))
    await backend.settle()
    with pytest.raises(LogTimeout):
        await backend.reader.read(KEY, 2, wait_s=0)


async def test_positions_count_characters_where_there_are_no_ids(backend: Backend) -> None:
    await begin(
        backend.writer,
        KEY,
        Chunk("añb"),
        HELLO,
        Chunk("", (9,)),
        Chunk("\U0001f600"),
        end=End.FINISHED,
    )
    whole, reads = await read_all(backend.reader)
    assert whole == LogRead("añbHello\U0001f600", (1, 2, 9), 7, End.FINISHED)
    assert reads[-1].position == 7


@pytest.mark.parametrize(
    "text", ["日本語\n", "\U0001f468‍\U0001f469", "\x00\r\n", '"quoted" \\', " "]
)
async def test_any_text_comes_back_as_it_went_in(backend: Backend, text: str) -> None:
    log = await begin(backend.writer, KEY, Chunk(text, (2**31, 0)))
    log.end(End.FAILED, text)
    whole, _ = await read_all(backend.reader)
    assert whole == LogRead(text, (2**31, 0), 2, End.FAILED, text)


async def test_a_key_is_begun_once(backend: Backend) -> None:
    await begin(backend.writer, KEY, HELLO, end=End.FINISHED)
    for cache in (backend.writer, backend.reader):
        with pytest.raises(LogExists):
            await cache.create(KEY)
    whole, _ = await read_all(backend.reader)
    assert whole.text == "Hello"


async def test_of_many_who_begin_a_log_at_once_one_succeeds(backend: Backend) -> None:
    begun = [cache.create(KEY) for cache in (backend.writer, backend.reader) for _ in range(5)]
    outcomes = await asyncio.gather(*begun, return_exceptions=True)
    assert sum(isinstance(outcome, LogExists) for outcome in outcomes) == 9


@pytest.mark.parametrize("wait_s", [0, 0.01])
async def test_a_read_of_a_log_that_never_begins_ends_at_its_limit(
    backend: Backend, wait_s: float
) -> None:
    with pytest.raises(LogTimeout, match="nothing came") as raised:
        await backend.reader.read(KEY, wait_s=wait_s)
    assert not raised.value.begun


@pytest.mark.parametrize("wait_s", [0, 0.01])
async def test_a_read_that_ends_at_its_limit_tells_whether_the_log_had_begun(
    backend: Backend, wait_s: float
) -> None:
    await begin(backend.writer, KEY)
    await backend.settle()
    with pytest.raises(LogTimeout) as raised:
        await backend.reader.read(KEY, wait_s=wait_s)
    assert raised.value.begun


@pytest.mark.parametrize("wait_s", [0, 0.01])
async def test_a_read_of_a_silent_log_ends_at_its_limit(backend: Backend, wait_s: float) -> None:
    await begin(backend.writer, KEY, HELLO)
    await backend.settle()
    with pytest.raises(LogTimeout, match="after position 2"):
        await backend.reader.read(KEY, 2, wait_s=wait_s)


async def test_a_forgotten_log_is_gone(backend: Backend) -> None:
    await begin(backend.writer, KEY, HELLO, end=End.FINISHED)
    await backend.settle()
    await backend.writer.forget("tenant", "program")
    with pytest.raises(LogTimeout):
        await backend.reader.read(KEY, wait_s=0)
    read = await backend.reader.read(KEY, 2, wait_s=0)
    assert (read.end, read.detail) == (End.ABORTED, "The log was forgotten or has expired.")


async def test_forgetting_ends_a_blocked_reader(backend: Backend) -> None:
    await begin(backend.writer, KEY, HELLO)
    await backend.settle()
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(backend.reader.read(KEY, 2, wait_s=LIMIT_S))
        await backend.blocked(1)
        await backend.writer.forget("tenant", "program")
    assert reading.result().end is End.ABORTED


async def test_forgetting_ends_a_reader_of_a_log_not_begun(backend: Backend) -> None:
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(backend.reader.read(KEY, wait_s=LIMIT_S))
        await backend.blocked(1)
        await backend.reader.forget("tenant", "program")
    assert reading.result().end is End.ABORTED


async def test_any_process_may_forget(backend: Backend) -> None:
    log = await begin(backend.writer, KEY, HELLO)
    await backend.settle()
    await backend.reader.forget("tenant", "program")
    log.append(WORLD)
    log.end(End.FINISHED)
    await backend.settle()
    with pytest.raises(LogTimeout):
        await backend.reader.read(KEY, wait_s=0)


async def test_a_writer_left_over_writes_nothing(backend: Backend) -> None:
    left_over = await begin(backend.writer, KEY, HELLO)
    await backend.writer.forget("tenant", "program")
    left_over.append(WORLD)
    left_over.end(End.FINISHED)
    await begin(backend.writer, KEY, Chunk("anew", (7,)), end=End.FAILED)
    left_over.append(WORLD)
    whole, _ = await read_all(backend.reader)
    assert whole == LogRead("anew", (7,), 1, End.FAILED)


async def test_programs_are_forgotten_one_by_one(backend: Backend) -> None:
    kept = [LogKey("other", "program", "agent"), LogKey("tenant", "program2", "agent")]
    for key in (KEY, *kept):
        await begin(backend.writer, key, HELLO, end=End.FINISHED)
    await backend.writer.forget("tenant", "program")
    await backend.writer.forget("tenant", "unknown")
    for key in kept:
        whole, _ = await read_all(backend.reader, key)
        assert whole.text == "Hello"


async def test_names_cannot_run_into_each_other(backend: Backend) -> None:
    names = ["a", "a:b", ":", "{a}", "a}", "%3A", "ä/ b\n", "log:a", "\ud83d", ""]
    keys = [
        LogKey(tenant, program, agent)
        for tenant in names[:4]
        for program in names[:4]
        for agent in names
    ]
    for key in keys:
        await begin(backend.writer, key, Chunk(repr(key)), end=End.FINISHED)
    for key in keys:
        assert (await read_all(backend.reader, key))[0].text == repr(key)


async def test_concurrent_programs_keep_apart(backend: Backend) -> None:
    async def write(key: LogKey) -> None:
        log = await backend.writer.create(key)
        for token in range(50):
            log.append(Chunk(f"{key.program}.{token} ", (token,)))
            await turns(1)
        log.end(End.FINISHED, key.program)

    keys = [LogKey("tenant", f"p{number}", "agent") for number in range(30)]
    async with asyncio.TaskGroup() as group:
        readings = [group.create_task(read_all(backend.reader, key)) for key in keys]
        for key in keys:
            group.create_task(write(key))
    for key, reading in zip(keys, readings, strict=True):
        text = "".join(f"{key.program}.{token} " for token in range(50))
        assert reading.result()[0] == LogRead(text, tuple(range(50)), 50, End.FINISHED, key.program)


async def test_a_cancelled_reader_leaves_nothing_behind(backend: Backend) -> None:
    log = await begin(backend.writer, KEY, HELLO)
    await backend.settle()
    tasks = asyncio.all_tasks()
    async with asyncio.TaskGroup() as group:
        staying = group.create_task(backend.reader.read(KEY, 2, wait_s=LIMIT_S))
        leaving = [group.create_task(backend.reader.read(KEY, 2, wait_s=LIMIT_S)) for _ in range(3)]
        waiting = group.create_task(
            backend.reader.read(LogKey("tenant", "program", "x"), wait_s=LIMIT_S)
        )
        await backend.blocked(5)
        for reading in (*leaving, waiting):
            reading.cancel()
        await asyncio.wait([*leaving, waiting])
        log.append(WORLD)
    assert staying.result().text == " world"
    async with asyncio.timeout(LIMIT_S):
        # redis-py gives a connection back in a task of its own, which ends soon
        while asyncio.all_tasks() != tasks:  # noqa: ASYNC110 - nothing tells of its end
            await asyncio.sleep(0)
