"""Requests that a pair of engines answers itself, as those of /generate and /prefill_only."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import orjson
from typing_extensions import TypedDict

from shell_router.api.admission import ADMISSION, permit
from shell_router.api.bodies import read_body
from shell_router.api.choices import forward_choices
from shell_router.api.conversation import WORD, holds_marker
from shell_router.api.replies import (
    join_warnings,
    json_reply,
    note_ignored,
    stream_error,
    whole_reply,
)
from shell_router.api.runs import require_no_key
from shell_router.api.services import (
    KEY,
    MODELS_ASKED,
    PLACED,
    REQUEST_ID,
    SERVICES,
    SETTINGS,
    TENANT,
    TOKENS,
    TRACE,
    Services,
)
from shell_router.api.sessions import read_session
from shell_router.api.streaming import data_frame, open_stream
from shell_router.api.translation import Translation
from shell_router.core.engine import (
    DEFAULT_MAX_NEW_TOKENS,
    Hints,
    NativeRoute,
    Relay,
    Relayed,
    error_message,
)
from shell_router.core.validation import JsonObject, parse_object
from shell_router.engines.wire import EventSplitter, index_of
from shell_router.errors import (
    DeadlineExceeded,
    EngineRejected,
    Forbidden,
    InvalidRequest,
    UnknownModel,
)
from shell_router.http.app import ClientGone, Reply, Request, Stream
from shell_router.moa.deadline import Deadline


class NativeBody(TypedDict, total=False):
    """SGLang's fields of `/generate`. `read_native` checks all but `model`."""

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
CHARACTERS_PER_TOKEN = 4


async def generate(request: Request) -> Reply:
    """Prefill and decode, in SGLang's native shape."""
    return await _forward_body(request, "generate")


async def prefill_only(request: Request) -> Reply:
    """Prefill, keep the KV, decode nothing."""
    return await _forward_body(request, "prefill_only")


def pick_relay(services: Services, header: str | None, body: bytes) -> tuple[str, Relay]:
    """Return the model in `header`, else in the body's `model`, else the only one, and its relay.

    Adapters count only where they are named.

    Raises:
        InvalidRequest: Several models could be meant.
        UnknownModel: The model takes no native requests.
    """
    relays = services.relays
    name = header
    if name is None and b'"model"' in body:  # mostly nothing is parsed
        name = NATIVE.read(parse_object(body)).get("model")
    if name is None:
        others = {
            name
            for name, model in services.models.items()
            if model.base is not None or model.takes_messages
        }
        candidates = relays.keys() - others
        if len(candidates) != 1:
            remedy = f"Name it in the header x-model or in the field model. {_list_known(relays)}"
            raise InvalidRequest("Which model is meant?", remedy=remedy)
        (name,) = candidates
    relay = relays.get(name)
    if relay is None:
        raise UnknownModel(f"No model {name!r} takes native requests.", remedy=_list_known(relays))
    return name, relay


def _list_known(relays: Mapping[str, Relay]) -> str:
    return f"Known: {', '.join(sorted(relays)) or 'none'}."


async def _forward_body(request: Request, route: NativeRoute) -> Reply:
    body = await read_body(request)
    name, relay = pick_relay(request.app[SERVICES], request.headers.get("x-model"), body)
    permit(request, (name,))
    return await forward(request, relay, route, [body])


async def forward(
    request: Request,
    relay: Relay,
    route: NativeRoute,
    bodies: Sequence[bytes],
    translation: Translation | None = None,
    hints: Hints | None = None,
) -> Reply:
    """Answer with the engines' answer to `bodies`, which are the choices of one request."""
    require_no_key(request, "what an engine answers itself")
    if request.app[SERVICES].budgets.limits(request[TENANT]):
        raise Forbidden(
            "The API key has a budget, and what an engine answers itself is not counted in it.",
            remedy="Ask for a chat without images, log probabilities and tools of the engine, or "
            "use a key without daily_budget and program_budget.",
        )
    if _WORD in bodies[0] and holds_marker(bodies[0].decode(errors="replace")):
        raise InvalidRequest(
            "The body holds a lazy answer's marker.", remedy="Send the text that it stands for."
        )
    hints = replace(hints or Hints(request[TENANT]), session=read_session(request.headers))
    answer = NativeAnswer(request, translation)
    admission = request.app[ADMISSION]
    admission.count(request, len(bodies) - 1)

    def send(body: bytes) -> AbstractAsyncContextManager[Relayed]:
        return relay.forward(
            route,
            body,
            hints=hints,
            fields=request[KEY].native_fields,
            admit=lambda requests: admission.count(request, requests - 1),
        )

    try:
        choices = forward_choices(send, bodies) if len(bodies) > 1 else send(bodies[0])
        return await answer.send(choices)
    finally:
        answer.count(bodies, decodes=route != "prefill_only")


