"""Asks the router over HTTP as any client would, and reads the streamed answer."""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import orjson

from shell_router.core.grading import is_right
from shell_router.demo.comparison import Asked
from shell_router.errors import ShellRouterError
from shell_router.evaluation.dataset import Item

Chunk = Mapping[str, Any]


class Client:
    """One router, reached at `url` through the caller's session."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def ask(self, model: str, item: Item, *, seed: int, tell: Callable[[Chunk], None]) -> Asked:
        """Stream the answer of `model`, telling every chunk, grade it, and fetch the request's trace."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": item.question}],
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
            question=item.question,
            answer="".join(answer),
            right=is_right("".join(answer), item.answer, item.grader),
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
