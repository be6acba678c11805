"""Weights from a file, in memory once. Imports torch."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from shell_router.engines.safetensors_header import read_header

Weights = Mapping[str, torch.Tensor]
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_weights(file: Path) -> Weights:
    """The tensors of a safetensors file or of a torch one, on the CPU.

    Those of safetensors are read into the memory where they stay, all of them into one block: neither mapped, since the
    system may drop what is mapped and read it again at any time, nor there a second time meanwhile. Raises what
    safetensors, torch and the system raise for a file that is missing, cut off or malformed.
    """
    if file.suffix != ".safetensors":
        weights: Weights = torch.load(file, map_location="cpu", weights_only=True)
        return weights
    with safe_open(file, framework="pt"):
        pass  # has the header checked: offsets, shapes and the file's length agree
    with file.open("rb") as data:
        header = read_header(data)
        block = torch.empty(file.stat().st_size - data.tell(), dtype=torch.uint8)
        read = data.readinto(block.numpy().data)
    if read < block.numel():
        raise EOFError(f"{file} was cut off while it was read")
    return {name: _tensor(block, **told) for name, told in header.items()}


def _tensor(block: torch.Tensor, dtype: str, shape: list[int], data_offsets: list[int]) -> torch.Tensor:
    begin, end = data_offsets
    if dtype not in _DTYPES:
        raise TypeError(f"weights of the kind {dtype} cannot be read; save them as one of {', '.join(_DTYPES)}")
    part, kind = block[begin:end], _DTYPES[dtype]
    if begin % kind.itemsize:
        part = part.clone()  # at an address where its kind may lie
    return part.view(kind).reshape(shape)
