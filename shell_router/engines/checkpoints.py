"""What a Hugging Face folder holds, read from its headers alone: whether it is whole, and how much memory it takes."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from shell_router.engines.safetensors_header import read_header
from shell_router.errors import ConfigError

KEY_AND_VALUE = 2


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A tensor's type, as safetensors names it, and sizes."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return prod(self.sizes)


def read_config(folder: Path) -> Mapping[str, Any]:
    """The folder's config.json. Raises ConfigError."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/config.json cannot be read: {error}.", remedy="Name a model's folder.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{folder}/config.json holds no settings.", remedy="Name a model's folder.")
    return found


def read_tensors(folder: Path) -> Mapping[str, TensorShape]:
    """The tensors of all safetensors files in the folder.

    Raises ConfigError where there are none, or one of the files is not whole: cut off, or with a header that is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} holds no .safetensors file.", remedy="Name a folder with the model's weights.")
    found: dict[str, TensorShape] = {}
    for file in files:
        found.update(_read_header(file))
    return found


def _read_header(file: Path) -> Mapping[str, TensorShape]:
    try:
        with file.open("rb") as opened:
            tensors, begin = read_header(opened), opened.tell()
        ends = max((one["data_offsets"][1] for one in tensors.values()), default=0)
        shapes = {name: TensorShape(one["dtype"], tuple(one["shape"])) for name, one in tensors.items()}
    except (
        OSError,
        ValueError,
        struct.error,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        MemoryError,
    ) as error:
        raise ConfigError(f"{file} is no safetensors file: {error}.", remedy="Save or copy it again.") from error
    if file.stat().st_size != begin + ends:
        raise ConfigError(f"{file} is not whole: it ends too early or too late.", remedy="Save or copy it again.")
    return shapes


def weight_bytes(folder: Path, number_bytes: int) -> int:
    """Of the folder's weights, with so many bytes for each number. Raises ConfigError."""
    return number_bytes * sum(one.elements for one in read_tensors(folder).values())


def kv_token_bytes(folder: Path, number_bytes: int) -> int:
    """Of one token's keys and values in all layers. Raises ConfigError where the config does not tell."""
    config = read_config(folder)
    try:
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return int(KEY_AND_VALUE * config["num_hidden_layers"] * kv_heads * head * number_bytes)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder}/config.json does not say how large keys and values are: {error}.",
            remedy="Name a causal LM with full attention.",
        ) from error
