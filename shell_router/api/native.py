"""What an engine answers itself, passed to a pair, and its answer back: /generate, /prefill_only,
/v1/completions.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import orjson
from typing_extensions import TypedDict

from shell_router.api.admission import ADMISSION
from shell_router.api.conversation import WORD, holds_marker
from shell_router.api.drain import DRAIN
from shell_router.api.engine_chat import COMPLETION, choices_as_one, read_completion
from shell_router.api.fields import read_body, read_end_user, read_models
from shell_router.api.keys import permit
from shell_router.api.models import TARGETS
from shell_router.api.replies import json_reply, stream_error, whole_reply
from shell_router.api.runs import refuse_key
from shell_router.api.services import (
    KEY,
    PLACED,
    REQUEST_ID,
    SERVICES,
    SETTINGS,
    TENANT,
    TOKENS,
    Services,
)
from shell_router.api.streaming import open_stream
from shell_router.api.translation import ItemTranslation
from shell_router.core.engine import Hints, NativeRoute, Relay, Relayed, error_message
from shell_router.core.validation import JsonObject, field_error, json_object, parse_object
from shell_router.engines.wire import EventSplitter, index_of
from shell_router.errors import DeadlineExceeded, EngineRejected, InvalidRequest, UnknownModel
from shell_router.http.app import ClientGone, Reply, Request, Stream
from shell_router.http.sse import data_frame


@json_object
class NativeBody(TypedDict, total=False):
    """SGLang's fields of `/generate`. The router reads `model`; engines check the others."""

    model: str
    text: Any
    input_ids: Any
    sampling_params: Any
    stream: Any
    return_logprob: Any
    logprob_start_len: Any
    top_logprobs_num: Any
    token_ids_logprob: Any
    return_text_in_logprobs: Any
    return_prompt_token_ids: Any


NATIVE = JsonObject(NativeBody)


async def generate(request: Request) -> Reply:
    """Prefill and decode, in SGLang's native shape."""
    return await _forwarded(request, "generate")


async def prefill_only(request: Request) -> Reply:
    """Prefill, keep the KV, decode nothing."""
    return await _forwarded(request, "prefill_only")


def pick_relay(services: Services, header: str | None, body: bytes) -> tuple[str, Relay]:
    """The model named by the x-model header, else by the body's `model`, else the only one, and its
    relay.

    Adapters are only meant where they are named.
    """
    relays = services.relays
    name = header
    if name is None and b'"model"' in body:  # mostly nothing is parsed
        name = NATIVE.read(parse_object(body)).get("model")
    if name is None:
        adapters = {name for name, model in services.models.items() if model.base is not None}
        if len(meant := relays.keys() - adapters) != 1:
            raise InvalidRequest(
                "Which model is meant?", remedy=f"Name it in the x-model header. {_known(relays)}"
            )
        (name,) = meant
    relay = relays.get(name)
    if relay is None:
        raise UnknownModel(f"No model {name!r} takes native requests.", remedy=_known(relays))
    return name, relay


def _known(relays: Mapping[str, Relay]) -> str:
    return f"Known: {', '.join(sorted(relays)) or 'none'}."


async def completions(request: Request) -> Reply:
    """POST /v1/completions: a prompt as it is, without a chat template."""
    sent = parse_object(await read_body(request))
    body = COMPLETION.read(sent)
    models = read_models(body)
    permit(request, models)
    relay = request.app[SERVICES].relays.get(models[0]) if len(models) == 1 else None
    if relay is None or relay.chat is None:
        request.app[TARGETS].choice(models)
        remedy = "Name a plain model on SGLang, or ask /v1/chat/completions."
        raise field_error("model", "does not complete prompts", remedy)
    bodies = read_completion(body, sent, models[0])
    end_user = read_end_user(body)
    return await forwarded(request, relay, "v1/completions", bodies, end_user=end_user)


async def _forwarded(request: Request, route: NativeRoute) -> Reply:
    body = await read_body(request)
    name, relay = pick_relay(request.app[SERVICES], request.headers.get("x-model"), body)
    permit(request, (name,))
    return await forwarded(request, relay, route, [body])


