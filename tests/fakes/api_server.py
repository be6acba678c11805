"""The whole API over scripted engines, listening on a free port, with a client that speaks to it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

import aiohttp

from shell_router.api import ApiSettings, BatchFolder, Runs, Services, bound_sockets, create_app, listening
from shell_router.core.placement import Placed
from shell_router.core.relay import NativeRoute, Relayed
from shell_router.errors import InvalidRequest
from shell_router.telemetry import Metrics, Recorder
from shell_router.topology import Agent, Prompt, Topology
from tests.fakes.moa import ScriptedMoa

LIMIT = aiohttp.ClientTimeout(total=60)

DUO = Topology(
    name="duo",
    agents={
        "left": Agent("left", "small"),
        "right": Agent("right", "medium", on_failure="drop"),
        "root": Agent("root", "large", ("left", "right"), Prompt(prefix="Sum up.\n", suffix="\n{question}")),
    },
    description="two agents and one that sums up",
)


@dataclass
class ScriptedRelay:
    """Answers native requests with `chunks`, waiting at `gate` before all but the first; keeps what it was sent."""

    chunks: tuple[bytes, ...] = (b'{"text":"ok"}',)
    content_type: str = "application/json"
    status: int = 200
    error: Exception | None = None
    gate: asyncio.Event | None = None
    forwarded: list[tuple[NativeRoute, bytes]] = field(default_factory=list)
    affinities: list[str | None] = field(default_factory=list)
    left_early: int = 0
    placed: tuple[Placed, ...] = ()

    @contextlib.asynccontextmanager
    async def forward(self, route: NativeRoute, body: bytes, *, affinity: str | None = None) -> AsyncIterator[Relayed]:
        if not body.startswith(b"{"):
            raise InvalidRequest("The body is not a JSON object.")
        self.forwarded.append((route, body))
        self.affinities.append(affinity)
        self._ended = False
        try:
            yield Relayed(self.status, self.content_type, self._answer(), self.placed)
        finally:
            self.left_early += not self._ended

    async def _answer(self) -> AsyncIterator[bytes]:
        for place, chunk in enumerate(self.chunks):
            if place and self.gate:
                await self.gate.wait()
            yield chunk
        if self.error:
            raise self.error
        self._ended = True


@dataclass(frozen=True)
class Api:
    """A running API: its address, what is behind it, and a client session."""

    url: str
    moa: ScriptedMoa
    services: Services
    client: aiohttp.ClientSession

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, dict]:  # type: ignore[type-arg]
        """Status and JSON of the answer."""
        async with self.client.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str, **headers: str) -> tuple[int, dict]:  # type: ignore[type-arg]
        """Status and JSON of the answer."""
        async with self.client.get(self.url + path, headers=headers) as response:
            return response.status, await response.json()

    def stream(
        self, body: object, path: str = "/v1/chat/completions"
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """A streamed request under way."""
        return self.client.post(self.url + path, json=body)


@contextlib.asynccontextmanager
async def api(
    moa: ScriptedMoa | None = None,
    settings: ApiSettings | None = None,
    *,
    executor: Runs | None = None,
    relays: Mapping[str, ScriptedRelay] | None = None,
    checks: Mapping[str, Callable[[], Awaitable[bool]]] | None = None,
    dispensable: tuple[str, ...] = (),
    topologies: tuple[Topology, ...] = (DUO,),
    batch_folder: BatchFolder | None = None,
    wall: Callable[[], float] = time.time,
    recorder: Recorder | None = None,
) -> AsyncIterator[Api]:
    """Serve while the context is open."""
    moa = moa or ScriptedMoa()
    services = Services(
        executor=executor or moa.executor,
        programs=moa.programs,
        topologies={topology.name: topology for topology in topologies},
        models=moa.models,
        relays=relays or {},
        engines=dict.fromkeys(moa.models, "scripted engine"),
        checks=checks or {},
        dispensable=dispensable,
        metrics=Metrics(),
        batch_folder=batch_folder,
        wall=wall,
        recorder=recorder,
    )
    app = create_app(services, settings or ApiSettings())
    with bound_sockets() as sockets:
        async with listening(app, sockets, drain_s=1) as url, aiohttp.ClientSession(timeout=LIMIT) as client:
            yield Api(url, moa, services, client)


def chat(content: str = "What is it?", **fields: object) -> dict[str, object]:
    """A chat body of one user message to `duo`, unless `fields` say otherwise."""
    return {"model": "duo", "messages": [{"role": "user", "content": content}], **fields}


async def until(holds: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Let others run until `holds()`."""
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 # it lies behind a socket and sets no event
            await asyncio.sleep(0)
