"""/v1/responses: OpenAI's newer shape of a chat, translated to a chat completion and back.

Those with `background` run without their clients. Their requests and ends are kept with what the
run needs to survive its router; nothing else is stored.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import orjson

from agent_cache import JournalDiffers, Journals, JournalState
from shell_router.api.admission import ADMISSION
from shell_router.api.chat import INERT as CHAT_INERT
from shell_router.api.chat import answer_chat
from shell_router.api.conversation import function_name
from shell_router.api.fields import (
    END_USER,
    SAMPLING,
    Fields,
    as_json,
    parse_body,
    read_body,
    shown,
)
from shell_router.api.frames import ChatFrames
from shell_router.api.panels import BRINGING, PANEL_FIELDS
from shell_router.api.replies import json_reply, note_ignored, shared_fields, stream_error
from shell_router.api.runs import KEPT_RUNS, KEY_HEADER, Run, end_of, key_of, place_of, reused
from shell_router.api.services import AGENTS, REQUEST_ID, SERVICES, TENANT, TRACE
from shell_router.api.streaming import (
    LAST_EVENT,
    StreamPosition,
    open_stream,
    respond,
)
from shell_router.api.translation import Events, ItemTranslation, Kind, TranslatedFrames, joined
from shell_router.core.sampling import check_depth
from shell_router.errors import InvalidField, StreamChanged, UnknownResponse
from shell_router.http.app import Reply, Request
from shell_router.http.sse import DONE, data_frame
from shell_router.moa.journal import END
from shell_router.moa.requests import Answer

SAME = (
    frozenset(SAMPLING) - {"max_tokens", "max_completion_tokens", "response_format"}
    | BRINGING
    | PANEL_FIELDS
    | {"chat_template_kwargs", "metadata", "model", "parallel_tool_calls", "stream", *END_USER}
    | {"lazy", "prefill", "program"}
)
"""Fields that mean the same in a chat completion."""

INERT = CHAT_INERT - {"parallel_tool_calls", "store"} | {
    "client_metadata",
    "include",
    "stream_options",
}
"""Fields that never change an answer, or ask for parts of it that there are none of."""

STATEFUL = {
    **dict.fromkeys(("previous_response_id", "conversation"), "Send all earlier items in input."),
    "prompt": "Nothing is stored: send the prompt's text in instructions.",
}
ROLES = ("system", "developer", "user", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text")


def as_chat(body: Fields) -> dict[str, Any]:
    """The chat completion's body that asks for the same. Raises InvalidField."""
    for name, remedy in STATEFUL.items():
        if body.raw(name) not in (None, False):
            raise body.refuse(name, "is not served", remedy)
    chat = {name: value for name in body.given(SAME) if (value := body.raw(name)) is not None}
    if (instructions := body.text("instructions")) is not None:
        chat["messages"] = [{"role": "system", "content": instructions}]
    chat["messages"] = [*chat.get("messages", ()), *_messages(body)]
    if (limit := body.integer("max_output_tokens", 1, 2**31 - 1)) is not None:
        chat["max_completion_tokens"] = limit
    if tools := [_tool(one) for one in body.objects("tools")]:
        chat["tools"] = tools
    choice = body.raw("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    if choice is not None and (choice != "auto" or tools):
        chat["tool_choice"] = choice
    if (text := body.object("text")) is not None and (form := text.object("format")) is not None:
        chat["response_format"] = _response_format(form)
    if (reasoning := body.object("reasoning")) is not None and (
        effort := reasoning.text("effort")
    ) is not None:
        chat["reasoning_effort"] = effort
    if body.flag("stream") or body.flag("background"):
        chat["stream_options"] = {"include_usage": True}
    if body.raw("truncation") not in (None, "disabled"):
        raise body.refuse(
            "truncation", "must be disabled", "Shorten the input: what does not fit is refused."
        )
    return chat


def _response_format(form: Fields) -> dict[str, Any]:
    if form.text("type") != "json_schema":
        return {"type": form.text("type")}
    return {
        "type": "json_schema",
        "json_schema": {key: form.raw(key) for key in ("name", "schema", "strict")},
    }


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.text("type") != "function":
        raise tool.refuse(
            "type",
            "must be function",
            "The router runs no tools of its own: run them in the client.",
        )
    function_name(tool)
    given = tool.given(("name", "description", "parameters", "strict"))
    return {"type": "function", "function": {name: tool.raw(name) for name in given}}


def _messages(body: Fields) -> list[dict[str, Any]]:
    given = body.raw("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise body.refuse("input", f"must be a string or an array of items, not {shown(given)}")
    messages: list[dict[str, Any]] = []
    for item in body.objects("input"):
        kind = item.text("type") or "message"
        if kind == "message":
            if (role := item.required_text("role")) not in ROLES:
                raise item.refuse("role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
            messages.append({"role": role, "content": joined(item.parts("content", _part))})
        elif kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": item.required_text("call_id")}
            messages.append(result | {"content": joined(item.parts("output", _part))})
        elif kind == "function_call":
            _add_call(messages, item)
        elif kind != "reasoning":  # what a model thought before is not part of a template's history
            remedy = (
                "Send message, function_call, function_call_output or reasoning items, each "
                "with its whole content."
            )
            raise item.refuse("type", f"is {shown(kind)}, which is not served", remedy)
    return messages


def _add_call(messages: list[dict[str, Any]], item: Fields) -> None:
    """Calls of one turn are one message in a chat, together with the text before them."""
    function = {"name": item.required_text("name"), "arguments": item.raw("arguments")}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append({"id": item.required_text("call_id"), "type": "function", "function": function})


def _part(part: Fields) -> dict[str, Any]:
    kind = part.text("type")
    if kind in TEXT_PARTS:
        return {"type": "text", "text": part.text("text") or ""}
    if kind == "refusal":
        return {"type": "text", "text": part.text("refusal") or ""}
    if kind == "input_image" and (url := part.text("image_url")):
        return {"type": "image_url", "image_url": {"url": url}}
    remedy = "Send input_text, or input_image with image_url."
    raise part.refuse("type", f"is {shown(kind)}, which is not served", remedy)


class ResponseTranslation(ItemTranslation):
    """A chat completion, or the chunks of one, as a response. `id` is fresh."""

    def __init__(
        self, id: str, created: int, asked: Mapping[str, Any], warnings: Mapping[str, list[str]]
    ) -> None:
        super().__init__(asked)
        self._id = id
        self._sent = 0
        self._at: dict[str, Any] = {}
        self._about = {
            "id": f"resp_{id}",
            "object": "response",
            "created_at": created,
            "model": self.model,
            **{name: asked.get(name) for name in REPEATED},
            "metadata": asked.get("metadata") or {},
            "parallel_tool_calls": asked.get("parallel_tool_calls", True) is not False,
            "background": asked.get("background") is True,
            "previous_response_id": None,
            "store": asked.get("background") is True,
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "truncation": "disabled",
            **warnings,
        }

    def _begun(self) -> Events:
        response = self.standing("in_progress")
        return [
            ("response.created", {"response": response}),
            ("response.in_progress", {"response": response}),
        ]

    def _opened(self, kind: Kind, call: Mapping[str, Any]) -> Events:
        prefix, own = OWN[kind]
        at = len(self.items)
        id = f"{prefix}_{self._id}_{len(self.items)}"
        item = {"id": id, "type": kind, **own, "status": "in_progress"}
        self._at = {"item_id": id, "output_index": at}
        added = ("response.output_item.added", {"output_index": at, "item": item})
        if kind == "function_call":
            item |= {"call_id": call["id"], "name": call["name"]}
        else:
            self._at["content_index"] = 0
        self.items.append({**item})
        if kind == "function_call":
            return [added]
        return [added, self._part("added", PARTS[kind])]

    def _grown(self, text: str) -> Events:
        kind = self.items[-1]["type"]
        return [(f"response.{NAMES[kind]}.delta", {**self._at, "delta": text, **LOGPROBS[kind]})]

    def _closed(self, text: str) -> Events:
        item = self.items[-1]
        kind = item["type"]
        done = f"response.{NAMES[item['type']]}.done"
        item["status"] = "incomplete" if self.reason == "length" else "completed"
        events: list[tuple[str, Mapping[str, Any]]]
        if kind == "function_call":
            item["arguments"] = text or "{}"
            events = [(done, {**self._at, "name": item["name"], "arguments": item["arguments"]})]
        else:
            item["content"] = [{**PARTS[kind], "text": text}]
            events = [
                (done, {**self._at, "text": text, **LOGPROBS[kind]}),
                self._part("done", item["content"][0]),
            ]
        return [
            *events,
            ("response.output_item.done", {"output_index": self._at["output_index"], "item": item}),
        ]

    def _part(self, what: str, part: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        return f"response.content_part.{what}", {**self._at, "part": part}

    def _ended(self) -> Events:
        response = self.answer()
        return [(f"response.{response['status']}", {"response": response})]

    def _failed(self, error: Mapping[str, Any]) -> Events:
        return [
            ("response.failed", {"response": self.fault(error)})
        ]  # clients know no other error in a stream

    def fault(self, error: Mapping[str, Any]) -> dict[str, Any]:
        """The response that failed."""
        return self.standing("failed", {**shared_fields(error), "code": "server_error"})

    def answer(self) -> dict[str, Any]:
        """See `ItemTranslation`."""
        return self.standing("completed" if self.reason in ("stop", "tool_calls") else "incomplete")

    def _numbered(self, event: dict[str, Any]) -> dict[str, Any]:
        """With a place an event's number is that of its last character."""
        if self.place is None:
            self._sent = self._sent + 1
        else:
            self._sent = self.place.at
        return {**event, "sequence_number": self._sent - 1}

    def standing(self, status: str, error: dict[str, str] | None = None) -> dict[str, Any]:
        """The response as far as it is, in this status."""
        if status == "incomplete":
            why = {"reason": "max_output_tokens"}
        else:
            why = None
        facts = {
            "status": status,
            "error": error,
            "incomplete_details": why,
            "usage": _usage(self.usage),
        }
        return {**self._about, **facts, "output": list(self.items)}


REPEATED = ("instructions", "max_output_tokens", "reasoning", "temperature", "top_p", "user")
"""What the answer repeats as it was sent."""
OWN: Mapping[Kind, tuple[str, dict[str, Any]]] = {
    "message": ("msg", {"role": "assistant", "content": []}),
    "reasoning": ("rs", {"summary": [], "content": []}),
    "function_call": ("fc", {"arguments": ""}),
}
"""How the ids of items begin, and the fields that each kind has."""
PARTS: Mapping[str, dict[str, Any]] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}
NAMES = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
}
LOGPROBS: Mapping[str, dict[str, Any]] = {
    "message": {"logprobs": []},
    "reasoning": {},
    "function_call": {},
}


def _usage(found: Mapping[str, Any]) -> dict[str, Any] | None:
    if not found:
        return None
    cached = (found.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    details = found.get("completion_tokens_details") or {}
    thought = found.get("reasoning_tokens") or details.get("reasoning_tokens") or 0
    return {
        "input_tokens": found["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": found["total_tokens"],
    }


PREFIX = "resp_"
RESPONSE_ID = re.compile(PREFIX + r"[0-9a-f]{32}")
CANCELLED = {"error": {"message": "The response was cancelled."}}


@dataclass(frozen=True, slots=True)
class BackgroundResponse:
    """A response that is asked for by its id, at any router. Its run's journal has its request as
    head, the time of its creation as the first record, and how it has ended as the last one."""

    request: Request
    key: str
    head: bytes
    created: int
    stream: bool
    after: int = 0
    warnings: Mapping[str, list[str]] = field(default_factory=dict)

    async def look(self) -> JournalState | None:
        """What its journal is like. Raises InvalidField where there is no store."""
        return await self._store.look(self.request[TENANT], self.key)

    async def shown(self, state: JournalState | None) -> Reply:
        """The response as it is now, or its events. It goes on here if no router runs it."""
        kind, _, value = (
            orjson.loads(state.first) if state is not None and state.first else ("", "", 0)
        )
        # or it is just being created, or was ended then
        if kind == "created":
            now = replace(self, created=value)
        else:
            now = self
        if state is not None and (end := end_of(state.last)) is not None:
            return await now._ended(end)
        if state is not None and state.is_leased and not now.stream:
            return now.standing("queued" if state.last == state.first else "in_progress")
        return await answer_chat(
            now.request, Fields(as_chat(Fields(orjson.loads(now.head)))), None, now._run
        )

    async def cancel(self) -> None:
        """Have its router end it, which learns of it with its next record; one that has ended stays
        as it is.
        """
        sealed = orjson.dumps([END, "", CANCELLED])
        await self._store.seal(self.request[TENANT], self.key, sealed, orjson.dumps([END])[:-1])

    def standing(self, status: str) -> Reply:
        """It has no output yet, or will have none."""
        return json_reply(self.request, self._translation().standing(status))

    async def _run(self, run: Run, model: str, body: Fields) -> Reply:
        request = self.request
        head = self.head.decode()
        store = self._store
        named = (self.request[TENANT], self.key)
        join = partial(request.app[KEPT_RUNS].join, run, self.key, body, head)
        admission = request.app[ADMISSION]
        counted = request.get(AGENTS, 0)
        run = join()
        begins = False
        if (
            run.kept is None or not run.kept.has_begun
        ):  # a claim for one that runs would take back a seal
            admission.count(request, run.agents - counted)
            try:
                records = await store.claim(*named, run.id, head)
            except JournalDiffers:
                raise reused() from None
            if records is not None and not records:
                await store.append(*named, run.id, 0, [orjson.dumps(["created", "", self.created])])
            run = (
                join()
            )  # the one before may have ended meanwhile, or another request have begun it
            begins = records is not None
            if run.kept is not None and run.kept.has_begun:
                begins = False
                admission.count(request, counted - run.agents)
        assert run.kept is not None, "it was joined"
        frames = ChatFrames(run, model, include_usage=True, include_agents=False)
        if (begins or self.stream) and not run.kept.has_begun:  # else this router does not run it
            run.kept.last_record = partial(self._last_record, frames)
        if begins:
            admission.detach(request, run.answer())
        request[TRACE] = run.trace
        if not self.stream:
            return self.standing("queued")
        return await respond(
            request, run.answer, TranslatedFrames(frames, self._translation()), stream=True
        )

    def _last_record(self, frames: ChatFrames, end: Answer | Exception) -> dict[str, Any]:
        if isinstance(end, Exception):
            return stream_error(end, self.request[REQUEST_ID])
        return {
            name: value for name, value in frames.whole(end).items() if name in ("choices", "usage")
        }

    async def _ended(self, end: dict[str, Any]) -> Reply:
        translation = self._translation()
        error = end.get("error")
        if not self.stream:
            if end == CANCELLED:
                return self.standing("cancelled")
            return json_reply(
                self.request, translation.fault(error) if error else translation.whole(end)
            )
        stream = await open_stream(self.request)
        for choice in end.get("choices", ()):
            choice["delta"] = choice["message"]
        try:
            if error:
                sent = translation.error(end)
            else:
                sent = translation.feed(data_frame(end) + DONE)
        except StreamChanged as changed:
            sent = translation.error(stream_error(changed, self.request[REQUEST_ID]))
        await stream.send(sent)
        return await stream.end()

    @property
    def _store(self) -> Journals:
        if (store := self.request.app[KEPT_RUNS].store) is not None:
            return store
        remedy = "Set cache.backend to redis, or send it without and keep the connection open."
        raise InvalidField(
            "background needs a store that outlives the router.", field="background", remedy=remedy
        )

    def _translation(self) -> ResponseTranslation:
        made = ResponseTranslation(
            self.key.removeprefix(PREFIX), self.created, orjson.loads(self.head), self.warnings
        )
        made.place = StreamPosition(self.request.headers.get(LAST_EVENT), self.after)
        return made


async def create_response(request: Request) -> Reply:
    """Answer as a chat completion, in the shape of OpenAI's responses."""
    body = parse_body(await read_body(request))
    chat = as_chat(body)
    for name in body.given(
        ("metadata", "model", "reasoning", "text", "tool_choice", "tools", "user")
    ):  # are repeated
        check_depth(body.raw(name), name)
    in_background = body.flag("background")
    is_stored = body.flag("store")
    is_keyed = KEY_HEADER in request.headers
    body.check_spelling(SAME | INERT)
    ignored = ["store"] * (is_stored and not in_background) + [
        name for name in body.unread if name not in INERT
    ]
    services = request.app[SERVICES]
    warnings = note_ignored(request, ignored)
    id = services.new_id()
    created = int(services.wall())
    streamed = body.flag("stream")
    if in_background:
        if is_keyed:
            id = blake2b(key_of(request).encode(), digest_size=16).hexdigest()
        head = as_json(body.as_dict(), orjson.OPT_SORT_KEYS)
        one = BackgroundResponse(request, PREFIX + id, head, created, streamed, 0, warnings)
        state = await one.look() if is_keyed else None
        if state is not None and state.head != head:
            raise reused()
        return await one.shown(state)
    translation = ResponseTranslation(id, created, body.as_dict(), warnings)
    translation.place = place_of(request) if streamed else None
    return await answer_chat(request, Fields(chat), translation)


async def show_response(request: Request) -> Reply:
    """A background response as it is now, or its events."""
    one, state = await _found(request)
    return await one.shown(state)


async def cancel_response(request: Request) -> Reply:
    """End a background response; one that has ended stays as it is."""
    await (await _found(request))[0].cancel()
    return await show_response(request)


async def _found(request: Request) -> tuple[BackgroundResponse, JournalState]:
    """The response that is asked for. Raises UnknownResponse."""
    key = request.match["response_id"]
    after = request.query.get("starting_after", "-1")
    if not re.fullmatch("-1|[0-9]{1,12}", after, re.ASCII):
        raise InvalidField(
            f"starting_after must be a sequence_number, not {shown(after)}.", field="starting_after"
        )
    is_streamed = request.query.get("stream", "false").lower() == "true"
    one = BackgroundResponse(
        request, key, b"", int(request.app[SERVICES].wall()), is_streamed, int(after) + 1
    )
    state = await one.look()
    if state is None or not state.head.startswith(b"{") or not RESPONSE_ID.fullmatch(key):
        remedy = "It has expired, or was sent with another key."
        raise UnknownResponse("No background response of that id is known.", remedy=remedy)
    return replace(one, head=state.head), state
