"""Checkpoints that take turns on a running server: what they hold, which fit, and SGLang's swap of weights."""

import asyncio
import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from shell_router.engines.server_client import ServerClient
from shell_router.errors import ConfigError, EngineRejected, EngineStalled

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


READ_AT_START = ("config.json", "generation_config.json", "tokenizer.json")
IRRELEVANT = {"_name_or_path", "transformers_version"}


def differing_tensors(served: Path, wanted: Path) -> str:
    """What tells the weights of two folders apart; empty where they have one shape. Raises ConfigError. Blocks."""
    one, other = read_tensors(served), read_tensors(wanted)
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return f"{len(names)} tensors differ in name, type or size, {names[0]} first" if names else ""


def obstacle_to_swap(served: Path, wanted: Path) -> str:
    """Why a server that was started with `served` cannot take the weights of `wanted`; empty where it can. Blocks.

    A swap replaces tensors alone. Stop tokens, rope and tokenizer are those of the start, so they must be the same.
    """
    try:
        if tensors := differing_tensors(served, wanted):
            return tensors
        differing = [name for name in READ_AT_START if _settings(served / name) != _settings(wanted / name)]
    except (ConfigError, OSError, ValueError) as error:
        return str(error)
    return f"its {differing[0]} differs" if differing else ""


def _settings(file: Path) -> object:
    found = json.loads(file.read_bytes()) if file.exists() else None
    return {name: one for name, one in found.items() if name not in IRRELEVANT} if isinstance(found, dict) else found


NOT_FLUSHED = "cache was not flushed"
FLUSH_LIMIT_S, FLUSH_EVERY_S = 10.0, 0.05


async def swap_weights(servers: Iterable[ServerClient], folder: Path, limit_s: float) -> None:
    """Replace the weights of all these servers by those of `folder`, and drop all KV of those before.

    A server waits for requests that run. Some of a pair's end a moment after they were answered, and a server does not
    drop its KV before: it is asked again then. Raises EngineError; then nothing is known of what any of them holds.
    """
    swaps = (_swap(server, folder, limit_s) for server in servers)
    if failed := [one for one in await asyncio.gather(*swaps, return_exceptions=True) if one]:
        raise failed[0]


async def _swap(server: ServerClient, folder: Path, limit_s: float) -> None:
    body = orjson.dumps({"model_path": str(folder), "flush_cache": True})
    try:
        await server.post("update_weights_from_disk", body, limit_s=limit_s)
        return
    except EngineRejected as error:
        if NOT_FLUSHED not in str(error):
            raise
    try:
        async with asyncio.timeout(FLUSH_LIMIT_S):
            while True:
                try:
                    await server.post("flush_cache", b"{}", limit_s=limit_s)
                    return
                except EngineRejected:
                    await asyncio.sleep(FLUSH_EVERY_S)
    except TimeoutError:
        raise EngineStalled(
            f"The {server.name} did not drop its KV within {FLUSH_LIMIT_S:g} s.",
            remedy="Send no other requests to an engine whose weights are swapped.",
        ) from None
