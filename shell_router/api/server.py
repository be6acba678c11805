"""Serving the application on sockets."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from shell_router.api.drain import DRAIN

CLOSE_LIMIT_S = 1.0
"""For what is left after the drain: requests that only look, and clients that take nothing."""


@contextlib.asynccontextmanager
async def listening(
    app: web.Application,
    sockets: Sequence[socket.socket],
    *,
    drain_s: float = 30.0,
    hurry: asyncio.Event | None = None,
) -> AsyncIterator[str]:
    """Serve `app` on bound `sockets` while the context is open; gives its base URL.

    A request whose client has gone is cancelled. On leaving no new requests are taken and running ones get
    `drain_s` to end; those that do not, or all of them once `hurry` is set, end with RouterStopping.
    """
    hurried = hurry or asyncio.Event()
    app.on_shutdown.append(lambda app: app[DRAIN].finish(drain_s, hurried))
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_LIMIT_S)
    await runner.setup()
    try:
        for one in sockets:
            await web.SockSite(runner, one).start()
        yield f"http://{_authority(runner.addresses[0])}"
    finally:
        await runner.cleanup()


def _authority(address: tuple[str, int]) -> str:
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