async def forwarded(
    request: Request, relay: Relay, route: NativeRoute, bodies: Sequence[bytes],
    translation: ItemTranslation | None = None, end_user: str | None = None,
) -> Reply:  # fmt: skip
    """The engine's answer to `bodies`, which are the choices of one request."""
    refuse_key(request, "what an engine answers itself")
    if _WORD in bodies[0] and holds_marker(bodies[0].decode(errors="replace")):
        raise InvalidRequest(
            "The body holds a lazy answer's marker.", remedy="Send the text that it stands for."
        )
    limit_s = request.app[SETTINGS].request_timeout_s
    affinity = request.headers.get("x-routing-key")
    hints = Hints(request[TENANT], end_user=end_user)
    answer = NativeAnswer(request, translation)
    admission = request.app[ADMISSION]
    admission.count(request, len(bodies) - 1)

    def sent(body: bytes) -> AbstractAsyncContextManager[Relayed]:
        return relay.forward(
            route,
            body,
            affinity=affinity,
            hints=hints,
            fields=request[KEY].native_fields,
            admit=lambda requests: admission.count(request, requests - 1),
        )

    try:
        with request.app[DRAIN].deadline(limit_s):
            async with (
                choices_as_one(sent, bodies) if len(bodies) > 1 else sent(bodies[0]) as relayed
            ):
                return await answer.forward(relayed)
    except TimeoutError:
        late = DeadlineExceeded(
            f"The engine did not end within {limit_s:g} s.", remedy="Ask for fewer tokens."
        )
        return await answer.failed(late)
    except (asyncio.CancelledError, ClientGone):
        raise
    except Exception as error:
        return await answer.failed(error)
    finally:
        answer.count(bodies)


_WORD = WORD.encode()
_REPORTED = (
    re.compile(rb'"prompt_tokens": ?([0-9]{1,9})'),
    re.compile(rb'"completion_tokens": ?([0-9]{1,9})'),
)
"""As engines write them; what a model writes has its quotes escaped."""


class NativeAnswer:
    """The answer to one native request: the engine's, whole or streamed, its errors in this API's
    shape.
    """

    def __init__(self, request: Request, translation: ItemTranslation | None = None) -> None:
        self._request = request
        self._translation = translation
        self._stream: Stream | None = None
        self._last = dict[int, bytes]()
        self._seen = 0

    def count(self, bodies: Sequence[bytes]) -> None:
        """Note the tokens that the engine has reported; where it has not, about as many as were
        sent either way.
        """
        if not (self._last or self._seen):  # it was refused
            return
        prompt = output = 0
        for said in self._last.values():
            prompts, outputs = (each.findall(said) for each in _REPORTED)
            if self._seen:  # a stream's events count on
                prompts = prompts[-1:]
                outputs = outputs[-1:]
            prompt += sum(map(int, prompts))
            output += sum(map(int, outputs))
        request = self._request
        services = self._request.app[SERVICES]
        used = request[TOKENS] = (
            (prompt, output) if prompt else (sum(map(len, bodies)) // 4, self._seen)
        )
        services.rates.add(request[TENANT], sum(used), services.clock())

    async def forward(self, relayed: Relayed) -> Reply:
        """`relayed` as it comes."""
        self._request[PLACED] = lambda: relayed.placed
        if not relayed.content_type.startswith("text/event-stream"):
            return await self._whole(relayed)
        translation = self._translation
        kind = relayed.content_type
        self._stream = await open_stream(self._request, status=relayed.status, content_type=kind)
        events = EventSplitter()
        async for chunk in relayed.chunks:
            self._seen += 1
            for event in events.feed(chunk):
                if b"_tokens" in event:
                    self._last[index_of(event)] = event
            await self._stream.send(chunk if translation is None else translation.feed(chunk))
        return await self._stream.end()

    async def failed(self, error: Exception) -> Reply:
        """Send `error` in the stream, or raise it if its head has not gone."""
        if self._stream is None:
            if isinstance(
                error, EngineRejected
            ):  # its status is the engine's own, as for one that is passed through
                return self._request.app[ADMISSION].problem_reply(
                    self._request, error, error.status
                )
            raise error
        envelope = stream_error(error, self._request[REQUEST_ID])
        translation = self._translation
        await self._stream.send(
            data_frame(envelope) if translation is None else translation.error(envelope)
        )
        return await self._stream.end()

    async def _whole(self, relayed: Relayed) -> Reply:
        body = b"".join([chunk async for chunk in relayed.chunks])
        if relayed.status >= 400:
            said = f"The engine answered {relayed.status}: {error_message(body)}"
            return await self.failed(EngineRejected(said, status=relayed.status))
        self._last = {0: body}
        if self._translation is not None:
            return json_reply(self._request, self._translation.whole(orjson.loads(body)))
        return whole_reply(self._request, body, relayed.status, relayed.content_type)
