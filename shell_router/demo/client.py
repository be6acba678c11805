"""Asks the router over HTTP as any client would, and reads the streamed answer."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import orjson

from shell_router.demo.comparison import Asked
from shell_router.errors import EngineStalled, ShellRouterError

Chunk = Mapping[str, Any]


class Client:
    """One router, reached at `url` through the caller's session."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def wait_until_ready(self, *, limit_s: float) -> None:
        """Return when `/ready` says yes; raises EngineStalled after `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                while not await self._ready():  # noqa: ASYNC110 - readiness over HTTP can only be asked for
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise EngineStalled(
                f"The router was not ready within {limit_s:g} s.", remedy="Look at its log for the reason."
            ) from None

    async def _ready(self) -> bool:
        async with self._session.get(f"{self._url}/ready") as response:
            return response.status == 200

    async def ask(self, model: str, question: str, *, seed: int, tell: Callable[[Chunk], None]) -> Asked:
        """Stream the answer of `model`, telling every chunk, then fetch the request's trace."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "include_agents": True,
        }
        begun_s = time.monotonic()
        first_token_s: float | None = None
        answer: list[str] = []
        usage: Mapping[str, Any] = {}
        async with self._session.post(f"{self._url}/v1/chat/completions", json=body) as response:
            async for chunk in _chunks(response):
                tell(chunk)
                if text := delta(chunk):
                    first_token_s = first_token_s or time.monotonic()
                    answer.append(text)
                usage = chunk.get("usage") or usage
        ended_s = time.monotonic()
        return Asked(
            topology=model,
            question=question,
            answer="".join(answer),
            first_token_s=(first_token_s or ended_s) - begun_s,
            end_to_end_s=ended_s - begun_s,
            usage=usage,
            trace=await self._trace(response.headers["x-trace-id"]),
        )

    async def _trace(self, trace_id: str) -> Mapping[str, Any]:
        async with self._session.get(f"{self._url}/v1/traces/{trace_id}") as response:
            response.raise_for_status()
            trace: Mapping[str, Any] = orjson.loads(await response.read())
            return trace


def delta(chunk: Chunk) -> str:
    """The root's text in a chunk; empty where it has none."""
    return str(chunk["choices"][0]["delta"].get("content") or "") if chunk.get("choices") else ""


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[Chunk]:
    """The JSON objects of an event stream; raises ShellRouterError for an error in it."""
    if response.status != 200:
        raise ShellRouterError(f"The router answered {response.status}: {await response.text()}")
    async for line in response.content:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk: Chunk = orjson.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            raise ShellRouterError(f"The request failed: {chunk['error']['message']}")
        yield chunk
