"""The HTTP routes of an embedded server, which are the same on both sides."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import orjson
from aiohttp import ClientConnectionResetError, web
from aiohttp.typedefs import Handler

from shell_router.core.exact_json import Values
from shell_router.errors import InvalidRequest
from shell_router.standins.embedded.model import CausalLm
from shell_router.standins.embedded.output import EmbeddedAnswer
from shell_router.standins.embedded.sampling import Grammars
from shell_router.standins.embedded.service import Inflight, Service, output_of
from shell_router.standins.embedded.settings import ServerSettings
from shell_router.standins.embedded.wire import (
    FAKE_BOOTSTRAP_HOST,
    RequestLimits,
    parse_body,
    read_request,
)

VERSION = "embedded"
BODY_LIMIT_BYTES = 64 * 2**20
PREFILL_ONLY = {
    "bootstrap_host": FAKE_BOOTSTRAP_HOST,
    "sampling_params": {"max_new_tokens": 0},
    "stream": False,
    "return_logprob": False,
}


def json_response(content: Any, status: int = 200) -> web.Response:
    """Return a response with `content` as JSON."""
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


@web.middleware
async def answer_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer 400 for an `InvalidRequest`."""
    try:
        return await handler(request)
    except InvalidRequest as error:
        return json_response({"error": {"message": str(error)}}, 400)


@dataclass(frozen=True, slots=True)
class EngineApp:
    """The routes over a service. `settings` are those in force, with the ports that were taken."""

    settings: ServerSettings
    lm: CausalLm
    service: Service[Any, Any]
    grammars: Grammars

    def application(self) -> web.Application:
        """Build the application."""
        app = web.Application(client_max_size=BODY_LIMIT_BYTES, middlewares=[answer_refusals])
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/generate", self._generate)
        if self.settings.mode == "prefill":
            app.router.add_post("/prefill_only", self._prefill_only)
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = parse_body(await request.read())
        return await (self._stream(request, body) if body.get("stream") else self._whole(body))

    async def _prefill_only(self, request: web.Request) -> web.StreamResponse:
        """Prefill without an output: the KV stays in the prefix cache, and is not transferred."""
        return await self._whole({**parse_body(await request.read()), **PREFILL_ONLY})

    @asynccontextmanager
    async def _in_work(self, body: Values) -> AsyncIterator[Inflight]:
        """Check and register the request for the length of the block. Raises `InvalidRequest`."""
        pair = self.settings.pair
        limits = RequestLimits(self.lm.context_length, pair.max_total_tokens, self.lm.vocab_size)
        request = read_request(body, self.lm.tokenizer, limits)
        grammar = await self.grammars.of(request.sampling.grammar)
        with self.service.in_work(request, grammar) as inflight:
            yield inflight

    async def _answers(self, inflight: Inflight) -> AsyncGenerator[EmbeddedAnswer, None]:
        """Yield the answer as it grows."""
        incremental = self.settings.pair.incremental_streaming_output
        answer = EmbeddedAnswer(inflight.request, self.lm.tokenizer, incremental=incremental)
        async with aclosing(output_of(self.service, inflight)) as output:
            async for pieces in output:
                answer.add(pieces)
                yield answer

    async def _whole(self, body: Values) -> web.Response:
        async with self._in_work(body) as inflight, aclosing(self._answers(inflight)) as answers:
            *_, answer = [answer async for answer in answers]
            reason = answer.finish_reason or {}
            if (
                code := reason.get("status_code")
            ) is not None:  # SGLang's OpenAI-like envelope for its own failures
                error = {
                    "object": "error",
                    "message": reason["message"],
                    "type": str(code),
                    "param": None,
                }
                return json_response({**error, "code": code}, code)
            return json_response(answer.render(inflight.cached_tokens))

    async def _stream(self, request: web.Request, body: Values) -> web.StreamResponse:
        """Send the answer's events, and refusals as events, as SGLang does.

        SGLang sends the head before it checks the request.
        """
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        with suppress(
            ClientConnectionResetError
        ):  # the client has left, and what it asked for has ended
            try:
                async with (
                    self._in_work(body) as inflight,
                    aclosing(self._answers(inflight)) as answers,
                ):
                    await response.prepare(request)
                    async for answer in answers:
                        await response.write(_event(answer.render(inflight.cached_tokens)))
            except InvalidRequest as error:
                refusal = {
                    "message": str(error),
                    "type": "invalid_request_error",
                    "code": 400,
                    "retryable": False,
                }
                await response.prepare(request)
                await response.write(_event({"error": refusal}))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        return response

    async def _abort(self, request: web.Request) -> web.Response:
        body = parse_body(await request.read())
        if body.get("abort_all"):
            self.service.abort_all()
        elif inflight := self.service.inflight.get(
            body.get("rid", "")
        ):  # else it has ended already
            inflight.abort()
        return web.Response()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.service.thread.alive else 503)

    async def _server_info(self, _: web.Request) -> web.Response:
        """Return the settings in force, under SGLang's names."""
        settings = self.settings
        info = {
            **asdict(settings.pair),
            "port": settings.port,
            "disaggregation_mode": settings.mode,
            "disaggregation_bootstrap_port": settings.bootstrap_port,
            "context_length": self.lm.context_length,
            "max_total_num_tokens": settings.pair.max_total_tokens,
            "version": VERSION,
        }
        return json_response(info)

    async def _model_info(self, _: web.Request) -> web.Response:
        settings = self.settings
        info = {"model_path": settings.pair.model_path, "disaggregation_mode": settings.mode}
        return json_response(info)

    async def _loads(self, _: web.Request) -> web.Response:
        """Return the loads of one data-parallel rank.

        `num_waiting_reqs` counts the queue before the batch and, on decode, before the transfer.
        The hit rate is of all prompt tokens since start; SGLang reports its last interval.
        """
        loads = self.service.loads()
        capacity = self.settings.pair.max_total_tokens
        rank = {
            "dp_rank": 0,
            "num_running_reqs": loads.running,
            "num_waiting_reqs": loads.waiting + loads.decode_prealloc + loads.decode_transfer,
            "num_used_tokens": loads.used_tokens,
            "num_total_tokens": loads.used_tokens,
            "max_total_num_tokens": capacity,
            "max_running_requests": self.settings.pair.max_running_requests,
            "token_usage": round(loads.used_tokens / capacity, 4),
            "cache_hit_rate": round(
                loads.cached_tokens_total / (loads.prompt_tokens_total or 1), 4
            ),
            "disaggregation": {
                "mode": self.settings.mode,
                "prefill_inflight_queue_reqs": loads.prefill_inflight,
                "decode_prealloc_queue_reqs": loads.decode_prealloc,
                "decode_transfer_queue_reqs": loads.decode_transfer,
            },
        }
        return json_response(
            {"timestamp": datetime.now(UTC).isoformat(), "version": VERSION, "loads": [rank]}
        )


def _event(content: Any) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
