"""What a safetensors file says of itself at its beginning."""

import json
import struct
from typing import Any, BinaryIO

LENGTH_BYTES = 8
NO_TENSOR = "__metadata__"


def read_header(opened: BinaryIO) -> dict[str, dict[str, Any]]:
    """Per tensor its `dtype`, `shape` and `data_offsets`; the file then stands at its data, from which they count.

    Raises OSError, ValueError, OverflowError, MemoryError or struct.error for what is no safetensors file.
    """
    (length,) = struct.unpack("<Q", opened.read(LENGTH_BYTES))
    header: dict[str, dict[str, Any]] = json.loads(opened.read(length))
    return {name: told for name, told in header.items() if name != NO_TENSOR}
