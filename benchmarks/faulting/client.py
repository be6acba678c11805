"""One native request, as its client sees it."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import Any

import aiohttp
import orjson

LIMIT_S = 30.0
"""A client that has heard nothing for so long after a fault gives up."""
COMPLETE, CUT_OFF, NOTHING = "whole answer", "cut off", "nothing"
_EVENT = b"data:"
_DONE = b"[DONE]"
_ERROR_STATUS = 400
_STREAM = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Ended:
    """When (monotonic seconds) a request ended for its client, and what the client was told."""

    at_s: float
    told: str

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
    connector, patience = aiohttp.TCPConnector(limit=0, force_close=True), aiohttp.ClientTimeout(total=None)
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
        await asyncio.wait({first, self._ended}, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if not self._streams.is_set():
            await self.leave()
            raise RuntimeError(f"no token came before the fault: {self._told()}")

    async def end(self) -> Ended:
        """How it ended for its client, who leaves after LIMIT_S: then nothing was told, and the end is at infinity."""
        await asyncio.wait({self._ended}, timeout=LIMIT_S)
        if self._ended.done():
            return self._ended.result()
        await self.leave()
        return Ended(inf, NOTHING)

    async def leave(self) -> None:
        """Close the connection, whatever is on its way."""
        self._ended.cancel()
        await asyncio.wait({self._ended})

    def _told(self) -> str:
        return NOTHING if self._ended.cancelled() else self._ended.result().told

    async def _run(self, session: aiohttp.ClientSession, url: str, body: bytes) -> Ended:
        try:
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
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
                told = _end_in(orjson.loads(line[len(_EVENT) :]))
                if told is not None:
                    return Ended(monotonic(), told)
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
