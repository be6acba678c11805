"""The hand-over of a prompt's KV between two servers."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pytest
import pytest_asyncio
import torch
from aiohttp import web

from shell_router.standins.embedded.kv_transfer import BootstrapRooms, KvTransferError, PrefilledKv
from shell_router.standins.embedded.server import run_site
from tests.fakes.api_server import until

PREFILLED = PrefilledKv(kv=torch.zeros(2, 2, 1, 8, 4), token_id=5, logprob=None, cached_tokens=0)


@pytest.fixture
def rooms() -> BootstrapRooms:
    return BootstrapRooms(wait_s=30.0)


@pytest_asyncio.fixture
async def runner(rooms: BootstrapRooms) -> AsyncIterator[web.AppRunner]:
    """Its handlers go on when their client has left, as one does that is writing at that moment."""
    runner = web.AppRunner(rooms.application(), handler_cancellation=False, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner
    await runner.cleanup()


async def test_a_decode_server_that_leaves_while_the_kv_is_sent_ends_the_room(
    rooms: BootstrapRooms, runner: web.AppRunner, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = runner.addresses[0][:2]
    server = runner.server
    assert server is not None
    _, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET /kv/7 HTTP/1.1\r\nHost: decode\r\n\r\n")
    await until(lambda: server.requests_count == 1)
    writer.transport.abort()
    await until(lambda: all(one.transport is None for one in server.connections))
    room = rooms.open(7)
    room.offer(PREFILLED)
    with pytest.raises(KvTransferError, match="the decode server went away"):
        async with asyncio.timeout(5):
            await room.taken
    assert not caplog.records


async def test_a_server_that_computes_takes_300_connections_meanwhile(
    rooms: BootstrapRooms,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as clients:
        async with run_site(rooms.application(), listener):
            for _ in range(300):  # nothing is awaited, so nothing is accepted
                client = socket.create_connection(listener.getsockname(), timeout=1.0)
                clients.enter_context(client)
