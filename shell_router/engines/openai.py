"""A model behind an OpenAI-compatible server, as an engine."""

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime

from shell_router.core.engine import (
    NO_HINTS,
    ChatServing,
    Finish,
    Generation,
    Hints,
    NativeRoute,
    Placement,
    Prefilled,
    Relayed,
    Tokens,
    error_message,
)
from shell_router.core.exact_json import write_json
from shell_router.core.validation import parse_object
from shell_router.engines.address import UNDIVIDED, ServerAddress
from shell_router.engines.fleet import Fleet
from shell_router.engines.native_body import NativeRules, read_native
from shell_router.engines.openai_wire import ChatForm, ChatReader, write_chat
from shell_router.engines.server_client import (
    HTTP_OK,
    NOT_FOUND,
    ServerClient,
    ServerFailure,
    Transport,
    take_slot,
)
from shell_router.engines.wire import refusal_error
from shell_router.errors import EngineError, EngineRejected, InvalidRequest, PromptTooLong
from shell_router.http.client import Exchange
from shell_router.routing.dispatcher import Dispatcher, EngineSlot, SchedulingSettings
from shell_router.routing.failures import RetrySettings
from shell_router.routing.placement import PlacementRequest

log = logging.getLogger(__name__)

CHATS = "chat/completions"
MOST_WAIT_S = 10.0
"""The longest wait for another attempt that a server may ask for; longer ones are the client's."""
MOST_PAUSE_S = 60.0
"""The longest time without requests to a server that asks for more: an account may change."""
ROUTERS_FAULTS = (401, 402, 403, NOT_FOUND, 405, 407)
"""Statuses that only the deployment can mend: its key, its account, its URL or its model."""


class OpenAIFleet(Fleet[ServerAddress]):
    """The server of one model.

    Args:
        transport: The parts of its client.
        scheduling: The queue for it.
        secrets: Values that no message may show.
    """

    ready_route = "models"

    def __init__(
        self, transport: Transport, scheduling: SchedulingSettings, secrets: Collection[str]
    ) -> None:
        self.dispatcher = Dispatcher[ServerClient]([], scheduling, transport.clock, preempts=False)
        super().__init__(transport, {UNDIVIDED: self.dispatcher})
        words = {word for secret in secrets for word in secret.split()}
        # providers show the first letters of a wrong key
        begun = "|".join(re.escape(word[:4]) + r"\S*" for word in words)
        self._secrets = re.compile(begun) if begun else None
        self._was_ready = False

    def hide(self, text: str) -> str:
        """Return the text without secrets."""
        return text if self._secrets is None else self._secrets.sub("***", text)

    async def ready(self) -> None:
        """See `Fleet.ready`; a server without `/models` is ready. No error shows a secret."""
        self._was_ready = False
        try:
            await super().ready()
        except EngineRejected as refusal:
            if refusal.status not in (NOT_FOUND, 405):
                raise EngineRejected(self.hide(str(refusal)), status=refusal.status) from None
        self._was_ready = True

    async def serves(self) -> bool:
        """Tell whether the server answers; one that did is asked again only if its breaker opens.

        Probes come every few seconds, and a provider counts requests.
        """
        if not self.seems_up:
            with suppress(EngineError):
                await self.ready()
        return self._was_ready

    def note_answer(self, server: ServerClient) -> None:
        """Note that the server answered a chat, also where it lists no models."""
        server.note_success()
        server.answers = True
        self._was_ready = True

    @property
    def seems_up(self) -> bool:
        """See `Fleet.seems_up`."""
        return self._was_ready and super().seems_up


