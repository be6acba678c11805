"""A stand-in for an OpenAI-compatible server, which answers as it is told."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web
from aiohttp.test_utils import TestServer

USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4},
}
DONE = b"data: [DONE]\n\n"


def event(delta: Mapping[str, Any] | None = None, **fields: Any) -> bytes:
    """An event of a stream; fields of the choice are those of `logprobs` and `finish_reason`."""
    choice = {name: fields.pop(name) for name in ("logprobs", "finish_reason") if name in fields}
    if delta is not None or choice:
        fields["choices"] = [{"index": 0, "delta": delta or {}, **choice}]
    return b"data: %b\n\n" % orjson.dumps(fields)


def text_of(*words: str, usage: Any = USAGE, reason: str = "stop") -> list[bytes]:
    """The events of a whole answer."""
    counts = [] if usage is None else [event(choices=[], usage=usage)]
    said = [event({"content": word}) for word in words]
    return [event({"role": "assistant"}), *said, event(finish_reason=reason), *counts, DONE]


@dataclass
class Answer:
    """An answer: pieces of its body, which then ends, breaks off, or is never ended."""

    pieces: Sequence[bytes] = ()
    end: str = "whole"
    status: int = 200
    content_type: str = "text/event-stream"
    headers: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[int], Any] | None = None
    """Awaited before each piece, with its number."""


@dataclass
class OpenAIServer:
    """Gives the next of `answers` to each chat; the last one stays.

    Attributes:
        bodies: The bodies of chats, as they came.
        headers: Their headers.
        left: Set when a client closes an answer that has not ended.
    """

    answers: list[Answer]
    bodies: list[Any] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    models_status: int = 200
    models: Sequence[str] | str = ()
    """The names that it lists, or another text that it answers with."""
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator["OpenAIServer"]:
        app = web.Application()
        app.add_routes(
            [web.post("/v1/chat/completions", self._chat), web.get("/v1/models", self._models)]
        )
        async with TestServer(app) as server:
            self.url = str(server.make_url("/v1"))
            yield self

    async def _models(self, _: web.Request) -> web.Response:
        if isinstance(self.models, str):
            return web.Response(text=self.models, content_type="text/html")
        data = [{"id": name, "object": "model"} for name in self.models]
        return web.json_response({"object": "list", "data": data}, status=self.models_status)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        headers = {"Content-Type": answer.content_type, **answer.headers}
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        try:
            for number, piece in enumerate(answer.pieces):
                if answer.before is not None:
                    await answer.before(number)
                await response.write(piece)
            if answer.end == "never":
                await asyncio.Event().wait()
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        if answer.end == "broken":
            assert request.transport is not None
            request.transport.abort()
        return response


CONTEXT = 2048
"""Words of prompt and output that a played server takes."""


class PlayedServer(OpenAIServer):
    """A server that answers as OpenAI's would: with words that its prompt and seed decide."""

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body: Any = await request.json()
        if body["model"] != "played":
            error = {"message": "The model does not exist.", "code": "model_not_found"}
            return web.json_response({"error": error}, status=404)
        prompt = " ".join(str(message["content"]) for message in body["messages"]).split()
        if len(prompt) > CONTEXT:
            error = {
                "message": f"This model's maximum context length is {CONTEXT} tokens.",
                "code": "context_length_exceeded",
            }
            return web.json_response({"error": error}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = 0
        reason = "stop"
        for piece in _play(body, prompt):
            if count == body.get("max_tokens"):
                reason = "length"
                break
            if any(stop in str(piece.get("content")) for stop in body.get("stop") or ()):
                break
            count += 1
            await response.write(event(piece))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        last = [event(finish_reason=reason), event(choices=[], usage=usage), DONE]
        await response.write(b"".join(last))
        return response


def _play(body: Any, prompt: Sequence[str]) -> list[dict[str, Any]]:
    """The deltas of an answer."""
    if body.get("tool_choice") == "required":
        name = body["tools"][0]["function"]["name"]
        function = {"name": name, "arguments": '{"at": 4}'}
        return [{"tool_calls": [{"index": 0, "id": "c", "function": function}]}]
    if "response_format" in body:
        return [{"content": '{"at": 4}'}]
    first = sum(map(len, prompt)) + (body.get("seed") or 0)
    words = 8 if body.get("ignore_eos") is None else CONTEXT
    return [{"content": f"{chr(97 + (first + place) % 26)}{place} "} for place in range(words)]
