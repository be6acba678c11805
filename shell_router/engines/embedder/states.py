"""Token states on their way between the router and its embedding process.

rows: u32, columns: u32, then rows * columns float32 in this machine's byte order
"""

import struct

import numpy as np

from shell_router.core.embedding import TokenStates

_SHAPE = struct.Struct("<II")


def packed_states(states: TokenStates) -> tuple[bytes, bytes]:
    """States [tokens, features] as an answer's pieces."""
    return _SHAPE.pack(*states.shape), states.tobytes()


def unpacked_states(body: bytearray) -> TokenStates:
    """The states of an answer; they share its memory."""
    rows, columns = _SHAPE.unpack_from(body)
    return np.frombuffer(body, dtype=np.float32, offset=_SHAPE.size).reshape(rows, columns)
