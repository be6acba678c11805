"""The HTTP routes of an embedded server, the same on both sides, and what the server says about itself."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import orjson
from aiohttp import ClientConnectionResetError, web
from aiohttp.typedefs import Handler

from shell_router.errors import InvalidRequest
from shell_router.standins.embedded.grammar import Grammars
from shell_router.standins.embedded.model import CausalLm
from shell_router.standins.embedded.output import Answer
from shell_router.standins.embedded.service import Inflight, Loads, Service, output_of
from shell_router.standins.embedded.settings import ServerSettings
from shell_router.standins.embedded.wire import (
    FAKE_BOOTSTRAP_HOST,
    ContractViolation,
    GenerateRequest,
    MalformedBody,
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


def server_info(settings: ServerSettings, lm: CausalLm, loads: Loads) -> dict[str, Any]:
    """Settings as they were resolved, under SGLang's names, and in `internal_states` what the server does."""
    pair = settings.pair
    return {
        **asdict(pair),
        "port": settings.port,
        "disaggregation_mode": settings.mode,
        "disaggregation_bootstrap_port": settings.bootstrap_port,
        "context_length": lm.context_length,
        "max_total_num_tokens": pair.max_total_tokens,
        "enable_lora": False,
        "version": VERSION,
        "internal_states": [asdict(loads)],
    }


def model_info(settings: ServerSettings) -> dict[str, Any]:
    path, mode = settings.pair.model_path, settings.mode
    return {"model_path": path, "served_model_name": path, "is_generation": True, "disaggregation_mode": mode}


def loads_report(settings: ServerSettings, loads: Loads, now: datetime) -> dict[str, Any]:
    """One data-parallel rank. Waiting counts the queue before the batch and, on decode, before the transfer.

    The hit rate is of all prompt tokens since start; SGLang reports its last logging interval.
    """
    pair, prompts = settings.pair, loads.prompt_tokens_total
    rank = {
        "dp_rank": 0,
        "num_running_reqs": loads.running,
        "num_waiting_reqs": loads.waiting + loads.decode_prealloc + loads.decode_transfer,
        "num_used_tokens": loads.used_tokens,
        "num_total_tokens": loads.used_tokens,
        "max_total_num_tokens": pair.max_total_tokens,
        "max_running_requests": pair.max_running_requests,
        "token_usage": round(loads.used_tokens / pair.max_total_tokens, 4),
        "cache_hit_rate": round(loads.cached_tokens_total / prompts if prompts else 0.0, 4),
        "disaggregation": {
            "mode": settings.mode,
            "prefill_inflight_queue_reqs": loads.prefill_inflight,
            "decode_prealloc_queue_reqs": loads.decode_prealloc,
            "decode_transfer_queue_reqs": loads.decode_transfer,
        },
    }
    return {"timestamp": now.isoformat(), "version": VERSION, "loads": [rank]}


