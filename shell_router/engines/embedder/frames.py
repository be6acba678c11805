"""What the router and its embedding process say to each other, over two pipes.

    request   kind: u8, call: u64, bytes: u32, then the text in UTF-8
    answer    kind: u8, call: u64, rows: u32, columns: u32, then rows * columns float32 (STATES),
              or `rows` bytes of message in UTF-8 (FAILED)

Answers come in any order. Call 0 is never asked: its answer says that the model is loaded (STATES, empty) or
why it could not be (FAILED). Both ends are on one machine, so floats are in its byte order.
"""

import struct
from enum import IntEnum
from typing import Protocol

import numpy as np

from shell_router.core.embedding import TokenStates

LOADED = 0

REQUEST = struct.Struct("<BQI")
ANSWER = struct.Struct("<BQII")


class Ask(IntEnum):
    """A request's kind."""

    EMBED = 0
    FORGET = 1


class Reply(IntEnum):
    """An answer's kind."""

    STATES = 0
    FAILED = 1


class ByteSink(Protocol):
    """Where a frame is written to."""

    def write(self, frame: bytes, /) -> object: ...

    def flush(self) -> object: ...


def request(kind: Ask, call: int, text: str = "") -> bytes:
    """One request. What UTF-8 cannot hold of `text` (lone surrogates) is replaced by question marks."""
    body = text.encode(errors="replace")
    return REQUEST.pack(kind, call, len(body)) + body


def write_states(sink: ByteSink, call: int, states: TokenStates) -> None:
    """Answer `call` with its states [tokens, features]."""
    rows, columns = states.shape
    sink.write(ANSWER.pack(Reply.STATES, call, rows, columns))
    sink.write(states.tobytes())
    sink.flush()


def write_loaded(sink: ByteSink) -> None:
    """Say that the model is loaded."""
    write_states(sink, LOADED, np.empty((0, 0), dtype=np.float32))


def write_failure(sink: ByteSink, call: int, message: str) -> None:
    """Answer `call` with the reason why there are no states."""
    body = message.encode(errors="replace")
    sink.write(ANSWER.pack(Reply.FAILED, call, len(body), 0) + body)
    sink.flush()