class OpenAIEngine:
    """An OpenAI-compatible server as `Engine` and `Relay`.

    Requests are aborted by closing their connections. A request that fails before the first bytes
    of its answer is sent again, as late as the server says.

    Args:
        fleet: The model's server.
        form: How it wants chats.
        silence_s: The longest silence of a server that works on a request.
        rules: Check relayed bodies.
        retries: Of requests that fail before their first token.
        draw: Gives uniform numbers in [0, 1).
        now: Gives seconds since the epoch, for dates in `Retry-After`.
    """

    def __init__(
        self,
        fleet: OpenAIFleet,
        form: ChatForm,
        *,
        silence_s: float,
        rules: NativeRules,
        retries: RetrySettings,
        draw: Callable[[], float] = random.random,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.fleet = fleet
        self._form = form
        self._silence_s = silence_s
        self._rules = rules
        self._retries = retries
        self._draw = draw
        self._now = now

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`. Raises InvalidField for parameters that cannot be sent."""
        body = write_chat(request, self._form)
        placement = PlacementRequest.of(request)
        begun = await self._begin(
            CHATS, body, placement, streamed=True, on_placed=request.on_placed
        )
        server = begun.slot.engine
        reader = ChatReader(server.name, self._form, self.fleet.hide)
        chunk = begun.first
        try:
            while chunk:
                for tokens in reader.feed(chunk):
                    begun.slot.note_tokens(len(tokens.ids))
                    yield tokens
                chunk = await _read_on(begun.exchange, reader)
            ended = reader.finish(len(request.input_ids))
            self.fleet.note_answer(server)
            begun.slot.note_completion()
            for item in ended:
                yield item
        except (EngineError, PromptTooLong) as error:
            server.note_failure(error)
            raise
        finally:
            begun.slot.close()
            if not reader.is_done:  # else the connection is kept
                begun.exchange.close()

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`; these servers cannot."""
        raise EngineRejected("OpenAI-compatible servers prefill nothing ahead.", status=501)

    @property
    def chat(self) -> ChatServing:
        """See `Relay.chat`."""
        return ChatServing(reads_calls=True)

    @asynccontextmanager
    async def forward(
        self,
        route: NativeRoute,
        body: bytes,
        *,
        hints: Hints = NO_HINTS,
        fields: Collection[str] = (),
        admit: Callable[[int], None] = lambda requests: None,
    ) -> AsyncIterator[Relayed]:
        """See `Relay.forward`; there are only OpenAI's routes."""
        if not route.startswith("v1/"):
            raise InvalidRequest(
                f"The server of {self._form.model!r} has no route {route}.",
                remedy="Ask a model on SGLang, or POST /v1/chat/completions.",
            )
        rules = replace(self._rules, fields=self._rules.fields | {*fields})
        native = read_native(body, "", rules, route=route)
        sent = parse_object(body)
        sent.pop("service_tier", None)  # the router's own classes; a provider's has a price
        whole = write_json({**self._form.body, **sent, "model": self._form.model})
        placement = PlacementRequest(max(1, len(body) // 4), None, native.max_output_tokens, hints)
        begun = await self._begin(
            route.removeprefix("v1/"), whole, placement, streamed=native.stream
        )
        try:
            placed = (begun.slot.placement(),)
            kind = begun.exchange.content_type
            yield Relayed(HTTP_OK, kind, self._pass_on(begun), placed)
        finally:
            begun.slot.close()
            begun.exchange.close()

    async def _pass_on(self, begun: "_Begun") -> AsyncIterator[bytes]:
        chunk = begun.first
        while chunk:
            yield chunk
            chunk = await begun.exchange.read()
        self.fleet.note_answer(begun.slot.engine)

    async def _begin(
        self,
        route: str,
        body: bytes,
        placement: PlacementRequest,
        *,
        streamed: bool,
        on_placed: Callable[[Placement], object] = bool,
    ) -> "_Begun":
        """Return the first attempt whose answer began; the caller closes it.

        Raises:
            EngineError: The attempts failed.
            PromptTooLong: The server says so.
        """
        attempt = 0
        while True:
            attempt += 1
            slot = await take_slot(self.fleet.dispatcher, placement)
            server = slot.engine
            on_placed(slot.placement())
            exchange = server.begin(route, body, read_timeout_s=self._silence_s, streamed=streamed)
            try:
                await self._check_head(server, exchange, streamed=streamed)
                return _Begun(slot, exchange, await exchange.read())
            except BaseException as error:
                slot.close()
                exchange.close()
                if not isinstance(error, EngineError | PromptTooLong):
                    raise
                server.note_failure(error)
                wait_s = self._wait_s(error, attempt)
                if wait_s is None:
                    self._hold_back(server, error)
                    raise
                log.warning("attempt %d at the %s failed: %s", attempt, server, error)
            self.fleet.retried += 1
            await asyncio.sleep(wait_s)

    async def _check_head(
        self, server: ServerClient, exchange: Exchange, *, streamed: bool
    ) -> None:
        """Raise the refusal of an error status, or of an answer that is not of this API."""
        await exchange.wait_for_head()
        kind = exchange.content_type
        expected = "text/event-stream" if streamed else "application/json"
        if exchange.status == HTTP_OK and kind.startswith(expected):
            return
        body = await exchange.read_all()
        message = "an HTML page" if "html" in kind else self.fleet.hide(error_message(body))
        if exchange.status == HTTP_OK:
            raise EngineRejected(
                f"The {server.name} answered not {expected}, but {kind}: {message}.",
                status=502,
                remedy="Check that the URL is that of an OpenAI-compatible API.",
            )
        if exchange.status in ROUTERS_FAULTS:
            raise EngineError(
                f"The {server.name} of {self._form.model!r} refused the router "
                f"({exchange.status}): {message}",
                remedy="Check url, model, key and headers in the model's section `openai`.",
            )
        if b'"context_length_exceeded"' in body:
            raise PromptTooLong(message, remedy="Shorten it, or ask for fewer tokens.")
        refusal = refusal_error(server.name, exchange.status, message)
        refusal.retry_s = self._read_retry_after(exchange.retry_after)
        raise refusal

    def _hold_back(self, server: ServerClient, error: ServerFailure) -> None:
        """Send the server no other request while it has asked to wait."""
        if error.retry_s is not None:
            pause_s = min(error.retry_s, MOST_PAUSE_S)
            server.breaker.blocked_until_s = self.fleet.transport.clock() + pause_s

    def _wait_s(self, error: ServerFailure, attempt: int) -> float | None:
        """Return the seconds before the next attempt; None without one."""
        wait_s = self._retries.wait_s(error, attempt, self._draw())
        if wait_s is None or error.retry_s is None:
            return wait_s
        return max(wait_s, error.retry_s) if error.retry_s <= MOST_WAIT_S else None

    def _read_retry_after(self, text: str) -> float | None:
        """Return the seconds that the header names, or that are left until its date."""
        wait_s: float | None = None
        with suppress(ValueError):
            wait_s = float(text) if text[:1].isdigit() else None
            if wait_s is None:
                wait_s = parsedate_to_datetime(text).timestamp() - self._now()
        return None if wait_s is None else max(0.0, wait_s)


@dataclass(frozen=True, slots=True)
class _Begun:
    """An attempt with the first bytes of its answer."""

    slot: EngineSlot[ServerClient]
    exchange: Exchange
    first: bytes


async def _read_on(exchange: Exchange, reader: ChatReader) -> bytes:
    """Return the next bytes; none at the end, where a complete output may lack its counts."""
    if reader.is_done:
        return b""
    try:
        return await exchange.read()
    except EngineError as error:
        if not reader.has_ended:
            raise
        log.warning("the counts of an answer did not come: %s", error)
        return b""
