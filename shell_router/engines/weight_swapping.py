"""Models that take turns: what checkpoints hold, which fit a running server, SGLang's swap of
weights, its sleep.
"""

import asyncio
import json
import struct
from collections.abc import Awaitable, Iterable, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any, BinaryIO, NamedTuple

import orjson

from shell_router.engines.server_client import ServerClient
from shell_router.engines.wire import broken_wire
from shell_router.errors import ConfigError, EngineRejected, EngineStalled
from shell_router.routing.failures import INTERNAL_ERROR

NO_TENSOR = "__metadata__"
UNREADABLE = (OSError, ValueError, ArithmeticError, MemoryError, struct.error)


def read_header(opened: BinaryIO) -> dict[str, dict[str, Any]]:
    """Per tensor its `dtype`, `shape` and `data_offsets`; the file then stands at its data, from
    which they count.

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

    Raises ConfigError where there are none, or one of the files is not whole: cut off, or with a
    header that is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} holds no .safetensors file.",
            remedy="Name a folder with the model's weights.",
        )
    found: dict[str, TensorShape] = {}
    for file in files:
        try:
            with file.open("rb") as opened:
                tensors = read_header(opened)
                begin = opened.tell()
            ends = max((one["data_offsets"][1] for one in tensors.values()), default=0)
            found |= {
                name: TensorShape(one["dtype"], tuple(one["shape"]))
                for name, one in tensors.items()
            }
        except (*UNREADABLE, LookupError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{file} is no safetensors file: {error}.", remedy="Save or copy it again."
            ) from error
        if file.stat().st_size != begin + ends:
            raise ConfigError(
                f"{file} is not whole: it ends too early or too late.",
                remedy="Save or copy it again.",
            )
    return found


READ_AT_START = ("config.json", "generation_config.json", "tokenizer.json")
IRRELEVANT = {"_name_or_path", "transformers_version", "use_cache"}
ABSENT = "nothing"


def obstacle_to_swap(served: Path, wanted: Path) -> str:
    """Why a server that was started with `served` cannot take the weights of `wanted`; empty where
    it can. Blocks.

    A swap replaces tensors alone. Stop tokens, rope and tokenizer are those of the start, so they
    must be the same.
    """
    try:
        one = read_tensors(served)
        other = read_tensors(wanted)
        if names := sorted(
            name for name in one.keys() | other.keys() if one.get(name) != other.get(name)
        ):
            return f"{len(names)} tensors differ in name, type or size, {names[0]} first"
        for file in READ_AT_START:
            begun = _settings(served / file)
            new = _settings(wanted / file)
            for key in sorted((begun.keys() | new.keys()) - IRRELEVANT):
                if (was := begun.get(key, ABSENT)) != (now := new.get(key, ABSENT)):
                    return f"its {file} differs in {key}: {short(now)} instead of {short(was)}"
    except (ConfigError, OSError, ValueError) as error:
        return str(error)
    return ""


def _settings(file: Path) -> dict[str, object]:
    if file.exists():
        found = json.loads(file.read_bytes())
    else:
        found = {}
    if isinstance(found, dict):
        return found
    return {"it": found}


NOT_FLUSHED = "cache was not flushed"
FLUSH_LIMIT_S = 10.0
FLUSH_EVERY_S = 0.05


async def swap_weights(servers: Iterable[ServerClient], folder: Path, limit_s: float) -> None:
    """Replace the weights of all these servers by those of `folder`, and drop all KV of those
    before.

    A server waits for requests that run. Some of a pair's end a moment after they were answered,
    and a server does not drop its KV before: it is asked again then. Raises EngineError; then
    nothing is known of what any of them holds.
    """
    await on_each(_swap(server, folder, limit_s) for server in servers)


async def on_each(work: Iterable[Awaitable[None]]) -> None:
    """Do it all, at the same time and to its end; raises the failure of the first in `work` that
    failed.
    """
    if failed := [one for one in await asyncio.gather(*work, return_exceptions=True) if one]:
        raise failed[0]


async def _swap(server: ServerClient, folder: Path | str, limit_s: float) -> None:
    body = orjson.dumps({"model_path": str(folder), "flush_cache": True})
    try:
        await server.post("update_weights_from_disk", body, limit_s=limit_s)
    except EngineRejected as error:
        if NOT_FLUSHED not in str(error):
            raise
        await _flush(server, limit_s)


async def _flush(server: ServerClient, limit_s: float) -> None:
    """Have it drop its KV, which a server does once it has nothing to do."""
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


AWAKE = ""
ASLEEP = " (asleep)"
EMPTY = " (without weights)"
UNSETTLED = " (unsettled)"
"""What follows a server's own weight version while it sleeps, has no weights, or changes: SGLang
says nothing of it.

