"""Put SGLang servers to sleep, which frees their GPU memory, and wake them.

SGLang 0.5.23 does not report whether it sleeps. It crashes if it is asked to sleep while it is busy
or asleep, or to wake while it is awake. So a mark at the end of the server's weight version says
that it sleeps, has no weights, or is changing. The server keeps the version, so the mark outlives a
restart of the router, and is gone when the server's process is.
"""

import asyncio
from collections.abc import Iterable

import orjson

from shell_router.engines.server_client import ServerClient
from shell_router.engines.wire import wire_error
from shell_router.errors import EngineRejected
from shell_router.routing.failures import INTERNAL_ERROR
from shell_router.swapping.weights import flush_cache, read_weights, run_all

AWAKE = ""
ASLEEP = " (asleep)"
EMPTY = " (without weights)"
UNSETTLED = " (unsettled)"


async def put_to_sleep(servers: Iterable[ServerClient], limit_s: float) -> None:
    """Put servers to sleep that have just started. Raises EngineError."""
    started = list(servers)
    await run_all(require_sleep(server) for server in started)
    await run_all(fall_asleep(server, limit_s) for server in started)


async def fall_asleep(server: ServerClient, limit_s: float) -> None:
    """Have the server give its GPU memory back once it is idle, unless it sleeps.

    A server that has just started still sends itself a request to warm up, and would crash if it
    slept by then. So it must be healthy first.

    Raises:
        EngineStalled: The server stays busy.
        EngineRejected: The server refuses, is unsettled, or still starts.
        EngineError: The server fails otherwise.
    """
    version, mark = await _read_mark(server)
    if mark == AWAKE:
        try:
            await server.get("health", limit_s=limit_s)
        except EngineRejected as error:
            words = f"The {server.name} is still starting: it answers /health with {error.status}."
            raise EngineRejected(words, status=error.status, remedy="Ask again.") from error
    if mark != ASLEEP:
        await flush_cache(server, limit_s)
        await _change(server, "release_memory_occupation", version, mark, ASLEEP, limit_s)


async def wake(server: ServerClient, limit_s: float) -> None:
    """Give the server its GPU memory back, and have it read its weights unless it kept them.

    Raises:
        EngineRejected: The server refuses, or is unsettled.
        EngineError: The server fails otherwise.
    """
    version, mark = await _read_mark(server)
    if mark == ASLEEP:
        keeps_weights = (await server.info()).get("enable_weights_cpu_backup")
        mark = EMPTY
        if keeps_weights:
            mark = AWAKE
        await _change(server, "resume_memory_occupation", version, ASLEEP, mark, limit_s)
    if mark == EMPTY:
        model_info = await server.info("model_info")
        await read_weights(server, str(model_info["model_path"]), limit_s)
        await _set_version(server, version, limit_s)


async def require_sleep(server: ServerClient) -> None:
    """Raise EngineRejected if the server cannot sleep, or EngineError if it does not answer."""
    info = await server.info()
    if info.get("device") == "cpu":
        remedy = (
            "Sleeping gives GPU memory back: start it on a GPU, or swap weights of one "
            "shape by swapping.pairs."
        )
    elif not info.get("enable_memory_saver"):
        remedy = "Start it with --enable-memory-saver."
    else:
        return
    raise EngineRejected(f"The {server.name} cannot sleep.", status=501, remedy=remedy)


async def _change(
    server: ServerClient, route: str, version: str, before: str, after: str, limit_s: float
) -> None:
    """Post `route` and change the mark; if the caller is cancelled, both are still completed.

    At the router's end the server's tasks are cancelled after their own limit.
    """

    async def change() -> None:
        await _set_version(server, version + UNSETTLED, limit_s)
        try:
            await server.post(route, b"{}", limit_s=limit_s)
        except EngineRejected:
            await _set_version(server, version + before, limit_s)
            raise
        await _set_version(server, version + after, limit_s)

    changing = server.tasks.start(change())
    # the error counts as retrieved even if the waiting caller was cancelled
    changing.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.shield(changing)


async def _set_version(server: ServerClient, version: str, limit_s: float) -> None:
    body = orjson.dumps({"new_version": version, "abort_all_requests": False})
    await server.post("update_weight_version", body, limit_s=limit_s)


async def _read_mark(server: ServerClient) -> tuple[str, str]:
    """Return the weight version and its mark.

    Raises EngineRejected if the server is unsettled, and EngineError.
    """
    version = (await server.info("model_info")).get("weight_version")
    if not isinstance(version, str):
        raise wire_error(server.name, "model_info without a weight_version")
    mark = AWAKE
    for ending in (ASLEEP, EMPTY, UNSETTLED):
        if version.endswith(ending):
            mark = ending
    if mark == UNSETTLED:
        words = (
            f"The {server.name} was left halfway between sleeping and waking; its GPU memory may "
            "be taken."
        )
        raise EngineRejected(words, status=INTERNAL_ERROR, remedy="Restart it.")
    return version.removesuffix(mark), mark
