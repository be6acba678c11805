"""Fake servers on loopback."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from aiohttp import web
from aiohttp.test_utils import TestServer


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
