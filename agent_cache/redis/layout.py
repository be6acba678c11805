"""The form of logs in Redis: names of keys, and the entries of a stream. No I/O.

A log is one stream. An entry's id is `<position>-<kind>`, where the position is the log's length
including the entry. Ids grow by themselves, so a write that is sent twice is refused the second
time.

    0-1             begun; field `owner` names the process that writes, `leased` says that it
                    holds a lease while it has open logs
    <position>-0    chunks; field `chunks` is JSON, [[text, [id, ...]], ...]; field `vocabulary` if
                    all have the same
    <position>-2    end mark; fields `end` and `detail`
    <time>-0        end mark of another process, behind which its writer can add nothing

Each program has a set of its agents as well as its streams, so that it can be deleted without a
scan.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from urllib.parse import quote

from agent_cache.memory import FORGOTTEN, count_chunks_before, find_vocabulary, join_reads
from agent_cache.protocol import Chunk, End, LogKey, LogRead

Command = tuple[str | bytes | int, ...]
Entry = tuple[bytes, Mapping[bytes, bytes]]

BEGIN = """
redis.call('SADD', KEYS[2], ARGV[2])
local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
if first then return first[2][2] end
redis.call('XADD', KEYS[1], '0-1', 'owner', ARGV[1], 'leased', '1')
return ARGV[1]
"""
"""Begins a log unless it has begun; returns its owner. KEYS: log, agents; ARGV: owner, agent."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The names and commands of one deployment's logs.

    `prefix` separates deployments that share a Redis; `owner` names this process. Keys expire
    `ttl_s` after the last write, or up to `renew_s` later. Names are percent-encoded, so the keys
    of different tenants, programs and agents never collide. A program's keys share a hash tag, so
    they lie on one node of a cluster.
    """

    prefix: str
    owner: str
    ttl_s: float

    @property
    def renew_s(self) -> float:
        """The seconds for which a key's time to live need not be renewed.

        Most writes are therefore one command instead of three.
        """
        return self.ttl_s / 16

    def log(self, key: LogKey) -> str:
        """Return the key of the log's stream."""
        return self.log_of_quoted(key.tenant, key.program, _quote(key.agent))

    def log_of_quoted(self, tenant: str, program: str, agent: str) -> str:
        """Return the key of an agent's log; `agent` is quoted, as in the program's set."""
        return f"{self._program(tenant, program)}:log:{agent}"

    def agents(self, tenant: str, program: str) -> str:
        """Return the key of the set of a program's agents."""
        return f"{self._program(tenant, program)}:agents"

    def lease(self, owner: str) -> str:
        """Return the key that lives while the process `owner` writes logs."""
        return f"{self.prefix}:lease:{owner}"

    def journal(self, tenant: str, key: str) -> tuple[str, str, str]:
        """Return the keys of a journal's lease, of its list, and of its last owner."""
        name = self._program(tenant, key)
        return f"{name}:lease", f"{name}:journal", f"{name}:owner"

    def account(self, tenant: str, name: str) -> str:
        """Return the key of the hash of what an account has spent."""
        return f"{self._program(tenant, name)}:account"

    def begin(self, key: LogKey) -> list[Command]:
        """Begin the log, which only one process can, and keep the names by which it is found."""
        agents = self.agents(key.tenant, key.program)
        begin = ("EVAL", BEGIN, 2, self.log(key), agents, self.owner, _quote(key.agent))
        return [begin, *self.keep(key)]

    def chunks(self, key: LogKey, chunks: Sequence[Chunk], position: int) -> Command:
        """Add `chunks`, with which the log reaches `position`, unless the log is gone."""
        fields: Command = ("chunks", encode(chunks))
        if vocabulary := find_vocabulary(chunks):
            fields += ("vocabulary", vocabulary)
        return ("XADD", self.log(key), "NOMKSTREAM", f"{position}-0", *fields)

    def end(self, key: LogKey, position: int, end: End, detail: str) -> Command:
        """Add the end mark, unless the log is gone."""
        mark = f"{position}-2"
        return (
            "XADD",
            self.log(key),
            "NOMKSTREAM",
            mark,
            "end",
            end.value,
            "detail",
            _encode_text(detail),
        )

    def keep(self, key: LogKey) -> list[Command]:
        """Count the time to live from now."""
        ttl_ms = max(1, round(1000 * (self.ttl_s + self.renew_s)))
        return [
            ("PEXPIRE", name, ttl_ms)
            for name in (self.log(key), self.agents(key.tenant, key.program))
        ]

    def delete(self, log: str) -> list[Command]:
        """Wake the log's blocked readers with an end mark, then delete it.

        A deletion alone wakes no reader. The two commands must not become one transaction: readers
        are woken when it ends, and would then find the log deleted.
        """
        return [self.close(log, End.ABORTED, FORGOTTEN), ("UNLINK", log)]

    def close(self, log: str, end: End, detail: str) -> Command:
        """End another process's log, unless it is gone, so that Redis refuses its next writes.

        The mark's id is the server's time, which is greater than any position.
        """
        return ("XADD", log, "NOMKSTREAM", "*", "end", end.value, "detail", detail)

    def _program(self, tenant: str, program: str) -> str:
        return f"{self.prefix}:{{{_quote(tenant)}:{_quote(program)}}}"


