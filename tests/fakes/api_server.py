"""The whole API over scripted engines, listening on a free port, with clients that speak to it."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
from aiohttp import web
from openai.types import Batch

from agent_cache import Journals
from agent_cache.accounts import Accounts, MemoryAccounts
from shell_router.api import (
    ApiSettings,
    Runs,
    Services,
    create_app,
    serve_app,
)
from shell_router.api.app import server_limits
from shell_router.api.budgets import TenantBudgets
from shell_router.api.live import LiveTopologies
from shell_router.api.services import SETTINGS, new_run_id
from shell_router.app.fleet_changes import FleetChanges
from shell_router.batch.api.routes import add_batches
from shell_router.batch.api.storage import open_folder
from shell_router.config import BatchesSettings
from shell_router.core.engine import (
    NO_HINTS,
    ChatServing,
    Hints,
    NativeRoute,
    Placement,
    Relay,
    Relayed,
    Session,
)
from shell_router.core.predictors import Embedder
from shell_router.errors import InvalidRequest
from shell_router.files.document import Document
from shell_router.http.app import App
from shell_router.http.server import bind_sockets, run_server
from shell_router.routing.holdout import Holdouts
from shell_router.telemetry import Metrics, TraceStore
from shell_router.telemetry.recorder import Recorder
from shell_router.topology import (
    Agent,
    Catalog,
    Entry,
    Graph,
    LiveSettings,
    Prefill,
    Prompt,
    Topology,
)
from tests.fakes.moa import ScriptedMoa

if TYPE_CHECKING:
    from shell_router.telemetry.otlp import SpanExport

LIMIT = aiohttp.ClientTimeout(total=60)

DUO = Topology(
    name="duo",
    agents={
        "left": Agent("left", "small"),
        "right": Agent("right", "medium", on_failure="drop"),
        "root": Agent(
            "root", "large", ("left", "right"), Prompt(prefix="Sum up.\n", suffix="\n{question}")
        ),
    },
    prefill=Prefill(chunk_tokens=1),
    description="two agents and one that sums up",
)


def live(
    models: Collection[str],
    *topologies: Graph,
    settings: LiveSettings | None = None,
    files: Collection[Path] = (),
) -> LiveTopologies:
    """The topologies of `files`, and some whose documents are not known; clients may put others."""
    settings = settings or LiveSettings(api=True)
    entries = {
        one.name: Entry(one, Document(f"{one.name}.yaml", {}, {}), "file") for one in topologies
    }
    catalog = Catalog(models, settings=settings, entries=entries)
    return LiveTopologies(catalog.with_files(files)[0] if files else catalog)


@dataclass
class ScriptedRelay:
    """A relay that answers native requests with `chunks` and keeps the requests.

    It waits at `gate` before all chunks but the first.
    """

    chunks: tuple[bytes, ...] = (b'{"text":"ok"}',)
    content_type: str = "application/json"
    status: int = 200
    error: Exception | None = None
    gate: asyncio.Event | None = None
    forwarded: list[tuple[NativeRoute, bytes]] = field(default_factory=list)
    sessions: list[Session | None] = field(default_factory=list)
    end_users: list[str | None] = field(default_factory=list)
    tiers: list[str] = field(default_factory=list)
    fields: list[tuple[str, ...]] = field(default_factory=list)
    left_early: int = 0
    placed: tuple[Placement, ...] = ()
    batch: int = 1
    chat: ChatServing | None = None

    @contextlib.asynccontextmanager
    async def forward(
        self,
        route: NativeRoute,
        body: bytes,
        *,
        hints: Hints = NO_HINTS,
        fields: Collection[str] = (),
        admit: Callable[[int], None] = lambda requests: None,
    ) -> AsyncIterator[Relayed]:
        if not body.startswith(b"{"):
            raise InvalidRequest("The body is not a JSON object.")
        admit(self.batch)
        self.forwarded.append((route, body))
        self.sessions.append(hints.session)
        self.end_users.append(hints.end_user)
        self.tiers.append(hints.tier)
        self.fields.append(tuple(fields))
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
    relays: Mapping[str, Relay] | None = None,
    checks: Mapping[str, Callable[[], Awaitable[bool]]] | None = None,
    optional_checks: tuple[str, ...] = (),
    topologies: tuple[Graph, ...] = (DUO,),
    live_settings: LiveSettings | None = None,
    extend: Callable[[App], None] = lambda app: None,
    wall: Callable[[], float] = time.time,
    new_id: Callable[[], str] = new_run_id,
    recorder: Recorder | None = None,
    spans: "SpanExport | None" = None,
    traces: TraceStore | None = None,
    access_log: Recorder | None = None,
    holdouts: Holdouts | None = None,
    journals: Journals | None = None,
    accounts: Accounts | None = None,
    embedders: Mapping[str, Embedder] | None = None,
    drain_s: float = 1,
    send_buffer_bytes: int | None = None,
    fast_lane: bool = True,
) -> AsyncIterator[Api]:
    """Serve while the context is open, with aiohttp alone where there is no `fast_lane`.

    `send_buffer_bytes` is the most that the system may hold for a client that is slow.
    """
    moa = moa or ScriptedMoa()
    services = Services(
        executor=executor or moa.executor,
        programs=moa.programs,
        topologies=live(moa.models, *topologies, settings=live_settings),
        models=moa.models,
        relays=relays or {},
        fleet=FleetChanges({}, {}),
        embedders=embedders or {},
        engines=dict.fromkeys(moa.models, "scripted engine"),
        checks=checks or {},
        optional_checks=optional_checks,
        metrics=Metrics(),
        wall=wall,
        new_id=new_id,
        recorder=recorder,
        spans=spans,
        traces=TraceStore() if traces is None else traces,
        access_log=access_log,
        holdouts=holdouts or Holdouts(),
        journals=journals,
        budgets=TenantBudgets(accounts or MemoryAccounts(time.monotonic), wall),
    )
    app = create_app(services, replace(settings or ApiSettings(), drain_s=drain_s))
    extend(app)
    with bind_sockets() as sockets:
        if send_buffer_bytes is not None:
            for listener in sockets:  # its connections have the same
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        server = serve_app(app, sockets)
        if not fast_lane:
            server = run_server(app, sockets, server_limits(app[SETTINGS]), fast_lane=False)
        async with server as url, aiohttp.ClientSession(timeout=LIMIT) as client:
            yield Api(url, moa, services, client)


def chat(content: str = "What is it?", **fields: object) -> dict[str, object]:
    """A chat body of one user message to `duo`, unless `fields` say otherwise."""
    return {"model": "duo", "messages": [{"role": "user", "content": content}], **fields}


CHAT_ROUTES = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
WAYS = [(route, stream) for route in CHAT_ROUTES for stream in (False, True)]
"""Every route that answers chats, whole and streamed."""


@dataclass
class Heard:
    """What a client of any of these routes makes of an answer or an error."""

    status: int
    text: str = ""
    warnings: list[str] = field(default_factory=list)
    error: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    def take(self, body: Mapping[str, Any]) -> None:
        """Take in a whole answer, or the data of an event."""
        self.error |= body.get("error") or body.get("response", {}).get("error") or {}
        self.warnings += body.get("warnings", ())
        deltas = [choice.get("delta", choice.get("message")) for choice in body.get("choices", ())]
        parts = [*body.get("content", ()), *(item["content"][0] for item in body.get("output", ()))]
        if isinstance(delta := body.get("delta"), dict):
            parts.append(delta)
        elif body.get("type") == "response.output_text.delta":
            parts.append({"text": delta})
        elif body.get("type") in ("response.completed", "response.incomplete"):
            self.warnings += body["response"].get("warnings", ())
        ended = [body, delta if isinstance(delta, dict) else {}, *body.get("choices", ())]
        ended.append((body.get("response") or body).get("incomplete_details") or {})
        for end in ended:
            reason = end.get("finish_reason") or end.get("stop_reason") or end.get("reason")
            self.reason = reason or self.reason
        self.text += "".join([part.get("content") or "" for part in deltas])
        self.text += "".join([part.get("text", "") for part in parts])


async def hear(
    served: Api, way: tuple[str, bool], messages: Sequence[Mapping[str, Any]], **fields: object
) -> Heard:
    """Ask by one of WAYS; `max_tokens` has the route's own name."""
    route, stream = way
    body = {"stream": stream, **fields}
    body["input" if route == "/v1/responses" else "messages"] = messages
    if route == "/v1/responses" and "max_tokens" in body:
        body["max_output_tokens"] = body.pop("max_tokens")
    if route == "/v1/messages":
        body.setdefault("max_tokens", 64)
        if messages[0]["role"] == "system":
            body["system"] = messages[0]["content"]
            body["messages"] = messages[1:]
    async with served.stream(body, route) as response:
        heard = Heard(response.status)
        if response.content_type == "application/json":
            heard.take(await response.json())
        else:
            async for line_sent in response.content:
                if line_sent.startswith(b"data: {"):
                    heard.take(json.loads(line_sent[6:]))
    return heard


