"""The HTTP routes of an embedded server, the same on both sides."""

import time
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from aiohttp import ClientConnectionResetError, web

from shell_router.engines.embedded import answers, status
from shell_router.engines.embedded.adapter_routes import AdapterRoutes
from shell_router.engines.embedded.answers import Answer, json_response
from shell_router.engines.embedded.causal_lm import CausalLm
from shell_router.engines.embedded.inflight import Inflight, InflightRequests
from shell_router.engines.embedded.loaded_adapters import LoadedAdapters
from shell_router.engines.embedded.service import Service, output_of
from shell_router.engines.embedded.settings import ServerSettings
from shell_router.engines.embedded.wire import (
    FAKE_BOOTSTRAP_HOST,
    ContractViolation,
    GenerateRequest,
    MalformedBody,
    RequestLimits,
    parse_body,
    read_request,
)
from shell_router.errors import InvalidRequest

BODY_LIMIT_BYTES = 64 * 2**20
PREFILL_ONLY = {
    "bootstrap_host": FAKE_BOOTSTRAP_HOST,
    "sampling_params": {"max_new_tokens": 0},
    "stream": False,
    "return_logprob": False,
}


@dataclass(frozen=True, slots=True)
class EngineApp:
    """Routes over a service. `settings` are those in force, with the ports really taken."""

    settings: ServerSettings
    lm: CausalLm
    service: Service
    inflight: InflightRequests
    adapters: LoadedAdapters

    def application(self) -> web.Application:
        app = web.Application(client_max_size=BODY_LIMIT_BYTES)
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, self._health)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self._server_info)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._model_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/generate", self._generate)
        if self.settings.mode == "prefill":
            app.router.add_post("/prefill_only", self._prefill_only)
        AdapterRoutes(self.adapters, self.settings.pair.model_path, self.lm.context_length).add_to(app)
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, {})

    async def _prefill_only(self, request: web.Request) -> web.StreamResponse:
        """A `/generate` whose output is nothing: the prompt's KV stays in the prefix cache, none is transferred."""
        return await self._serve(request, PREFILL_ONLY)

    async def _serve(self, request: web.Request, overrides: Mapping[str, Any]) -> web.StreamResponse:
        try:
            body = {**parse_body(await request.read()), **overrides}
            if body.get("stream"):
                return await self._stream(request, body)
            return await self._whole(self._read(body))
        except MalformedBody as error:
            return answers.malformed(str(error))
        except ContractViolation as error:
            return answers.contract_refusal(str(error))
        except InvalidRequest as error:
            return answers.refusal(str(error))

    def _read(self, body: Any) -> GenerateRequest:
        pair = self.settings.pair
        limits = RequestLimits(self.lm.context_length, pair.max_total_tokens, self.lm.vocab_size)
        return read_request(body, self.lm.tokenizer, limits)

    @contextmanager
    def _in_work(self, request: GenerateRequest) -> Iterator[Inflight]:
        """The request among those in work, its adapter kept, for the length of the block. Raises `InvalidRequest`."""
        with self.adapters.used(request.lora_path) as adapter:
            self.service.check(request)
            with self.inflight.add(request, adapter) as inflight:
                yield inflight

    async def _whole(self, request: GenerateRequest) -> web.Response:
        with self._in_work(request) as inflight:
            answer = self._answer(request)
            began = time.perf_counter()
            async with aclosing(output_of(self.service, inflight)) as output:
                async for pieces in output:
                    answer.add(pieces)
            return finished_response(answer, inflight, time.perf_counter() - began)

    async def _stream(self, request: web.Request, body: Any) -> web.StreamResponse:
        """As SGLang: the head is sent before the request is checked, so a refusal is an event of the stream."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        with suppress(ClientConnectionResetError):  # the client has left, and what it asked for has ended
            await self._write_stream(request, body, response)
        return response

    async def _write_stream(self, request: web.Request, body: Any, response: web.StreamResponse) -> None:
        try:
            with self._in_work(self._read(body)) as inflight:
                await response.prepare(request)
                await self._write_events(response, inflight)
        except ContractViolation:
            raise
        except InvalidRequest as error:
            await response.prepare(request)
            await response.write(answers.sse(answers.stream_error(str(error))))
        await response.write(answers.STREAM_END)
        await response.write_eof()

    async def _write_events(self, response: web.StreamResponse, inflight: Inflight) -> None:
        answer = self._answer(inflight.request)
        began = time.perf_counter()
        async with aclosing(output_of(self.service, inflight)) as output:
            async for pieces in output:
                answer.add(pieces)
                event = answer.render(inflight.cached_tokens, time.perf_counter() - began)
                await response.write(answers.sse(event))

    def _answer(self, request: GenerateRequest) -> Answer:
        return Answer(request, self.lm.tokenizer, incremental=self.settings.pair.incremental_streaming_output)

    async def _abort(self, request: web.Request) -> web.Response:
        try:
            body = parse_body(await request.read())
        except InvalidRequest as error:
            return answers.malformed(str(error))
        if body.get("abort_all"):
            self.inflight.abort_all()
        else:
            self.inflight.abort(body.get("rid") or "")
        return web.Response()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.service.alive else 503)

    async def _server_info(self, _: web.Request) -> web.Response:
        return json_response(status.server_info(self.settings, self.lm, self.service.loads()))

    async def _model_info(self, _: web.Request) -> web.Response:
        return json_response(status.model_info(self.settings, self.lm))

    async def _loads(self, _: web.Request) -> web.Response:
        return json_response(status.loads_report(self.settings, self.service.loads(), datetime.now(UTC)))

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=status.metrics_text(self.settings, self.service.loads(), len(self.adapters.paths)))


def finished_response(answer: Answer, inflight: Inflight, latency_s: float) -> web.Response:
    """A whole answer, or the error that a failure with a status is."""
    reason = answer.finish_reason or {}
    code = reason.get("status_code") if reason.get("type") == "abort" else None
    if code is None:
        return json_response(answer.render(inflight.cached_tokens, latency_s))
    if code == 400:
        return answers.refusal(reason["message"])
    return answers.server_error(reason["message"], code)
