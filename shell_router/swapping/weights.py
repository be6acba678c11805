"""Weights that replace others on running SGLang servers: what checkpoints hold, and the swap."""

import asyncio
import json
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import NamedTuple

import orjson
from safetensors import SafetensorError, safe_open

from shell_router.engines.server_client import ServerClient
from shell_router.errors import ConfigError, EngineRejected, EngineStalled


class TensorShape(NamedTuple):
    """A tensor's type, as safetensors names it, and sizes."""

    dtype: str
    sizes: tuple[int, ...]


def read_tensors(folder: Path) -> Mapping[str, TensorShape]:
    """Read the shapes of all tensors in the folder's safetensors files.

    Raises:
        ConfigError: There are no files, or one is cut off or has no valid header.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} holds no .safetensors file.",
            remedy="Name a folder with the model's weights.",
        )
    shapes: dict[str, TensorShape] = {}
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:  # checks that the file is whole
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    tensor = opened.get_slice(name)
                    shapes[name] = TensorShape(tensor.get_dtype(), tuple(tensor.get_shape()))
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"{file} is no whole safetensors file: {error}.", remedy="Save or copy it again."
            ) from error
    return shapes


READ_AT_START = ("config.json", "generation_config.json", "tokenizer.json")
IRRELEVANT = {"_name_or_path", "transformers_version", "use_cache"}
ABSENT = "nothing"


def obstacle_to_swap(served: Path, folder: Path) -> str:
    """Say why a server started with `served` cannot take the weights of `folder`.

    A swap replaces tensors alone: stop tokens, rope and tokenizer are those of the start, so they
    must be the same. Reads files. Returns an empty text if nothing is in the way.
    """
    try:
        before = read_tensors(served)
        after = read_tensors(folder)
        if names := _list_differences(before, after):
            return f"{len(names)} tensors differ in name, type or size, {names[0]} first"
        for file in READ_AT_START:
            begun = _read_settings(served / file)
            new = _read_settings(folder / file)
            for key in _list_differences(begun, new):
                if key not in IRRELEVANT:
                    was = short(begun.get(key, ABSENT))
                    now = short(new.get(key, ABSENT))
                    return f"its {file} differs in {key}: {now} instead of {was}"
    except (ConfigError, OSError, ValueError) as error:
        return str(error)
    return ""


def _list_differences(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    names = sorted(before.keys() | after.keys())
    return [name for name in names if before.get(name, ABSENT) != after.get(name, ABSENT)]


def _read_settings(file: Path) -> dict[str, object]:
    if not file.exists():
        return {}
    settings = json.loads(file.read_bytes())
    if isinstance(settings, dict):
        return settings
    return {"it": settings}


NOT_FLUSHED = "cache was not flushed"
FLUSH_LIMIT_S = 10.0
FLUSH_EVERY_S = 0.05


async def swap_weights(servers: Iterable[ServerClient], folder: Path, limit_s: float) -> None:
    """Replace the weights of all servers by those of `folder`, and drop the KV of those before.

    Raises EngineError; then nothing is known of what any of the servers holds.
    """
    await run_all(read_weights(server, folder, limit_s) for server in servers)


async def run_all(work: Iterable[Awaitable[None]]) -> None:
    """Run all to their ends at the same time; raise the first failure in the order of `work`."""
    for failure in await asyncio.gather(*work, return_exceptions=True):
        if failure is not None:
            raise failure


async def read_weights(server: ServerClient, folder: Path | str, limit_s: float) -> None:
    """Have the server read the weights of `folder`, and drop the KV of those before.

    A server waits for running requests. Some of a pair's requests end a moment after they were
    answered, and a server does not drop its KV before: it is asked again then.
    """
    body = orjson.dumps({"model_path": str(folder), "flush_cache": True})
    try:
        await server.post("update_weights_from_disk", body, limit_s=limit_s)
    except EngineRejected as error:
        if NOT_FLUSHED not in str(error):
            raise
        await flush_cache(server, limit_s)


async def flush_cache(server: ServerClient, limit_s: float) -> None:
    """Have the server drop its KV, which it does once it is idle. Raises EngineStalled."""
    flush_s = min(FLUSH_LIMIT_S, limit_s)
    try:
        async with asyncio.timeout(flush_s):
            while True:
                try:
                    await server.post("flush_cache", b"{}", limit_s=limit_s)
                    return
                except EngineRejected:
                    await asyncio.sleep(FLUSH_EVERY_S)
    except TimeoutError:
        raise EngineStalled(
            f"The {server.name} did not drop its KV within {flush_s:g} s.",
            remedy="Send no other requests to an engine whose models take turns.",
        ) from None
