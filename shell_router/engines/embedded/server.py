"""One server process of a pair, from loading the model to the last request."""

import asyncio
import logging
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import aiohttp
import torch
import uvloop
from aiohttp import web

from shell_router.engines.embedded.adapter_reader import AdapterReader
from shell_router.engines.embedded.app import EngineApp
from shell_router.engines.embedded.causal_lm import CausalLm, load_causal_lm
from shell_router.engines.embedded.decode_service import DecodeService
from shell_router.engines.embedded.inflight import InflightRequests
from shell_router.engines.embedded.kv_transfer import KvClient
from shell_router.engines.embedded.loaded_adapters import LoadedAdapters
from shell_router.engines.embedded.prefill_service import PrefillService
from shell_router.engines.embedded.rooms import Rooms
from shell_router.engines.embedded.service import Service
from shell_router.engines.embedded.settings import LoraSettings, ServerSettings
from shell_router.errors import ConfigError

logger = logging.getLogger(__name__)
SHUTDOWN_LIMIT_S = 3.0


@dataclass(frozen=True, slots=True)
class Listening:
    """The ports that a server really took; `bootstrap_port` is 0 on a decode server."""

    port: int
    bootstrap_port: int


def run_server(settings: ServerSettings, on_listening: Callable[[Listening], None]) -> None:
    """Load the model and serve until SIGTERM or SIGINT. Blocks; call in a process of its own."""
    if settings.pair.cores:
        _stay_on(settings.pair.cores)
    torch.set_num_threads(settings.pair.threads)
    lm = load_causal_lm(settings.pair)
    uvloop.run(_serve(settings, lm, on_listening))


def _stay_on(cores: Collection[int]) -> None:
    """Let this process run on `cores` alone. Raises ConfigError."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("cores can be chosen on Linux only.", remedy="Leave embedded.cores out.")
    known = os.sched_getaffinity(0)
    if unknown := set(cores) - known:
        raise ConfigError(
            f"there is no core {min(unknown)} for it; there are {', '.join(map(str, sorted(known)))}.",
            remedy="Correct embedded.cores.",
        )
    os.sched_setaffinity(0, cores)


async def _serve(settings: ServerSettings, lm: CausalLm, on_listening: Callable[[Listening], None]) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    rooms = Rooms(wait_s=settings.pair.kv_wait_s)
    async with _bootstrap(settings, rooms) as bootstrap_port:
        inflight = InflightRequests()
        async with (
            _service(settings, lm, rooms, inflight) as service,
            _adapters(settings.pair.lora, lm, service) as adapters,
            _listen(settings) as (listener, port),
        ):
            taken = replace(settings, port=port, bootstrap_port=bootstrap_port)
            async with _site(EngineApp(taken, lm, service, inflight, adapters).application(), listener):
                on_listening(Listening(port, bootstrap_port))
                await stopped.wait()
                inflight.abort_all()


@asynccontextmanager
async def _service(
    settings: ServerSettings, lm: CausalLm, rooms: Rooms, inflight: InflightRequests
) -> AsyncIterator[Service]:
    # KV may take long to come and is large: no total limit but the client's own, and no limit on connections.
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    ) as session:
        service: Service
        if settings.mode == "prefill":
            service = PrefillService(settings.pair, lm, rooms, random.Random())
        else:
            kv = KvClient(session, wait_s=settings.pair.kv_wait_s)
            service = DecodeService(settings.pair, lm, kv, inflight, random.Random())
        try:
            yield service
        finally:
            await service.stop()


@asynccontextmanager
async def _adapters(lora: LoraSettings | None, lm: CausalLm, service: Service) -> AsyncIterator[LoadedAdapters]:
    shapes = {} if lm.adapted is None else lm.adapted.shapes
    max_rank, room = (0, 0) if lora is None else (lora.max_rank, lora.room)
    read = AdapterReader(shapes, max_rank=max_rank, dtype=lm.kv_shape.dtype, device=lm.kv_shape.device)
    adapters = LoadedAdapters(room, read, service.forget)
    try:
        yield adapters
    finally:
        await adapters.stop()


@asynccontextmanager
async def _bootstrap(settings: ServerSettings, rooms: Rooms) -> AsyncIterator[int]:
    """The prefill server's second port; nothing on a decode server."""
    if settings.mode == "decode":
        yield 0
        return
    with socket.create_server((settings.pair.host, settings.bootstrap_port)) as listener:
        async with _site(rooms.application(), listener):
            yield listener.getsockname()[1]


@asynccontextmanager
async def _listen(settings: ServerSettings) -> AsyncIterator[tuple[socket.socket, int]]:
    with socket.create_server((settings.pair.host, settings.port), backlog=512) as listener:
        yield listener, listener.getsockname()[1]


@asynccontextmanager
async def _site(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    # A client that goes away cancels its request's task: that is how a disconnect aborts.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_LIMIT_S)
    await runner.setup()
    try:
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await runner.cleanup()
