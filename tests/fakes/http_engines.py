"""Fake engines of one route or two, served on loopback."""

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer

from shell_router.experts.placement import ExpertRecord


class HasApp(Protocol):
    """A fake server: what answers."""

    def app(self) -> web.Application: ...


@asynccontextmanager
async def served(engine: HasApp) -> AsyncIterator[str]:
    """The URL of `engine`, served on loopback."""
    server = TestServer(engine.app())
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


class ExpertEngine:
    """Answers `/generate` or `/prefill_only`, and dumps `record` for what was asked between start and stop."""

    def __init__(self, record: ExpertRecord, *, mode: str = "null", records: bool = True, refuses: str = "") -> None:
        self.record = record
        self.mode = mode
        self.asked: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self._records = records
        self._refuses = refuses

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/shell_router/capabilities", self._capabilities)
        app.router.add_get("/shell_router/expert_record", self._sent)
        for step in ("start", "stop", "dump"):
            app.router.add_post(f"/{step}_expert_distribution_record", self._step)
        app.router.add_post("/prefill_only" if self.mode == "prefill" else "/generate", self._asked)
        return app

    async def _capabilities(self, _: web.Request) -> web.Response:
        return web.json_response({"disaggregation_mode": self.mode, "expert_record": self._records})

    async def _step(self, request: web.Request) -> web.Response:
        self.calls.append(request.path.strip("/").partition("_")[0])
        return web.Response(text="Done.\n")

    async def _asked(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self._refuses and self._refuses in body["text"]:
            return web.json_response({"error": {"message": f"no {self._refuses}"}}, status=400)
        self.asked.append(body)
        return web.json_response({"text": "", "meta_info": {}})

    async def _sent(self, _: web.Request) -> web.Response:
        archive = io.BytesIO()
        np.savez(archive, activations=self.record.activations, transitions=self.record.transitions)
        return web.Response(body=archive.getvalue())
