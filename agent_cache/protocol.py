"""The contract of the Agent Prompt Cache.

Each agent run has one append-only log of chunks with an end mark. Many readers may follow it while
it is written or later; a late reader sees all of it. A log's positions count tokens, or characters
if its chunks carry no token ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class End(Enum):
    """The reason why a log ended."""

    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class CacheError(Exception):
    """The base of the cache's errors."""


class LogExists(CacheError):
    """A log of that key was created before; keys are never used twice."""


class LogTimeout(CacheError):
    """Nothing new came within the limit.

    `begun` tells whether the log had begun by then.
    """

    def __init__(self, message: str, *, begun: bool = False) -> None:
        super().__init__(message)
        self.begun = begun


class CacheUnavailable(LogTimeout):
    """A read met its limit, and the shared store could not be reached at its end."""


class JournalDiffers(CacheError):
    """A journal of that key was begun with another head."""


class JournalTaken(CacheError):
    """Another process has claimed the journal since."""


@dataclass(frozen=True, slots=True)
class LogKey:
    """The name of one agent's log: tenant, run of an agent program, agent."""

    tenant: str
    program: str
    agent: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of output: its text, and its token ids if the writer has them.

    `vocabulary` is the fingerprint of the tokenizer that spells the text with these ids. Without it
    no reader may take the ids in place of the text.
    """

    text: str
    ids: tuple[int, ...] = ()
    vocabulary: str = ""

    def __len__(self) -> int:
        if self.ids:
            return len(self.ids)
        return len(self.text)


@dataclass(frozen=True, slots=True)
class LogRead:
    """All output after the requested position, joined. `position` is where to read on.

    `vocabulary` is that of all chunks, empty if they differ. With `end` set nothing more will come;
    `detail` then says more, such as an error's text.
    """

    text: str
    ids: tuple[int, ...]
    position: int
    end: End | None = None
    detail: str = ""
    vocabulary: str = ""


class LogWriter(Protocol):
    """The one writer of a log. Neither method waits for the network."""

    def append(self, chunk: Chunk) -> None:
        """Add a chunk and wake the readers; an empty chunk changes nothing.

        Raises:
            ValueError: The log has ended.
        """
        ...

    def end(self, end: End, detail: str = "") -> None:
        """Add the end mark and wake the readers. Only the first call counts."""
        ...


class AgentPromptCache(Protocol):
    """Logs by key, kept until they are forgotten or expire."""

    async def create(self, key: LogKey) -> LogWriter:
        """Begin the log of `key`. Raises LogExists if it was begun before."""
        ...

    async def read(
        self, key: LogKey, position: int = 0, *, at_least: int = 1, wait_s: float
    ) -> LogRead:
        """Return the log's content after `position`, waiting for it at most `wait_s`.

        The wait ends when the log has `at_least` more than `position` or has ended. The log may
        begin during the wait. With `wait_s=0` nothing is waited for. A read at the end of an ended
        log returns at once.

        Raises:
            LogTimeout: Nothing followed `position` when the wait ended.
        """
        ...

    async def forget(self, tenant: str, program: str) -> None:
        """Delete every log of the program; this ends its reads and disables its writers."""
        ...

    async def flush(self, *, limit_s: float) -> bool:
        """Wait until other processes can read all that was written; False if the limit ended it."""
        ...


class Journals(Protocol):
    """Append-only lists of records that outlive their writer, which holds the journal's lease.

    A journal is named by tenant and key, and expires a while after its last write. A lease ends
    `lease_s` after its owner's last write, so that another process may go on. Every method raises
    CacheUnavailable if the store is away.
    """

    @property
    def lease_s(self) -> float:
        """The seconds for which a lease lasts after its owner's last write."""
        ...

    def read_clock(self) -> float:
        """Return the seconds of a clock that also counts a suspended machine's time, if it can."""
        ...

    async def claim(self, tenant: str, key: str, owner: str, head: str) -> Sequence[bytes] | None:
        """Take the lease, begin a missing journal with `head`, and return the journal's records.

        Returns None while another process owns the journal. A claim that is cancelled gives the
        lease back.

        Raises:
            JournalDiffers: The journal was begun with another head.
        """
        ...

    async def append(
        self, tenant: str, key: str, owner: str, position: int, records: Sequence[bytes]
    ) -> bool:
        """Add `records` after the first `position` records and renew the lease.

        Records that are there already are not repeated. Returns False if the journal is lost.

        Raises:
            JournalTaken: Another process has claimed it since.
        """
        ...

    async def release(self, tenant: str, key: str, owner: str) -> None:
        """End the lease now if `owner` holds it."""
        ...

    async def look(self, tenant: str, key: str) -> "JournalState | None":
        """Return the journal's present state, or None if there is no journal."""
        ...

    async def seal(self, tenant: str, key: str, record: bytes, unless: bytes) -> None:
        """Add a last record and take the journal from its owner, which can add nothing afterwards.

        Does nothing if the last record begins with `unless`.
        """
        ...


@dataclass(frozen=True, slots=True)
class JournalState:
    """A journal's head, first and last record (empty if it has none), and whether it is leased."""

    head: bytes
    first: bytes
    last: bytes
    is_leased: bool


@dataclass(slots=True)
class CacheStats:
    """The counters since the cache was made; all but `degraded` only grow.

    `published` and `lost_writes` count stream entries: begin marks, batches of chunks, end marks.
    An entry that the store did not take is lost once per attempt, and sent again when the store is
    back. `withdrawn` logs are served to this process only: the store dropped them, another process
    had begun them, or another kind of value lies under their name. `skipped` counts malformed
    entries, each of which ends another process's log as failed.
    """

    degraded: bool = False
    published: int = 0
    lost_writes: int = 0
    failed_reads: int = 0
    withdrawn: int = 0
    skipped: int = 0
