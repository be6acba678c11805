"""How logs lie in Redis: names of keys, and what the entries of a stream hold. No I/O.

A log is one stream. An entry's id is `<position>-<kind>`, where the position is the log's length
including the entry; ids grow by themselves, so a write that is sent twice is refused the second
time.

    0-1             begun; field `owner` names the process that writes
    <position>-0    chunks; field `chunks` is JSON, [[text, [id, ...]], ...]
    <position>-2    end mark; fields `end` and `detail`

Each program has a set of its agents as well as its streams, so that it can be deleted without a
scan.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from urllib.parse import quote

from agent_cache.memory import FORGOTTEN, boundary, joined
from agent_cache.protocol import Chunk, End, LogKey, LogRead

Command = tuple[str | bytes | int, ...]
Entry = tuple[bytes, Mapping[bytes, bytes]]

BEGIN_ID = "0-1"
END_KIND = 2


def id_parts(entry_id: bytes) -> tuple[int, int]:
    """Position and kind of an entry."""
    position, _, kind = entry_id.partition(b"-")
    return int(position), int(kind)


@dataclass(frozen=True, slots=True)
class Layout:
    """The names and commands of one deployment's logs.

    `prefix` keeps deployments apart that share a Redis; `owner` tells this process from others;
    keys expire `ttl_s` after the last write, or up to `renew_s` later. Names are percent-encoded,
    so no tenant, program or agent can run into another, and a program's keys share a hash tag, so
    that they lie on one node of a cluster.
    """

    prefix: str
    owner: str
    ttl_s: float

    @property
    def renew_s(self) -> float:
        """How long a key's time to live need not be renewed, so that most writes are one command
        and not three.
        """
        return self.ttl_s / 16

    def log(self, key: LogKey) -> str:
        return self.log_named(key.tenant, key.program, _quoted(key.agent))

    def log_named(self, tenant: str, program: str, agent: str) -> str:
        """The log of an agent as the program's set names it."""
        return f"{self._program(tenant, program)}:log:{agent}"

    def agents(self, tenant: str, program: str) -> str:
        return f"{self._program(tenant, program)}:agents"

    def journal(self, tenant: str, key: str) -> tuple[str, str, str]:
        """A journal's lease, the list of its head and records, and who claimed it last."""
        named = self._program(tenant, key)
        return f"{named}:lease", f"{named}:journal", f"{named}:owner"

    def begin(self, key: LogKey) -> list[Command]:
        """First the entry that only one process can add, then what finds the log again."""
        agents = self.agents(key.tenant, key.program)
        return [
            ("XADD", self.log(key), BEGIN_ID, "owner", self.owner),
            ("SADD", agents, _quoted(key.agent)),
            *self.keep(key),
        ]

    def chunks(self, key: LogKey, chunks: Sequence[Chunk], position: int) -> Command:
        """Add `chunks`, with which the log reaches `position`, unless the log is gone."""
        return ("XADD", self.log(key), "NOMKSTREAM", f"{position}-0", "chunks", encode(chunks))

    def end(self, key: LogKey, position: int, end: End, detail: str) -> Command:
        """Add the end mark, unless the log is gone."""
        mark = f"{position}-{END_KIND}"
        return (
            "XADD",
            self.log(key),
            "NOMKSTREAM",
            mark,
            "end",
            end.value,
            "detail",
            _bytes(detail),
        )

    def keep(self, key: LogKey) -> list[Command]:
        """Count the time to live from now."""
        ttl_ms = max(1, round(1000 * (self.ttl_s + self.renew_s)))
        return [
            ("PEXPIRE", name, ttl_ms)
            for name in (self.log(key), self.agents(key.tenant, key.program))
        ]

    def delete(self, log: str) -> list[Command]:
        """Wake the log's blocked readers with an end mark, then delete it: a deletion alone wakes
        no reader.

        The mark's id is the server's time, which is greater than any position. The two must not
        become one
        transaction: readers are woken when it ends, and would then find the log deleted.
        """
        mark: Command = (
            "XADD",
            log,
            "NOMKSTREAM",
            "*",
            "end",
            End.ABORTED.value,
            "detail",
            FORGOTTEN,
        )
        return [mark, ("UNLINK", log)]

    def _program(self, tenant: str, program: str) -> str:
        return f"{self.prefix}:{{{_quoted(tenant)}:{_quoted(program)}}}"


def encode(chunks: Sequence[Chunk]) -> bytes:
    """The `chunks` field. Chunk by chunk, as readers may stand at any boundary between them."""
    listed = [(chunk.text, chunk.ids) for chunk in chunks]
    return _bytes(json.dumps(listed, ensure_ascii=False, separators=(",", ":")))


def decode(field: bytes) -> list[Chunk]:
    """Chunks of a `chunks` field; ValueError for anything else."""
    try:
        batch = [Chunk(text, tuple(ids)) for text, ids in json.loads(field)]
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not all(
        type(chunk.text) is str and all(type(id) is int and id >= 0 for id in chunk.ids)
        for chunk in batch
    ):
        raise ValueError("chunks are pairs of a text and token ids")
    return batch


DAMAGED = "What Redis has of the log is damaged."


def read_entries(entries: Sequence[Entry], position: int) -> tuple[LogRead, int]:
    """`entries`, the ones behind `position`, as one read, and how many of them make no sense and
    are skipped.

    A log that lacks what a skipped entry held ends as failed. ValueError for a position inside a
    chunk.
    """
    chunks: list[Chunk] = []
    reached = position
    skipped = 0
    for entry_id, fields in entries:
        start = reached
        at = id_parts(entry_id)[0]
        try:
            if b"end" in fields:
                end = End(fields[b"end"].decode())
            else:
                end = None
            batch = [] if end else decode(fields[b"chunks"])
        except (KeyError, ValueError):
            skipped += 1
            continue
        first = at if end else at - sum(map(len, batch))
        if (
            first > start and end is not End.ABORTED
        ):  # the mark of a deletion has a time for its position
            return joined(chunks, start, End.FAILED, DAMAGED), skipped
        if end:
            return joined(chunks, reached, end, _text(fields.get(b"detail", b""))), skipped
        reached = at
        chunks += batch[boundary(list(accumulate(map(len, batch), initial=first)), start) :]
    return joined(chunks, reached), skipped


@lru_cache(maxsize=8192)
def _quoted(name: str) -> str:
    return quote(name, safe="", errors="surrogatepass")


def _bytes(text: str) -> bytes:
    # A model's output may hold half a surrogate pair; it must come back as it went in.
    return text.encode("utf-8", "surrogatepass")


def _text(field: bytes) -> str:
    try:
        return field.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return field.decode("utf-8", "replace")
