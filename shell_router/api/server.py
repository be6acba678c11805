"""Serving the application on a socket."""

import contextlib
from collections.abc import AsyncIterator

from aiohttp import web


@contextlib.asynccontextmanager
async def listening(
    app: web.Application, host: str = "127.0.0.1", port: int = 0, *, drain_s: float = 30.0
) -> AsyncIterator[str]:
    """Serve `app` while the context is open; gives its base URL. Port 0 takes a free one.

    A request whose client has gone is cancelled. On leaving no new requests are taken and running ones get
    `drain_s` to end.
    """
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=drain_s)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield f"http://{_authority(runner.addresses[0])}"
    finally:
        await runner.cleanup()


def _authority(address: tuple[str, int]) -> str:
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
