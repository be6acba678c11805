"""What the router and a process beside it say to each other, over two pipes.

    request   kind: u8, call: u64, bytes: u32, then the body
    answer    kind: u8, call: u64, bytes: u64, then the body (DONE), or a message in UTF-8 (FAILED)

What a body holds is between the two. Answers come in any order. Call 0 is never asked: its answer says that the
process is ready (DONE, empty) or why it could not be (FAILED). Both ends are on one machine.
"""

import struct
from enum import IntEnum
from typing import Protocol

READY = 0

REQUEST = struct.Struct("<BQI")
ANSWER = struct.Struct("<BQQ")


class Ask(IntEnum):
    """A request's kind."""

    DO = 0
    FORGET = 1


class Reply(IntEnum):
    """An answer's kind."""

    DONE = 0
    FAILED = 1


class ByteSink(Protocol):
    """Where a frame is written to."""

    def write(self, frame: bytes, /) -> object: ...

    def flush(self) -> object: ...


def request(kind: Ask, call: int, body: bytes = b"") -> bytes:
    """One request."""
    return REQUEST.pack(kind, call, len(body)) + body


def write_done(sink: ByteSink, call: int, *body: bytes) -> None:
    """Answer `call` with a body, given in pieces."""
    sink.write(ANSWER.pack(Reply.DONE, call, sum(map(len, body))))
    for piece in body:
        sink.write(piece)
    sink.flush()


def write_ready(sink: ByteSink) -> None:
    """Say that requests can be answered."""
    write_done(sink, READY)


def write_failure(sink: ByteSink, call: int, message: str) -> None:
    """Answer `call` with the reason why there is nothing."""
    body = message.encode(errors="replace")
    sink.write(ANSWER.pack(Reply.FAILED, call, len(body)) + body)
    sink.flush()