_WORD = WORD.encode()
_LIMIT = re.compile(rb'"max_(?:new_|completion_)?tokens"\s*:\s*([0-9]{1,9})')
_REPORTED = (
    re.compile(rb'"prompt_tokens": ?([0-9]{1,9})'),
    re.compile(rb'"completion_tokens": ?([0-9]{1,9})'),
)
"""Counts as engines write them; the quotes of a model's text are escaped."""


class NativeAnswer:
    """The engine's answer, whole or streamed, with its errors in this API's shape."""

    def __init__(self, request: Request, translation: Translation | None) -> None:
        self._request = request
        self._translation = translation
        self._services = request.app[SERVICES]
        self._started_s = self._services.clock()
        self._stream: Stream | None = None
        self._last = dict[int, bytes]()
        self._seen = 0
        self._was_left = False

    def count(self, bodies: Sequence[bytes], *, decodes: bool) -> None:
        """Note the tokens that the engine reported, or an estimate where it reported none.

        A client that left before the first of them is charged what its request could have cost.
        """
        if not (self._last or self._seen or self._was_left):  # it was refused
            return
        prompt, output = (self._sum_reported(pattern) for pattern in _REPORTED)
        if not prompt:
            prompt = sum(map(len, bodies)) // CHARACTERS_PER_TOKEN
            output = self._seen
        if decodes and not (self._last or self._seen):
            limits = [_LIMIT.search(body) for body in bodies]
            output = sum(int(each[1]) if each else DEFAULT_MAX_NEW_TOKENS for each in limits)
        self._request[TOKENS] = prompt, output
        now_s = self._services.clock()
        self._services.rates.add(self._request[TENANT], prompt + output, now_s)

    def _sum_reported(self, pattern: re.Pattern[bytes]) -> int:
        counts = [pattern.findall(event) for event in self._last.values()]
        if self._seen:  # a stream's events count on
            counts = [of_event[-1:] for of_event in counts]
        return sum(int(count) for of_event in counts for count in of_event)

    async def send(self, opening: AbstractAsyncContextManager[Relayed]) -> Reply:
        """Pass on what `opening` yields, within the time that a request may take."""
        limit_s = self._request.app[SETTINGS].request_timeout_s
        try:
            with Deadline(limit_s, self._services.deadlines):
                async with opening as relayed:
                    return await self._forward(relayed)
        except TimeoutError:
            late = DeadlineExceeded(
                f"The engine did not end within {limit_s:g} s.", remedy="Ask for fewer tokens."
            )
            return await self.fail(late)
        except (asyncio.CancelledError, ClientGone):
            self._was_left = True
            raise
        except Exception as error:
            return await self.fail(error)

    async def _forward(self, relayed: Relayed) -> Reply:
        self._request[PLACED] = lambda: relayed.placed
        if not relayed.content_type.startswith("text/event-stream"):
            return await self._whole(relayed)
        if TRACE not in self._request:  # runs are timed by their events
            seconds = self._services.metrics.first_token_seconds
            wait_s = self._services.clock() - self._started_s
            seconds.labels(self._request[MODELS_ASKED]).observe(wait_s)
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

    async def fail(self, error: Exception) -> Reply:
        """Send `error` in the stream, or raise it if its head has not gone."""
        if self._stream is None:
            if isinstance(error, EngineRejected):  # the status is the engine's own
                admission = self._request.app[ADMISSION]
                return admission.problem_reply(self._request, error, error.status)
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
            what = f"The engine answered {relayed.status}: {error_message(body)}"
            return await self.fail(EngineRejected(what, status=relayed.status))
        self._last = {0: body}
        warnings = note_ignored(self._request, ())
        if self._translation is None and not warnings:
            return whole_reply(self._request, body, relayed.status, relayed.content_type)
        answer = orjson.loads(body)
        if self._translation is not None:
            answer = self._translation.whole(answer)
        return json_reply(self._request, {**answer, **join_warnings(warnings, answer)})
