"""One log in this process's memory: a list of chunks, joined only when read."""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from math import inf

from agent_cache.protocol import Chunk, End, LogRead

FORGOTTEN = "The log was forgotten or has expired."


def forgotten(position: int) -> LogRead:
    """What a reader is told whose log is gone."""
    return LogRead("", (), position, End.ABORTED, FORGOTTEN)


def joined(pieces: Sequence[Chunk | LogRead], position: int, end: End | None = None, detail: str = "") -> LogRead:
    """`pieces` that follow each other as one read that ends at `position`."""
    text = "".join([piece.text for piece in pieces])
    ids = tuple(chain.from_iterable([piece.ids for piece in pieces]))
    return LogRead(text, ids, position, end, detail)


def chunks_after(chunks: Sequence[Chunk], start: int, position: int) -> Sequence[Chunk]:
    """Those of `chunks`, of which the first begins at `start`, that lie behind `position`.

    Raises ValueError for a position inside a chunk: text cannot be cut at a token.
    """
    ends = list(accumulate((len(chunk) for chunk in chunks), initial=start))
    index = bisect_left(ends, position)
    if index == len(ends) or ends[index] != position:
        raise off_boundary(position)
    return chunks[index:]


def off_boundary(position: int) -> ValueError:
    return ValueError(f"position {position} is not the end of a chunk; read on from a position that a read returned")


class Log:
    """Chunks with their cumulative positions, an end mark, and the readers waiting for more.

    It may exist before it is `begun`, for readers to wait on. Once it is `gone`, writes are ignored and reads end.
    """

    __slots__ = ("_ends", "_waiting", "begun", "chunks", "detail", "end", "expires_s", "gone")

    def __init__(self) -> None:
        self.begun = False
        self.gone = False
        self.chunks: list[Chunk] = []
        self.end: End | None = None
        self.detail = ""
        self.expires_s = 0.0
        self._ends = [0]
        # who is to be woken at which position, in the order in which they came
        self._waiting: dict[asyncio.Future[None], int] = {}

    @property
    def position(self) -> int:
        """Where the log ends at present, in tokens or characters."""
        return self._ends[-1]

    @property
    def awaited(self) -> bool:
        """Whether a reader waits."""
        return bool(self._waiting)

    def append(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self._ends.append(self._ends[-1] + len(chunk))
        self.wake(self._ends[-1])

    def position_of(self, index: int) -> int:
        """The position behind the first `index` chunks."""
        return self._ends[index]

    def index_of(self, position: int) -> int:
        """How many chunks lie before `position`. ValueError where that is no boundary between chunks."""
        index = bisect_left(self._ends, position)
        if index == len(self._ends) or self._ends[index] != position:
            raise off_boundary(position)
        return index

    def after(self, position: int, at_least: int = 1) -> LogRead | None:
        """What a reader at `position` gets now; None while the log goes on and has less than `at_least` for it."""
        if self.gone:
            return forgotten(position)
        index = self.index_of(position)
        if self.position - position < at_least and self.end is None:
            return None
        return joined(self.chunks[index:], self.position, self.end, self.detail)

    def wake(self, position: float = inf) -> None:
        """Let every reader look again that waits for `position` or less."""
        for waiter, awaited in self._waiting.items():
            if awaited <= position and not waiter.done():
                waiter.set_result(None)

    def discard(self) -> None:
        """Free what the log holds and end its readers."""
        self.gone = True
        self.chunks = []
        self._ends = [0]
        self.wake()

    async def reached(self, position: int) -> None:
        """Return when the log comes to `position` or is woken."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = position
        try:
            await waiter
        finally:
            del self._waiting[waiter]


class Writer:
    """The `LogWriter` of a log in memory. `written` is called after every write, before it returns."""

    __slots__ = ("_log", "_written")

    def __init__(self, log: Log, written: Callable[[], None]) -> None:
        self._log = log
        self._written = written

    def append(self, chunk: Chunk) -> None:
        if self._log.gone:
            return
        if self._log.end is not None:
            raise ValueError(f"the log has ended ({self._log.end.value}); nothing can be appended")
        if len(chunk):
            self._log.append(chunk)
            self._written()

    def end(self, end: End, detail: str = "") -> None:
        if self._log.gone or self._log.end is not None:
            return
        self._log.end = end
        self._log.detail = detail
        self._log.wake()
        self._written()
