"""A client that sees how requests end, and a prefill server that refuses."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any

import aiohttp
import orjson
from aiohttp import web

LIMIT_S = 30.0
"""A client that has heard nothing for so long after a fault gives up."""
COMPLETE, CUT_OFF, NOTHING = "whole answer", "cut off", "nothing"
_EVENT = b"data:"
_DONE = b"[DONE]"
_ERROR_STATUS = 400
_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Ended:
    """When (monotonic seconds) a request ended for its client, and what the client received."""

    at_s: float
    received: str

    def since(self, began_s: float) -> float:
        """Seconds from `began_s` until the client knew."""
        return self.at_s - began_s


class Client:
    """Sends requests to one router, each on a connection of its own."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    def ask(self, prompt_tokens: int, new_tokens: int, *, stream: bool = True) -> "Request":
        """A request that is on its way; its prompt is one that no server has cached."""
        body = {
            "input_ids": [random.randrange(20, 220) for _ in range(prompt_tokens)],
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "stream": stream,
        }
        return Request(self._session, f"{self._url}/generate", orjson.dumps(body))


@asynccontextmanager
async def connected_client(url: str) -> AsyncIterator[Client]:
    """A client of the router at `url`."""
    connector, patience = (
        aiohttp.TCPConnector(limit=0, force_close=True),
        aiohttp.ClientTimeout(total=None),
    )
    async with aiohttp.ClientSession(connector=connector, timeout=patience) as session:
        yield Client(session, url)


class Request:
    """Under way from its making on, until it ends or its client leaves."""

    def __init__(self, session: aiohttp.ClientSession, url: str, body: bytes) -> None:
        self._streams = asyncio.Event()
        self._ended = asyncio.create_task(self._run(session, url, body))

    async def streaming(self) -> None:
        """Return once the first token is there; RuntimeError where the answer ends without one."""
        first = asyncio.create_task(self._streams.wait())
        await asyncio.wait(
            {first, self._ended}, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED
        )
        first.cancel()
        if not self._streams.is_set():
            await self.leave()
            raise RuntimeError(f"no token came before the fault: {self._received()}")

    async def end(self) -> Ended:
        """How it ended for its client. One that leaves after LIMIT_S received nothing, and its end
        is at infinity.
        """
        await asyncio.wait({self._ended}, timeout=LIMIT_S)
        if self._ended.done():
            return self._ended.result()
        await self.leave()
        return Ended(inf, NOTHING)

    async def leave(self) -> None:
        """Close the connection, whatever is on its way."""
        self._ended.cancel()
        await asyncio.wait({self._ended})

    def _received(self) -> str:
        return NOTHING if self._ended.cancelled() else self._ended.result().received

    async def _run(self, session: aiohttp.ClientSession, url: str, body: bytes) -> Ended:
        try:
            async with session.post(
                url, data=body, headers={"Content-Type": "application/json"}
            ) as answer:
                if answer.content_type == _STREAM:
                    return await self._streamed(answer)
                body = await answer.read()
                if answer.status >= _ERROR_STATUS:
                    return Ended(monotonic(), f"status {answer.status}")
                return Ended(monotonic(), _end_in(orjson.loads(body)) or CUT_OFF)
        except aiohttp.ClientError:
            return Ended(monotonic(), "connection broken")

    async def _streamed(self, answer: aiohttp.ClientResponse) -> Ended:
        async for line in answer.content:
            if line.startswith(_EVENT) and _DONE not in line:
                received = _end_in(orjson.loads(line[len(_EVENT) :]))
                if received is not None:
                    return Ended(monotonic(), received)
                self._streams.set()
        return Ended(monotonic(), CUT_OFF)


def _end_in(event: dict[str, Any]) -> str | None:
    """What an event, or a whole answer, says of the request's end; None for tokens in its midst."""
    if "error" in event:
        return f"event {event['error'].get('code', 'error')}"
    reason = event["meta_info"]["finish_reason"]
    if reason is None:
        return None
    return "abort" if reason["type"] == "abort" else COMPLETE


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
        async with self._session.request(
            request.method, url, data=body or None, headers=kind
        ) as found:
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
