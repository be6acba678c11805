"""One server of an embedded pair, as a process."""

import asyncio
import logging
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import torch
import uvloop
from aiohttp import web

from shell_router.errors import ConfigError
from shell_router.standins.embedded.app import EngineApp
from shell_router.standins.embedded.decode import DecodeService
from shell_router.standins.embedded.kv_transfer import BootstrapRooms, KvClient
from shell_router.standins.embedded.model import CausalLm, load_causal_lm
from shell_router.standins.embedded.prefill import PrefillService
from shell_router.standins.embedded.sampling import Grammars
from shell_router.standins.embedded.service import Service
from shell_router.standins.embedded.settings import ServerSettings

logger = logging.getLogger(__name__)

SHUTDOWN_LIMIT_S = 3.0
BACKLOG = 2048
"""Connections that wait to be accepted, as many as at SGLang's server. A further one is tried again
after 1 s, then after 2 s, and only then refused if the server has died.
"""


def run_in_child(connection: Connection, settings: ServerSettings) -> None:
    """Serve in a `PythonProcess`, and send it the two ports that were taken."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(process)d %(name)s %(levelname)s %(message)s"
    )
    try:
        run_server(settings, lambda taken: connection.send((taken.port, taken.bootstrap_port)))
    except Exception:
        logger.exception("The server failed")
        raise


def run_server(
    settings: ServerSettings,
    on_listening: Callable[[ServerSettings], None],
    app: type[EngineApp] = EngineApp,
) -> None:
    """Load the model and serve `app` until SIGTERM or SIGINT. Blocks; call in a process of its own.

    `on_listening` gets the settings with the ports that were taken.
    """
    _limit_cores(settings.pair.cores)
    torch.set_num_threads(settings.pair.threads)
    lm = load_causal_lm(settings.pair)
    uvloop.run(_serve(settings, lm, on_listening, app))


def _limit_cores(cores: Collection[int]) -> None:
    """Let this process run on `cores` alone, unless there are none. Raises ConfigError."""
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("cores can be chosen on Linux only.", remedy="Leave embedded.cores out.")
    available = os.sched_getaffinity(0)
    if missing := set(cores) - available:
        raise ConfigError(
            f"there is no core {min(missing)} for it; there are "
            f"{', '.join(map(str, sorted(available)))}.",
            remedy="Correct embedded.cores.",
        )
    os.sched_setaffinity(0, cores)


async def _serve(
    settings: ServerSettings,
    lm: CausalLm,
    on_listening: Callable[[ServerSettings], None],
    app: type[EngineApp],
) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    pair = settings.pair
    async with AsyncExitStack() as stack:
        bootstrap_port = 0
        service: Service[Any, Any]
        if settings.mode == "prefill":
            rooms = BootstrapRooms(wait_s=pair.kv_wait_s)
            listener = stack.enter_context(
                socket.create_server((pair.host, settings.bootstrap_port))
            )
            bootstrap_port = listener.getsockname()[1]
            await stack.enter_async_context(run_site(rooms.application(), listener))
            service = PrefillService(pair, lm, rooms, random.Random())
        else:
            # KV may take long to come and is large: no total limit but the client's own, and no
            # limit on connections
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=timeout
            )
            kv = KvClient(
                await stack.enter_async_context(session), lm.kv_shape, wait_s=pair.kv_wait_s
            )
            service = DecodeService(pair, lm, kv, random.Random())
        stack.push_async_callback(service.stop)
        listener = stack.enter_context(socket.create_server((pair.host, settings.port)))
        taken = replace(settings, port=listener.getsockname()[1], bootstrap_port=bootstrap_port)
        async with run_site(app(taken, lm, service, Grammars(lm)).application(), listener):
            on_listening(taken)
            await stopped.wait()
            service.abort_all()


@asynccontextmanager
async def run_site(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    """Serve `app` on `listener` while the context is open."""
    # A client that goes away cancels its request's task: that is how a disconnect aborts.
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_LIMIT_S
    )
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        yield
    finally:
        await runner.cleanup()