async def until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Let others run until `holds()`."""
    async with asyncio.timeout(limit_s):
        while not holds():  # noqa: ASYNC110 # it lies behind a socket and sets no event
            await asyncio.sleep(0)


ENDPOINT = "/v1/chat/completions"
ENDS = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, content: str = "What is it?", **fields: object) -> dict[str, Any]:
    """A line that asks `small`, unless `fields` say otherwise."""
    body = chat(content, **{"model": "small", **fields})
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}


def questions(*models: str) -> list[object]:
    """A line per model, named by its place."""
    return [
        line(str(place), f"Question {place}?", model=model) for place, model in enumerate(models)
    ]


def jsonl(*lines: object) -> bytes:
    """One JSON value per line."""
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


@dataclass(frozen=True)
class BatchApi:
    """A running router with a folder at `path`, and the official client connected to it."""

    served: Api
    ai: openai.AsyncOpenAI
    path: Path

    async def upload(self, content: bytes, name: str = "questions.jsonl") -> str:
        """The id of a new file."""
        return (await self.ai.files.create(file=(name, content), purpose="batch")).id

    async def begin(self, *lines: object) -> Batch:
        """A new batch of these lines."""
        return await self.begin_on(await self.upload(jsonl(*lines)))

    async def begin_on(self, file_id: str) -> Batch:
        """A new batch on an uploaded file."""
        return await self.ai.batches.create(
            input_file_id=file_id, endpoint=ENDPOINT, completion_window="24h"
        )

    async def ended(self, batch: Batch) -> Batch:
        """The batch once it has ended."""
        return await self.when(batch, lambda seen: seen.status in ENDS)

    async def when(
        self, batch: Batch, holds: Callable[[Batch], bool], limit_s: float = 30.0
    ) -> Batch:
        """The batch once `holds` is true of it."""
        async with asyncio.timeout(limit_s):
            while not holds(batch):
                batch = await self.ai.batches.retrieve(batch.id)
        return batch

    async def answers(self, batch: Batch) -> dict[str, str]:
        """What each line in the output file was answered."""
        results = await self.results(batch.output_file_id)
        return {
            name: one["response"]["body"]["choices"][0]["message"]["content"]
            for name, one in results.items()
        }

    async def results(self, file_id: str | None) -> dict[str, dict[str, Any]]:
        """A result file's lines by their custom_id; each stands there once."""
        if file_id is None:
            return {}
        listed = [
            json.loads(one) for one in (await self.ai.files.content(file_id)).text.splitlines()
        ]
        results = {one["custom_id"]: one for one in listed}
        assert len(results) == len(listed)
        return results


@asynccontextmanager
async def batch_api(
    path: Path,
    moa: ScriptedMoa | None = None,
    settings: ApiSettings | None = None,
    batches: BatchesSettings | None = None,
    *,
    key: str = "none",
    **fields: Any,
) -> AsyncIterator[BatchApi]:
    """Serve while the context is open; a later one on the same `path` goes on where this one stood.

    `fields` are those of `api`.
    """
    with open_folder(path) as folder:

        def extend(app: web.Application) -> None:
            add_batches(app, folder, batches or BatchesSettings(), {})

        async with api(moa, settings, extend=extend, **fields) as served, client(served, key) as ai:
            yield BatchApi(served, ai, path)


@asynccontextmanager
async def client(served: Api, key: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client with an API key."""
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key=key, max_retries=0
    ) as connected:
        yield connected
