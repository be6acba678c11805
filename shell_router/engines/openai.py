"""A model behind an OpenAI-compatible server, as an engine."""

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import suppress
from email.utils import parsedate_to_datetime

from shell_router.core.engine import Finish, Generation, Prefilled, Tokens, error_message
from shell_router.engines.address import UNDIVIDED, ServerAddress
from shell_router.engines.fleet import Fleet
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
from shell_router.errors import EngineError, EngineRejected, PromptTooLong
from shell_router.http.client import Exchange
from shell_router.routing.dispatcher import Dispatcher, SchedulingSettings
from shell_router.routing.failures import DEFAULT_RETRIES, RetrySettings
from shell_router.routing.placement import PlacementRequest

log = logging.getLogger(__name__)

MOST_WAIT_S = 10.0
"""The longest wait for another attempt that a server may ask for; longer ones are the client's."""
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
        self, transport: Transport, scheduling: SchedulingSettings, secrets: Collection[str] = ()
    ) -> None:
        self.dispatcher = Dispatcher[ServerClient]([], scheduling, transport.clock)
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
    """An OpenAI-compatible server as `Engine`; requests are aborted by closing their connections.

    A request that fails before its first token is sent again, as late as the server says.

    Args:
        fleet: The model's server.
        form: How it wants chats.
        silence_s: The longest silence of a server that works on a request.
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
        retries: RetrySettings = DEFAULT_RETRIES,
        draw: Callable[[], float] = random.random,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.fleet = fleet
        self._form = form
        self._silence_s = silence_s
        self._retries = retries
        self._draw = draw
        self._now = now

    async def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """See `Engine.generate`. Raises InvalidField for parameters that cannot be sent."""
        body = write_chat(request, self._form)
        attempt = 0
        while True:
            attempt += 1
            slot = await take_slot(self.fleet.dispatcher, PlacementRequest.of(request))
            server = slot.engine
            reader = ChatReader(server.name, self._form, self.fleet.hide)
            exchange: Exchange | None = None
            has_begun = False
            try:
                request.on_placed(slot.placement())
                exchange = server.begin(
                    "chat/completions", body, read_timeout_s=self._silence_s, streamed=True
                )
                await self._check_head(server, exchange)
                while tokens := await self._read(exchange, reader):
                    for piece in tokens:
                        has_begun = True
                        slot.note_tokens(len(piece.ids))
                        yield piece
                ended = reader.finish(len(request.input_ids))
                self.fleet.note_answer(server)
                slot.note_completion()
                for item in ended:
                    yield item
                return
            except (EngineError, PromptTooLong) as error:
                server.note_failure(error)
                wait_s = self._wait_s(error, attempt)
                if has_begun or wait_s is None:
                    raise
                log.warning("attempt %d at the %s failed: %s", attempt, server, error)
                self.fleet.retried += 1
            finally:
                slot.close()
                if exchange is not None and not reader.is_done:
                    exchange.close()
            await asyncio.sleep(wait_s)

    async def prefill(self, request: Generation) -> Prefilled:
        """See `Engine.prefill`; these servers cannot."""
        raise EngineRejected("OpenAI-compatible servers prefill nothing ahead.", status=501)

    async def _check_head(self, server: ServerClient, exchange: Exchange) -> None:
        """Raise the refusal of an error status, or of an answer that is no stream."""
        await exchange.wait_for_head()
        kind = exchange.content_type
        if exchange.status == HTTP_OK and kind.startswith("text/event-stream"):
            return
        body = await exchange.read_all()
        message = "an HTML page" if "html" in kind else self.fleet.hide(error_message(body))
        if exchange.status == HTTP_OK:
            raise EngineRejected(
                f"The {server.name} answered no stream of events, but {kind}: {message}.",
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

    async def _read(self, exchange: Exchange, reader: ChatReader) -> list[Tokens]:
        """Return the next tokens; none at the end, where a complete output may lack its counts."""
        while not reader.is_done:
            try:
                chunk = await exchange.read()
            except EngineError as error:
                if not reader.has_ended:
                    raise
                log.warning("the counts of an answer did not come: %s", error)
                return []
            if not chunk:
                return []
            if tokens := reader.feed(chunk):
                return tokens
        return []

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
