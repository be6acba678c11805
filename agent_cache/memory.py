"""The Agent Prompt Cache of one process: logs as lists of chunks, and their waiting readers."""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import inf
from typing import Self

from agent_cache.protocol import Chunk, End, LogExists, LogKey, LogRead, LogTimeout, LogWriter

FORGOTTEN = "The log was forgotten or has expired."


def read_forgotten(position: int) -> LogRead:
    """Return the read of a forgotten log, which has no text and ends as aborted."""
    return LogRead("", (), position, End.ABORTED, FORGOTTEN)


def join_reads(
    pieces: Sequence[Chunk | LogRead], position: int, end: End | None = None, detail: str = ""
) -> LogRead:
    """Join consecutive `pieces` into one read that ends at `position`."""
    if len(pieces) == 1:
        one = pieces[0]
        return LogRead(one.text, one.ids, position, end, detail, one.vocabulary)
    text = "".join([piece.text for piece in pieces])
    ids = tuple(chain.from_iterable([piece.ids for piece in pieces]))
    return LogRead(text, ids, position, end, detail, find_vocabulary(pieces))


def find_vocabulary(pieces: Sequence[Chunk | LogRead]) -> str:
    """Return the vocabulary of all pieces that hold anything; empty if they differ."""
    found = {piece.vocabulary for piece in pieces if piece.ids or piece.text}
    if len(found) == 1:
        return found.pop()
    return ""


def count_chunks_before(ends: Sequence[int], position: int) -> int:
    """Return how many chunks lie before `position`.

    `ends` holds the position where the first chunk begins, then the position where each chunk ends.

    Raises:
        ValueError: The position is inside a chunk; text cannot be cut at a token.
    """
    index = bisect_left(ends, position)
    if index == len(ends) or ends[index] != position:
        raise ValueError(
            f"position {position} is not the end of a chunk; read on from a position that a "
            "read returned"
        )
    return index


@dataclass(slots=True, eq=False)
class Log:
    """The chunks of one log with their positions, an end mark, and the readers that wait for more.

    A log may exist before it is `begun`, so that readers can wait on it. Once it is `gone`, writes
    are ignored and reads end.
    """

    begun: bool = False
    gone: bool = False
    chunks: list[Chunk] = field(default_factory=list)
    end: End | None = None
    detail: str = ""
    expires_s: float = 0.0
    ends: list[int] = field(default_factory=lambda: [0])
    waiting: dict[asyncio.Future[None], int] = field(default_factory=dict)
    """The position at which each reader is woken, in order of arrival."""

    @property
    def position(self) -> int:
        """The position where the log ends at present, in tokens or characters."""
        return self.ends[-1]

    def append(self, chunk: Chunk) -> None:
        """Add a chunk and wake the readers that wait for its position."""
        self.chunks.append(chunk)
        self.ends.append(self.ends[-1] + len(chunk))
        self.wake(self.ends[-1])

    def read_after(self, position: int, at_least: int = 1) -> LogRead | None:
        """Read what follows `position`.

        Returns None while the log has not ended and has fewer than `at_least` tokens or characters
        more.
        """
        if self.gone:
            return read_forgotten(position)
        last = self.ends[-1]
        if position == last and at_least > 0 and self.end is None:
            return None
        index = count_chunks_before(self.ends, position)
        if last - position < at_least and self.end is None:
            return None
        return join_reads(self.chunks[index:], last, self.end, self.detail)

    def wake(self, position: float = inf) -> None:
        """Wake every reader that waits for `position` or less."""
        for waiter, awaited in self.waiting.items():
            if awaited <= position and not waiter.done():
                waiter.set_result(None)

    def discard(self) -> None:
        """Free the log's chunks and end its readers."""
        self.gone = True
        self.chunks = []
        self.ends = [0]
        self.wake()

    async def wait_for(self, position: int) -> None:
        """Return when the log reaches `position` or is woken."""
        waiter = asyncio.get_running_loop().create_future()
        self.waiting[waiter] = position
        try:
            await waiter
        finally:
            del self.waiting[waiter]


class Writer:
    """The `LogWriter` of a log in memory.

    `written` is called after every write, before the write returns.
    """

    __slots__ = ("_log", "_written")

    def __init__(self, log: Log, written: Callable[[], None]) -> None:
        self._log = log
        self._written = written

    def append(self, chunk: Chunk) -> None:
        """Add a chunk and wake the readers. Raises ValueError after `end`."""
        if self._log.gone:
            return
        if self._log.end is not None:
            raise ValueError(f"the log has ended ({self._log.end.value}); nothing can be appended")
        if len(chunk):
            self._log.append(chunk)
            self._written()

    def end(self, end: End, detail: str = "") -> None:
        """Add the end mark and wake the readers. Only the first call counts."""
        if self._log.gone or self._log.end is not None:
            return
        self._log.end = end
        self._log.detail = detail
        self._log.wake()
        self._written()


