"""The contract of the Agent Prompt Cache.

Per agent run there is one append-only log of chunks with an end mark. Many may read it, while it is
written or after; a late reader sees all. A log's positions count tokens, or characters for chunks
that carry no token ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class End(Enum):
    """Why a log ended."""

    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class CacheError(Exception):
    """Base of the cache's errors."""


class LogExists(CacheError):
    """A log of that key was created before; keys are never used twice."""


class LogTimeout(CacheError):
    """Nothing new came within the limit. `begun` tells whether the log had begun by then."""

    def __init__(self, message: str, *, begun: bool = False) -> None:
        super().__init__(message)
        self.begun = begun


class CacheUnavailable(LogTimeout):
    """Nothing came within the limit, and at its end the shared store could not be asked."""


class JournalDiffers(CacheError):
    """A journal of that key was begun with another head."""


@dataclass(frozen=True, slots=True)
class LogKey:
    """Names one agent's log: whose, which run of an agent program, which agent."""

    tenant: str
    program: str
    agent: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of output: its text, and its token ids where the writer has them."""

    text: str
    ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        if self.ids:
            return len(self.ids)
        return len(self.text)


@dataclass(frozen=True, slots=True)
class LogRead:
    """All that came after the position asked for, joined. `position` is where to read on.

    With `end` set nothing more will come; `detail` then says more (an error's text, say).
    """

    text: str
    ids: tuple[int, ...]
    position: int
    end: End | None = None
    detail: str = ""


class LogWriter(Protocol):
    """The one writer of a log. Neither call waits for the network."""

    def append(self, chunk: Chunk) -> None:
        """Add a chunk and wake the readers; an empty chunk changes nothing. ValueError after
        `end`."""
        ...

    def end(self, end: End, detail: str = "") -> None:
        """Add the end mark and wake the readers. Only the first call counts."""
        ...


class AgentPromptCache(Protocol):
    """Logs by key, kept until forgotten or expired."""

    async def create(self, key: LogKey) -> LogWriter:
        """Begin the log of `key`. Raises LogExists if it was begun before."""
        ...

    async def read(
        self, key: LogKey, position: int = 0, *, at_least: int = 1, wait_s: float
    ) -> LogRead:
        """What the log holds after `position`, or what comes next.

        Waits at most `wait_s` until the log is `at_least` so far beyond `position`, or ends, also
        where it is not yet begun; with 0, nothing is waited for. Returns what is there by then, and
        raises LogTimeout when that is nothing. A read at the end of an ended log returns at once.
        """
        ...

    async def forget(self, tenant: str, program: str) -> None:
        """Delete every log of the program; reads under way and writers left over end without
        harm."""
        ...


class Journals(Protocol):
    """Append-only lists of records that outlive their writer, who holds the journal's lease.

    A journal is named by tenant and key, and expires a while after its last write. A lease ends
    `lease_s` after its owner's last write, so that another may go on. Every call raises
    CacheUnavailable where the store is away.
    """

    @property
    def lease_s(self) -> float: ...

    async def claim(self, tenant: str, key: str, owner: str, head: str) -> Sequence[bytes] | None:
        """Take the lease, and begin the journal with `head` if there is none; its records. None
        while another owns it.

        A claim that is cancelled gives the lease back. Raises JournalDiffers where it was begun
        with another head.
        """
        ...

    async def append(
        self, tenant: str, key: str, owner: str, position: int, records: Sequence[bytes]
    ) -> bool:
        """Add `records` behind the first `position` and renew the lease. What is there of them
        already is not repeated.

        False where the journal is lost, or another owns it.
        """
        ...

    async def release(self, tenant: str, key: str, owner: str) -> None:
        """End the lease now, if it is the owner's."""
        ...

    async def look(self, tenant: str, key: str) -> "JournalState | None":
        """What the journal is like now; None where there is none."""
        ...

    async def seal(self, tenant: str, key: str, record: bytes, unless: bytes) -> None:
        """Add a last record to a journal and take it from its owner, who can add nothing
        afterwards.

        Nothing happens where the last record begins with `unless`.
        """
        ...


@dataclass(frozen=True, slots=True)
class JournalState:
    """A journal's head, its first and last records, empty where there are none, and whether its
    lease is held.
    """

    head: bytes
    first: bytes
    last: bytes
    is_leased: bool


@dataclass(slots=True)
class CacheStats:
    """Counters since the cache was made; read them at any time, they only grow (`degraded` aside).

    `published` and `lost_writes` count stream entries: begin marks, batches of chunks, end marks.
    An entry that the store did not take is lost once per attempt, and sent again when the store is
    back. `withdrawn` logs are served to this process only, as the store dropped them, another
    process had begun them, or what lies under their name is no log. `skipped` entries of other
    processes' logs made no sense.
    """

    degraded: bool = False
    published: int = 0
    lost_writes: int = 0
    failed_reads: int = 0
    withdrawn: int = 0
    skipped: int = 0
