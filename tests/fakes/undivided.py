"""The engine kind `undivided`: servers that prefill and decode themselves, and their fake."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from shell_router.app.model_files import ModelFiles
from shell_router.app.wings import Progress, StartedEngine
from shell_router.config import Config
from shell_router.core.engine import Finish, Generation, Prefilled, Tokens
from shell_router.engines.address import PairLimits, Server
from shell_router.engines.fleet import Fleet
from shell_router.engines.server_client import ServerClient, Transport, take_slot
from shell_router.engines.wire import OutputReader, body_fields
from shell_router.http.client import HttpClient
from shell_router.http.tasks import TaskOwner
from shell_router.routing.dispatcher import Dispatcher
from shell_router.routing.failures import DEFAULT_BREAKER
from shell_router.routing.placement import PlacementRequest


@dataclass(frozen=True, slots=True)
class Section:
    """The section of a model that names its servers."""

    urls: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Undivided:
    """The address of a server."""

    url: str

    @property
    def servers(self) -> tuple[Server, ...]:
        return (Server("engine", URL(self.url)),)


@dataclass(frozen=True, slots=True)
class UndividedEngine:
    """See `Engine`."""

    fleet: Fleet[Undivided]

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        slot = await take_slot(self.fleet.dispatchers["engine"], PlacementRequest.of(request))
        server = slot.engine
        request.on_placed(slot.placement())
        exchange = server.begin("generate", orjson.dumps({**body_fields(request), "stream": True}))
        reader = OutputReader(server.name, logprobs=request.logprobs)
        try:
            await exchange.wait_for_head()
            while chunk := await exchange.read():
                if (tokens := reader.feed(chunk)) is not None:
                    slot.note_tokens(len(tokens.ids))
                    yield tokens
            assert reader.finish is not None
            yield reader.finish
        finally:
            slot.close()
            exchange.close()

    async def prefill(self, request: Generation) -> Prefilled:
        raise NotImplementedError


class UndividedKind:
    """See `EngineKind`."""

    settings: ClassVar[type] = Section

    @asynccontextmanager
    async def running(
        self, files: Mapping[str, ModelFiles], config: Config, on_progress: Progress
    ) -> AsyncIterator[Mapping[str, StartedEngine]]:
        limits = PairLimits()
        async with aclosing(_Connections()) as connections:
            engines = {}
            for alias in files:
                transport = Transport(
                    connections.http, connections.tasks, limits, DEFAULT_BREAKER, time.monotonic
                )
                dispatcher = Dispatcher[ServerClient]([], config.scheduling, time.monotonic)
                fleet = Fleet[Undivided](transport, {"engine": dispatcher})
                for url in config.models[alias].engine["undivided"].urls:
                    fleet.use(Undivided(url))
                await fleet.ready()
                engines[alias] = StartedEngine(
                    UndividedEngine(fleet),
                    "undivided engine",
                    8,
                    fleet,
                    read_address=lambda fields: Undivided(str(fields["engine"])),
                )
            yield engines


class _Connections:
    def __init__(self) -> None:
        self.http = HttpClient(connect_s=1.0)
        self.tasks = TaskOwner()

    async def aclose(self) -> None:
        await self.tasks.aclose(1.0)
        await self.http.aclose(1.0)


@dataclass(slots=True)
class FakeServer:
    """A server with SGLang's routes that answers `hi`."""

    healthy: bool = True
    requests: int = 0
    url: str = field(default="", init=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeServer"]:
        app = web.Application()
        app.add_routes([web.post("/generate", self._generate), web.get("/health", self._health)])
        async with TestServer(app) as server:
            self.url = str(server.make_url("")).removesuffix("/")
            yield self

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        body: Any = await request.json()
        meta = {
            "prompt_tokens": len(body["input_ids"]),
            "cached_tokens": 0,
            "completion_tokens": 2,
            "finish_reason": {"type": "stop"},
        }
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        event = orjson.dumps({"output_ids": [5, 6], "text": "hi", "meta_info": meta})
        await response.write(b"data: %b\n\ndata: [DONE]\n\n" % event)
        return response
