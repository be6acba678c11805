"""What a Hugging Face folder holds, read from its headers alone, and whether it is whole."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shell_router.errors import ConfigError

NO_TENSOR = "__metadata__"
UNREADABLE = (OSError, ValueError, ArithmeticError, MemoryError, struct.error)


def read_header(opened: BinaryIO) -> dict[str, dict[str, Any]]:
    """Per tensor its `dtype`, `shape` and `data_offsets`; the file then stands at its data, from which they count.

    Raises what is UNREADABLE for what is no safetensors file.
    """
    (length,) = struct.unpack("<Q", opened.read(8))
    header: dict[str, dict[str, Any]] = json.loads(opened.read(length))
    return {name: tensor for name, tensor in header.items() if name != NO_TENSOR}


class TensorShape(NamedTuple):
    """A tensor's type, as safetensors names it, and sizes."""

    dtype: str
    sizes: tuple[int, ...]


def read_tensors(folder: Path) -> Mapping[str, TensorShape]:
    """The tensors of all safetensors files in the folder.

    Raises ConfigError where there are none, or one of the files is not whole: cut off, or with a header that is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no .safetensors file.", remedy="Name a folder with the model's weights.")
    found: dict[str, TensorShape] = {}
    for file in files:
        try:
            with file.open("rb") as opened:
                tensors, begin = read_header(opened), opened.tell()
            ends = max((one["data_offsets"][1] for one in tensors.values()), default=0)
            found |= {name: TensorShape(one["dtype"], tuple(one["shape"])) for name, one in tensors.items()}
        except (*UNREADABLE, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file} is no safetensors file: {error}.", remedy="Save or copy it again.") from error
        if file.stat().st_size != begin + ends:
            raise ConfigError(f"{file} is not whole: it ends too early or too late.", remedy="Save or copy it again.")
    return found