def encode(chunks: Sequence[Chunk]) -> bytes:
    """Write the `chunks` field chunk by chunk, as readers may stand at any boundary of them."""
    listed = [(chunk.text, chunk.ids) for chunk in chunks]
    return _encode_text(json.dumps(listed, ensure_ascii=False, separators=(",", ":")))


def decode(field: bytes, vocabulary: str) -> list[Chunk]:
    """Read the chunks of a `chunks` field. Raises ValueError for anything else."""
    if len(field) > MOST_ENTRY_BYTES:
        raise ValueError(f"chunks of more than {MOST_ENTRY_BYTES} bytes")
    try:
        batch = [Chunk(text, tuple(ids), vocabulary) for text, ids in json.loads(field)]
        "".join([chunk.text for chunk in batch]).encode()  # no reply can hold half a surrogate pair
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not all(
        type(chunk.text) is str and all(type(id) is int and 0 <= id < 2**32 for id in chunk.ids)
        for chunk in batch
    ):
        raise ValueError("chunks are pairs of a text and token ids")
    return batch


DAMAGED = "What Redis has of the log is damaged."
FIRST_TIME_MS = 2**40
"""Greater numbers in ids are times, lower ones positions."""

MOST_ENTRY_BYTES = 2**24
"""The longest field that is read: parsing more would block the event loop for seconds."""


def read_entries(entries: Sequence[Entry], position: int) -> tuple[LogRead, int]:
    """Join the entries after `position` to one read; return it and the number of malformed entries.

    A log ends as failed at its first malformed entry, and where an entry is missing.

    Raises:
        ValueError: The position is inside a chunk.
    """
    chunks: list[Chunk] = []
    reached = position
    for entry_id, fields in entries:
        start = reached
        at = int(entry_id.partition(b"-")[0])
        try:
            if b"end" in fields:
                end = End(fields[b"end"].decode())
            else:
                end = None
            vocabulary = fields.get(b"vocabulary", b"").decode()
            batch = [] if end else decode(fields[b"chunks"], vocabulary)
        except (KeyError, ValueError):
            detail = f"{DAMAGED} Entry {entry_id.decode()} is neither chunks nor a known end."
            return join_reads(chunks, start, End.FAILED, detail), 1
        first = at if end else at - sum(map(len, batch))
        if first > start and at < FIRST_TIME_MS:
            return join_reads(chunks, start, End.FAILED, DAMAGED), 0
        if end:
            detail = fields.get(b"detail", b"").decode("utf-8", "replace")
            return join_reads(chunks, reached, end, detail), 0
        reached = at
        chunks += batch[
            count_chunks_before(list(accumulate(map(len, batch), initial=first)), start) :
        ]
    return join_reads(chunks, reached), 0


@lru_cache(maxsize=8192)
def _quote(name: str) -> str:
    return quote(name, safe="", errors="surrogatepass")


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # readers refuse it, and other logs go on
