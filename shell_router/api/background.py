"""Responses in the background: they run without their clients, who ask for them by their ids.

Requests and ends are kept with what the run needs to survive its router; nothing else is stored.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import orjson

from agent_cache import JournalDiffers, Journals, JournalState
from shell_router.api.admission import ADMISSION
from shell_router.api.chat import answer_chat
from shell_router.api.frames import ChatFrames
from shell_router.api.replies import json_reply, stream_error
from shell_router.api.response_translation import OWN_FIELDS, ResponseTranslation, as_chat
from shell_router.api.runs import KEPT_RUNS, Run, make_reuse_error, read_end
from shell_router.api.services import AGENTS, REQUEST_ID, SERVICES, TENANT, TRACE
from shell_router.api.streaming import (
    DONE,
    LAST_EVENT,
    StreamPosition,
    data_frame,
    open_stream,
    stream_run,
)
from shell_router.api.translation import TranslatedFrames, name_own_fields
from shell_router.core.exact_json import NewValues, Values, parse_json
from shell_router.core.validation import field_error, show
from shell_router.errors import InvalidField, StreamChanged, UnknownResponse
from shell_router.http.app import Reply, Request
from shell_router.moa.journal import END
from shell_router.moa.requests import Answer

PREFIX = "resp_"
RESPONSE_ID = re.compile(PREFIX + r"[0-9a-f]{32}")
CANCELLED = {"error": {"message": "The response was cancelled."}}


@dataclass(frozen=True, slots=True)
class BackgroundResponse:
    """A response that any router knows by its id.

    Its run's journal has the request as head, the time of its creation as the first record, and
    its end as the last one.
    """

    request: Request
    key: str
    head: bytes
    created: int
    stream: bool
    after: int = 0
    warnings: Mapping[str, list[str]] = field(default_factory=dict)

    async def look(self) -> JournalState | None:
        """Return the state of its journal; raises InvalidField where there is no store."""
        return await self._store.look(self.request[TENANT], self.key)

    async def show(self, state: JournalState | None) -> Reply:
        """Answer with the response, or its events. If no router runs it, it goes on here."""
        current = self
        if state is not None and state.first:
            kind, _, value = orjson.loads(state.first)
            if kind == "created":  # else it ended while it was created
                current = replace(self, created=value)
        if state is not None and (end := read_end(state.last)) is not None:
            return await current._show_end(end)
        if state is not None and state.is_leased and not current.stream:
            return current.describe("queued" if state.last == state.first else "in_progress")
        _, chat, places = as_chat(parse_json(current.head))
        with name_own_fields(current.request, OWN_FIELDS, places):
            return await answer_chat(current.request, chat, None, current._run)

    async def cancel(self) -> None:
        """Seal the journal, which ends the run with its next record; an end stays as it is."""
        sealed = orjson.dumps([END, "", CANCELLED])
        await self._store.seal(self.request[TENANT], self.key, sealed, orjson.dumps([END])[:-1])

    def describe(self, status: str) -> Reply:
        """Answer with a response that has no output."""
        return json_reply(self.request, self._make_translation().describe(status))

    async def _run(self, run: Run, model: str, sent: Values) -> Reply:
        request = self.request
        store = self._store
        join = partial(request.app[KEPT_RUNS].join, run, self.key, sent, self.head.decode())
        run = join()
        begins = False
        if run.kept is None or not run.kept.has_begun:  # a claim of a running one would undo a seal
            admission = request.app[ADMISSION]
            counted = request.get(AGENTS, 0)
            admission.count(request, run.agents - counted)
            begins = await self._claim(store, run)
            run = join()  # it may have ended meanwhile, or another request may have begun it
            if run.kept is not None and run.kept.has_begun:
                begins = False
                admission.count(request, counted - run.agents)
        assert run.kept is not None, "it was joined"
        frames = ChatFrames(run, model, run.asked)
        if (begins or self.stream) and not run.kept.has_begun:  # else this router does not run it
            run.kept.last_record = partial(self._write_record, frames)
        if begins:
            request.app[ADMISSION].detach(request, run.answer())
        request[TRACE] = run.trace
        if not self.stream:
            return self.describe("queued")
        translated = TranslatedFrames(frames, self._make_translation())
        return await stream_run(request, run.answer, translated, run.require_lease)

    async def _claim(self, store: Journals, run: Run) -> bool:
        """Return whether the run's journal is this router's now; raises KeyReused."""
        tenant = self.request[TENANT]
        try:
            records = await store.claim(tenant, self.key, run.id, self.head.decode())
        except JournalDiffers:
            raise make_reuse_error() from None
        if records is None:
            return False
        if not records:
            created = orjson.dumps(["created", "", self.created])
            await store.append(tenant, self.key, run.id, 0, [created])
        return True

    def _write_record(self, frames: ChatFrames, end: Answer | Exception) -> NewValues:
        if isinstance(end, Exception):
            return stream_error(end, self.request[REQUEST_ID])
        answer = frames.whole(end)
        return {name: answer[name] for name in ("choices", "usage", "warnings") if name in answer}

    async def _show_end(self, end: NewValues) -> Reply:
        translation = self._make_translation()
        error = end.get("error")
        if not self.stream:
            if end == CANCELLED:
                return self.describe("cancelled")
            answer = translation.describe_failure(error) if error else translation.whole(end)
            return json_reply(self.request, answer)
        stream = await open_stream(self.request)
        for choice in end.get("choices", ()):
            choice["delta"] = choice["message"]
        try:
            if error:
                frames = translation.error(end)
            else:
                frames = translation.feed(data_frame(end) + DONE)
        except StreamChanged as changed:
            frames = translation.error(stream_error(changed, self.request[REQUEST_ID]))
        await stream.send(frames)
        return await stream.end()

    @property
    def _store(self) -> Journals:
        store = self.request.app[KEPT_RUNS].store
        if store is None:
            remedy = "Set cache.backend to redis, or send it without and keep the connection open."
            raise field_error("background", "needs a store that outlives the router", remedy)
        return store

    def _make_translation(self) -> ResponseTranslation:
        id = self.key.removeprefix(PREFIX)
        sent = parse_json(self.head)
        translation = ResponseTranslation(id, self.created, sent, self.warnings)
        translation.place = StreamPosition(self.request.headers.get(LAST_EVENT), self.after)
        return translation


async def find_response(request: Request) -> tuple[BackgroundResponse, JournalState]:
    """Return the response that the route names, and its state; raises UnknownResponse."""
    key = request.match["response_id"]
    after = request.query.get("starting_after", "-1")
    if not re.fullmatch("-1|[0-9]{1,12}", after, re.ASCII):
        raise field_error("starting_after", f"must be a sequence_number, not {show(after)}")
    is_streamed = request.query.get("stream", "false").lower() == "true"
    now_s = int(request.app[SERVICES].wall())
    response = BackgroundResponse(request, key, b"", now_s, is_streamed, int(after) + 1)
    state = None
    with suppress(InvalidField):  # a router without a store knows no response
        state = await response.look()
    if state is None or not state.head.startswith(b"{") or not RESPONSE_ID.fullmatch(key):
        remedy = "It has expired, or was sent with another key."
        raise UnknownResponse("No background response of that id is known.", remedy=remedy)
    return replace(response, head=state.head), state