def json_response(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


def server_error(message: str, status: int, kind: str) -> web.Response:
    """The OpenAI-like envelope that SGLang uses for unreadable bodies and failures of its own."""
    return json_response({"object": "error", "message": message, "type": kind, "param": None, "code": status}, status)


@web.middleware
async def answer_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer a request that is refused as SGLang does."""
    try:
        return await handler(request)
    except MalformedBody as error:
        return server_error(str(error), 400, "Bad Request")
    except ContractViolation as error:
        return json_response({"error": str(error)}, 400)
    except InvalidRequest as error:
        return json_response({"error": {"message": str(error)}}, 400)


@dataclass(frozen=True, slots=True)
class EngineApp:
    """Routes over a service. `settings` are those in force, with the ports really taken."""

    settings: ServerSettings
    lm: CausalLm
    service: Service[Any, Any]
    grammars: Grammars

    def application(self) -> web.Application:
        app = web.Application(client_max_size=BODY_LIMIT_BYTES, middlewares=[answer_refusals])
        for path, read in (
            ("/health", self._health),
            ("/server_info", self._server_info),
            ("/model_info", self._model_info),
            ("/v1/loads", self._loads),
            ("/v1/models", self._models),
        ):
            app.router.add_get(path, read)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/generate", self._generate)
        if self.settings.mode == "prefill":
            app.router.add_post("/prefill_only", self._prefill_only)
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = parse_body(await request.read())
        return await (self._stream(request, body) if body.get("stream") else self._whole(body))

    async def _prefill_only(self, request: web.Request) -> web.StreamResponse:
        """A `/generate` whose output is nothing: the prompt's KV stays in the prefix cache, none is transferred."""
        return await self._whole({**parse_body(await request.read()), **PREFILL_ONLY})

    @asynccontextmanager
    async def _in_work(self, body: Mapping[str, Any]) -> AsyncIterator[Inflight]:
        """The request among those in work for the length of the block. Raises `InvalidRequest`."""
        pair = self.settings.pair
        limits = RequestLimits(self.lm.context_length, pair.max_total_tokens, self.lm.vocab_size)
        request = read_request(body, self.lm.tokenizer, limits)
        grammar = await self.grammars.of(request.sampling.grammar)
        self.service.check(request)
        with self.service.inflight.add(request, grammar) as inflight:
            yield inflight

    async def _whole(self, body: Mapping[str, Any]) -> web.Response:
        async with self._in_work(body) as inflight:
            answer, began = self._answer(inflight.request), time.perf_counter()
            async with aclosing(output_of(self.service, inflight)) as output:
                async for pieces in output:
                    answer.add(pieces)
            reason = answer.finish_reason or {}
            code = reason.get("status_code")
            if code is not None:
                return server_error(reason["message"], code, str(code))
            return json_response(answer.render(inflight.cached_tokens, time.perf_counter() - began))

    async def _stream(self, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
        """As SGLang: the head is sent before the request is checked, so a refusal is an event of the stream."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        with suppress(ClientConnectionResetError):  # the client has left, and what it asked for has ended
            try:
                async with self._in_work(body) as inflight:
                    await response.prepare(request)
                    await self._write_events(response, inflight)
            except InvalidRequest as error:
                refusal = {"message": str(error), "type": "invalid_request_error", "code": 400, "retryable": False}
                await response.prepare(request)
                await response.write(_event({"error": refusal}))
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        return response

    async def _write_events(self, response: web.StreamResponse, inflight: Inflight) -> None:
        answer, began = self._answer(inflight.request), time.perf_counter()
        async with aclosing(output_of(self.service, inflight)) as output:
            async for pieces in output:
                answer.add(pieces)
                await response.write(_event(answer.render(inflight.cached_tokens, time.perf_counter() - began)))

    def _answer(self, request: GenerateRequest) -> Answer:
        return Answer(request, self.lm.tokenizer, incremental=self.settings.pair.incremental_streaming_output)

    async def _abort(self, request: web.Request) -> web.Response:
        body = parse_body(await request.read())
        if body.get("abort_all"):
            self.service.inflight.abort_all()
        else:
            self.service.inflight.abort(body.get("rid") or "")
        return web.Response()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.service.alive else 503)

    async def _server_info(self, _: web.Request) -> web.Response:
        return json_response(server_info(self.settings, self.lm, self.service.loads()))

    async def _model_info(self, _: web.Request) -> web.Response:
        return json_response(model_info(self.settings))

    async def _loads(self, _: web.Request) -> web.Response:
        return json_response(loads_report(self.settings, self.service.loads(), datetime.now(UTC)))

    async def _models(self, _: web.Request) -> web.Response:
        model = self.settings.pair.model_path
        card = {
            "id": model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "shell-router",
            "root": model,
            "parent": None,
            "max_model_len": self.lm.context_length,
        }
        return json_response({"object": "list", "data": [card]})


def _event(content: Any) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"