SGLang 0.5.23 ends where it is asked to sleep while it is busy or asleep, or to wake while it is
awake. The version is kept by the server, so that the mark outlives a router, and ends with the
memory that it stands for.
"""


async def fall_asleep(server: ServerClient, limit_s: float) -> None:
    """Have it give its GPU memory back, once it has nothing to do, unless it sleeps.

    Raises EngineStalled where it stays busy, EngineRejected where it refuses, is unsettled or still
    starts, and EngineError. (One that answers has yet to send itself a request to warm up, which
    would end it asleep.)
    """
    version, mark = await _marked(server)
    if mark == AWAKE:
        try:
            await server.get("health", limit_s=limit_s)
        except EngineRejected as error:
            words = f"The {server.name} still starts: it answers /health with {error.status}."
            raise EngineRejected(words, status=error.status, remedy="Ask again.") from error
    if mark != ASLEEP:
        await _flush(server, limit_s)
        await _change(server, "release_memory_occupation", version, (mark, ASLEEP), limit_s)


async def wake(server: ServerClient, limit_s: float) -> None:
    """Have it take GPU memory again, and read its weights again if it did not keep them, unless it
    is awake.

    Raises EngineRejected where it refuses or is unsettled, and EngineError.
    """
    version, mark = await _marked(server)
    if mark == ASLEEP:
        if (await server.info()).get("enable_weights_cpu_backup"):
            mark = AWAKE
        else:
            mark = EMPTY
        await _change(server, "resume_memory_occupation", version, (ASLEEP, mark), limit_s)
    if mark == EMPTY:
        await _swap(server, str((await server.info("model_info"))["model_path"]), limit_s)
        await _mark(server, version, limit_s)


async def require_sleep(server: ServerClient) -> None:
    """Raises EngineRejected for a server that cannot sleep, and EngineError."""
    info = await server.info()
    wanted = ""
    if info.get("device") == "cpu":
        wanted = (
            "Sleeping gives GPU memory back: start it on a GPU, or swap weights of one "
            "shape by swapping.pairs."
        )
    elif not info.get("enable_memory_saver"):
        wanted = "Start it with --enable-memory-saver."
    if wanted:
        raise EngineRejected(f"The {server.name} cannot sleep.", status=501, remedy=wanted)


async def _change(
    server: ServerClient, route: str, version: str, marks: tuple[str, str], limit_s: float
) -> None:
    """From one mark to another, to the end also where the caller is cancelled, within what the
    server's tasks have.
    """

    async def change() -> None:
        await _mark(server, version + UNSETTLED, limit_s)
        try:
            await server.post(route, b"{}", limit_s=limit_s)
        except EngineRejected:
            await _mark(server, version + marks[0], limit_s)
            raise
        await _mark(server, version + marks[1], limit_s)

    changing = server.tasks.start(change())
    changing.add_done_callback(
        lambda done: done.cancelled() or done.exception()
    )  # also where none waits for it
    await asyncio.shield(changing)


async def _mark(server: ServerClient, version: str, limit_s: float) -> None:
    body = orjson.dumps({"new_version": version, "abort_all_requests": False})
    await server.post("update_weight_version", body, limit_s=limit_s)


async def _marked(server: ServerClient) -> tuple[str, str]:
    """Its weight version, and what it is marked as. Raises EngineRejected where it is unsettled,
    and EngineError.
    """
    found = (await server.info("model_info")).get("weight_version")
    if not isinstance(found, str):
        raise broken_wire(server.name, "model_info without a weight_version")
    mark = next((one for one in (ASLEEP, EMPTY, UNSETTLED) if found.endswith(one)), AWAKE)
    if mark == UNSETTLED:
        words = f"The {server.name} was left in between sleep and waking; its memory may be taken."
        raise EngineRejected(words, status=INTERNAL_ERROR, remedy="Restart it.")
    return found.removesuffix(mark), mark