class MemoryAgentPromptCache:
    """An `AgentPromptCache` in this process's memory: no network, no background task.

    `len` counts the logs held. `clock` returns monotonic seconds. A log expires `ttl_s` after its
    last write, ended or not: a log whose writer never ends it would otherwise stay. Expired logs
    are invisible at once and are swept out when others begin. `dropped` is called with the key of
    every log that is forgotten or expires.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        ttl_s: float = 3600.0,
        dropped: Callable[[LogKey], None] = lambda _key: None,
    ) -> None:
        if ttl_s <= 0:
            raise ValueError(f"ttl_s is {ttl_s}; it must be positive")
        self._clock = clock
        self._ttl_s = ttl_s
        self._dropped = dropped
        self._programs: dict[tuple[str, str], dict[str, Log]] = {}
        self._awaited: dict[LogKey, Log] = {}
        self._sweep_s = clock()

    def __len__(self) -> int:
        now_s = self._clock()
        return sum(
            log.expires_s > now_s for logs in self._programs.values() for log in logs.values()
        )

    async def create(self, key: LogKey) -> LogWriter:
        """Begin the log of `key`. Raises LogExists."""
        log = self.begin(key)
        return Writer(log, partial(self.touch, log))

    async def read(
        self, key: LogKey, position: int = 0, *, at_least: int = 1, wait_s: float
    ) -> LogRead:
        """Return the log's content after `position`, waiting at most `wait_s`."""
        read = self._read_now(key, position, at_least)
        if read is None and wait_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    read = await self.wait(key, position, at_least)
        if read is None:
            read = self._read_now(key, position, 1)
        if read is None:
            message = f"nothing came after position {position} of {key} within {wait_s:g} s"
            raise LogTimeout(message, begun=self.find(key) is not None)
        return read

    async def forget(self, tenant: str, program: str) -> None:
        """Delete every log of the program."""
        self.drop(tenant, program)

    async def flush(self, *, limit_s: float) -> bool:
        """Return True: no other process reads here."""
        return True

    async def close(self) -> None:
        """Forget everything."""
        programs = {(key.tenant, key.program) for key in self._awaited}
        for tenant, program in programs.union(self._programs):
            self.drop(tenant, program)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- for a cache that shares these logs

    def find(self, key: LogKey) -> Log | None:
        """Return the log of `key` if it has begun and is neither forgotten nor expired."""
        logs = self._programs.get((key.tenant, key.program), {})
        log = logs.get(key.agent)
        if log is not None and log.expires_s <= self._clock():
            self._drop(key, logs.pop(key.agent))
            return None
        return log

    def begin(self, key: LogKey) -> Log:
        """Begin a new log and hand it to the readers that wait for it. Raises LogExists."""
        if self.find(key) is not None:
            raise LogExists(f"the log of {key} was begun before")
        self._sweep()
        log = self._awaited.pop(key, None) or Log()
        log.begun = True
        self.touch(log)
        self._programs.setdefault((key.tenant, key.program), {})[key.agent] = log
        return log

    def touch(self, log: Log) -> None:
        """Restart the log's time to live."""
        log.expires_s = self._clock() + self._ttl_s

    async def wait(self, key: LogKey, position: int, at_least: int) -> LogRead:
        """Read the log after `position` once it has `at_least` more, or has ended.

        The caller limits the time.
        """
        while (read := self._read_now(key, position, at_least)) is None:
            log = self.find(key) or self._awaited.setdefault(key, Log())
            try:
                await log.wait_for(position + at_least)
            finally:
                if not log.begun and not log.waiting and self._awaited.get(key) is log:
                    del self._awaited[key]
            if log.gone:
                return read_forgotten(position)
        return read

    def _read_now(self, key: LogKey, position: int, at_least: int) -> LogRead | None:
        log = self.find(key)
        if log is None:
            return read_forgotten(position) if position else None
        return log.read_after(position, at_least)

    def drop(self, tenant: str, program: str) -> None:
        """Drop every log of the program, and end all its readers, even of logs not yet begun."""
        for agent, log in self._programs.pop((tenant, program), {}).items():
            self._drop(LogKey(tenant, program, agent), log)
        for key in [key for key in self._awaited if (key.tenant, key.program) == (tenant, program)]:
            self._awaited.pop(key).discard()

    def _drop(self, key: LogKey, log: Log) -> None:
        log.discard()
        self._dropped(key)

    def _sweep(self) -> None:
        """Drop expired logs, at most eight times per time to live, so that `begin` stays cheap."""
        now_s = self._clock()
        if now_s < self._sweep_s:
            return
        self._sweep_s = now_s + self._ttl_s / 8
        for name, logs in list(self._programs.items()):
            for agent in [agent for agent, log in logs.items() if log.expires_s <= now_s]:
                self._drop(LogKey(*name, agent), logs.pop(agent))
            if not logs:
                del self._programs[name]
