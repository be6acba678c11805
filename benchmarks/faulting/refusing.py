"""A server before the prefill server that passes everything on, or refuses what it is to prefill with 400."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

_QUIET = logging.Logger("refusing", logging.CRITICAL)
"""sglang-router asks first whether gRPC is spoken here, which aiohttp would log as an error."""
_REFUSAL = {"error": {"message": "refused for this benchmark"}}


class RefusingPrefill:
    """Set `refuses` to have it answer 400. `url` is where it listens."""

    def __init__(self, session: aiohttp.ClientSession, prefill_url: str) -> None:
        self.refuses = False
        self.url = ""
        self._session = session
        self._prefill_url = prefill_url

    async def answer(self, request: web.Request) -> web.Response:
        """The prefill server's own answer, whole, or the refusal."""
        body = await request.read()
        if self.refuses and request.path == "/generate":
            return web.json_response(_REFUSAL, status=400)
        kind = {"Content-Type": "application/json"}
        url = f"{self._prefill_url}{request.path_qs}"
        async with self._session.request(request.method, url, data=body or None, headers=kind) as found:
            return web.Response(
                body=await found.read(),
                status=found.status,
                headers={"Content-Type": found.headers.get("Content-Type", "")},
            )


@asynccontextmanager
async def refusing_prefill(prefill_url: str) -> AsyncIterator[RefusingPrefill]:
    """It serves while the context is open."""
    app = web.Application(client_max_size=2**26)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        refusing = RefusingPrefill(session, prefill_url)
        app.router.add_route("*", "/{path:.*}", refusing.answer)
        runner = web.AppRunner(app, shutdown_timeout=1.0, logger=_QUIET)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            refusing.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield refusing
        finally:
            await runner.cleanup()
