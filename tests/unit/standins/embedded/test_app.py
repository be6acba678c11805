"""The embedded server's routes over a scripted service."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from shell_router.standins.embedded.app import EngineApp
from shell_router.standins.embedded.output import Piece
from shell_router.standins.embedded.sampling import Grammars
from shell_router.standins.embedded.service import Inflight, Loads, Service
from shell_router.standins.embedded.settings import EmbeddedSettings, ServerSettings
from shell_router.standins.embedded.wire import GenerateRequest
from tests.unit.standins.embedded.test_output import TOKENIZER


class EndlessService(Service[Any, Any]):
    """Writes until its request is cancelled."""

    def __init__(self) -> None:
        self.inflight = {}
        self.cancelled = asyncio.Event()

    def check(self, request: GenerateRequest) -> None:
        pass

    async def work(self, inflight: Inflight) -> None:
        try:
            while True:
                inflight.put(Piece(97, "a"))
                await asyncio.sleep(0)
        finally:
            self.cancelled.set()

    def loads(self) -> Loads:
        return Loads()

    async def stop(self) -> None:
        pass


@pytest.mark.parametrize("cancels", [True, False], ids=["as served", "noticed by the next write"])
async def test_a_client_that_leaves_its_stream_ends_the_work_and_is_no_error(
    cancels: bool, caplog: pytest.LogCaptureFixture
) -> None:
    service = EndlessService()
    lm = SimpleNamespace(context_length=1000, vocab_size=300, tokenizer=TOKENIZER)
    settings = ServerSettings(EmbeddedSettings("unused"), "decode")
    app = EngineApp(settings, lm, service, Grammars(lm)).application()  # type: ignore[arg-type]
    runner = web.AppRunner(app, handler_cancellation=cancels)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        async with aiohttp.ClientSession() as client, asyncio.timeout(20):
            body = {
                "input_ids": [97],
                "stream": True,
                "bootstrap_host": "2.2.2.2",
                "bootstrap_room": 1,
            }
            async with client.post(f"http://{host}:{port}/generate", json=body) as response:
                await response.content.readuntil(b"\n\n")
                response.close()
            await service.cancelled.wait()
    finally:
        await runner.cleanup()
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR
    ] == []
