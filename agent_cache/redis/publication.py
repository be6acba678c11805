"""How far one log of this process has come in Redis."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from redis.exceptions import ResponseError

from agent_cache.log import Log
from agent_cache.protocol import LogKey
from agent_cache.redis.layout import END_KIND, Command, Entry, Layout, id_parts

CHUNKS_PER_ENTRY = 256
"""With the publisher's logs per round it bounds how long catching up holds the event loop: some 20 ms."""


class Outcome(Enum):
    """What became of a log's writes."""

    PUBLISHED = auto()
    TAKEN = auto()
    GONE = auto()


@dataclass(frozen=True, slots=True)
class Writes:
    """Commands for one log, and where it stands once Redis has taken them. `entries` counts stream entries."""

    publication: "Publication"
    commands: list[Command]
    entries: int
    chunks: int
    ended: bool
    renewed_s: float


@dataclass(slots=True, eq=False)
class Publication:
    """One log's way to Redis: `chunks` of them are there, the begin mark if `begun`, the end mark if `ended`.

    Its keys' time to live was renewed at `renewed_s`. `answer` tells whoever asked for the log what became of its
    begin mark, None if Redis did not say. A `withdrawn` log is served to this process only.
    """

    key: LogKey
    log: Log = field(default_factory=Log)
    begun: bool = False
    chunks: int = 0
    ended: bool = False
    renewed_s: float = -math.inf
    withdrawn: bool = False
    answer: asyncio.Future[Outcome | None] | None = None

    @property
    def awaited(self) -> bool:
        """Whether somebody waits to hear whether the log could be begun."""
        return self.answer is not None and not self.answer.done()

    @property
    def pending(self) -> bool:
        """Whether there is anything to send."""
        behind = self.chunks < len(self.log.chunks) or (self.log.end is not None and not self.ended)
        return not self.withdrawn and (behind or not self.begun)

    def writes(self, layout: Layout, now_s: float) -> Writes:
        """What to send next: the begin mark alone, as another process may have set it, or what waits behind it."""
        if not self.begun:
            return Writes(self, layout.begin(self.key), 1, 0, ended=False, renewed_s=now_s)
        log, upto = self.log, min(len(self.log.chunks), self.chunks + CHUNKS_PER_ENTRY)
        ended = log.end is not None and upto == len(log.chunks)
        commands: list[Command] = []
        if self.chunks < upto:
            position = log.position_of(upto)
            commands.append(layout.chunks(self.key, log.chunks[self.chunks : upto], position))
        if log.end is not None and ended and not self.ended:
            commands.append(layout.end(self.key, log.position, log.end, log.detail))
        entries, renewed_s = len(commands), self.renewed_s
        if ended or now_s >= renewed_s + layout.renew_s:
            commands, renewed_s = commands + layout.keep(self.key), now_s
        return Writes(self, commands, entries, upto, ended, renewed_s)

    def settle(self, writes: Writes, replies: Sequence[object]) -> Outcome:
        """Take note of Redis's `replies`. Raises the first error that is not an answer."""
        refusal = replies[0]
        if not self.begun and isinstance(refusal, ResponseError) and "equal or smaller" in str(refusal):
            return Outcome.TAKEN
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        if any(reply is None for reply in replies[: writes.entries]):
            return Outcome.GONE
        self.begun, self.chunks, self.ended = True, writes.chunks, writes.ended
        self.renewed_s = writes.renewed_s
        return Outcome.PUBLISHED

    def resume(self, first: Sequence[Entry], last: Sequence[Entry], owner: str) -> bool:
        """Go on from a stream's first and last entry, found after an outage.

        False if it is another process's, or another process was about to delete it.
        """
        self.begun, self.chunks, self.ended, self.renewed_s = bool(first), 0, False, -math.inf
        if not first:
            return True
        if first[0][1].get(b"owner") != owner.encode():
            return False
        position, kind = id_parts(last[0][0])
        if position > self.log.position:
            return False
        self.chunks = self.log.index_of(position)
        self.ended = kind == END_KIND
        return True
