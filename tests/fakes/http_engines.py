"""Fake engines of one route or two, served on loopback."""

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
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
    """Dumps `record` for what was served between start and stop."""

    def __init__(self, record: ExpertRecord, *, records: bool = True) -> None:
        self.record = record
        self.calls: list[str] = []
        self._records = records

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/shell_router/capabilities", self._capabilities)
        app.router.add_get("/shell_router/expert_record", self._sent)
        for step in ("start", "stop", "dump"):
            app.router.add_post(f"/{step}_expert_distribution_record", self._step)
        return app

    async def _capabilities(self, _: web.Request) -> web.Response:
        return web.json_response({"disaggregation_mode": "null", "expert_record": self._records})

    async def _step(self, request: web.Request) -> web.Response:
        self.calls.append(request.path.strip("/").partition("_")[0])
        return web.Response(text="Done.\n")

    async def _sent(self, _: web.Request) -> web.Response:
        archive = io.BytesIO()
        np.savez(archive, activations=self.record.activations, transitions=self.record.transitions)
        return web.Response(body=archive.getvalue())


NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still "
    "running or queued."
)


class SwappingEngine:
    """A server that says which weights it has, and replaces them.

    `busy` times it does not flush; it replaces no weights while `broken`.
    """

    def __init__(self, folder: Path, *, busy: int = 0) -> None:
        self.folder = folder
        self.busy = busy
        self.broken = False
        self._first = folder
        self.swaps: list[str] = []
        self.flushed: list[str] = []

    def restart(self) -> None:
        """Have the weights of its first start."""
        self.folder = self._first

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/model_info", self._info)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/flush_cache", self._flush)
        return app

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": str(self.folder)})

    async def _update(self, request: web.Request) -> web.Response:
        if self.broken:
            return web.json_response({"success": False, "message": "out of memory"}, status=400)
        self.folder = Path((await request.json())["model_path"])
        self.swaps.append(self.folder.name)
        return self._flushed({"success": True})

    async def _flush(self, _: web.Request) -> web.Response:
        return self._flushed({})

    def _flushed(self, answer: dict[str, Any]) -> web.Response:
        if self.busy:
            self.busy -= 1
            return web.json_response({"success": False, "message": NOT_FLUSHED}, status=400)
        self.flushed.append(self.folder.name)
        return web.json_response(answer)
