"""/v1/responses: OpenAI's newer shape of a chat, translated to a chat completion and back.

Those with `background` run without their clients. Their requests and ends are kept with what the
run needs to survive its router; nothing else is stored.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any, Literal, NotRequired, Required

import orjson
from annotated_types import MinLen
from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from agent_cache import JournalDiffers, Journals, JournalState
from shell_router.api.admission import ADMISSION
from shell_router.api.chat import answer_chat
from shell_router.api.chat_body import SharedFields
from shell_router.api.conversation import FunctionName
from shell_router.api.fields import (
    EndUserFields,
    Labels,
    NoEffect,
    StopField,
    Tokens,
    as_json,
    read_body,
)
from shell_router.api.frames import ChatFrames
from shell_router.api.replies import json_reply, note_ignored, shared_fields, stream_error
from shell_router.api.runs import KEPT_RUNS, KEY_HEADER, Run, end_of, key_of, place_of, reused
from shell_router.api.services import AGENTS, REQUEST_ID, SERVICES, TENANT, TRACE
from shell_router.api.streaming import (
    LAST_EVENT,
    StreamPosition,
    open_stream,
    respond,
)
from shell_router.api.translation import Events, ItemTranslation, Kind, TranslatedFrames, join_parts
from shell_router.core.sampling import check_depth
from shell_router.core.validation import (
    Array,
    JsonObject,
    Name,
    field_error,
    json_object,
    parse_object,
    show,
)
from shell_router.errors import InvalidField, StreamChanged, UnknownResponse
from shell_router.http.app import Reply, Request
from shell_router.http.sse import DONE, data_frame
from shell_router.moa.journal import END
from shell_router.moa.requests import Answer

NO_TOOLS = "The router runs no tools of its own: run them in the client."


@json_object
class TextPart(TypedDict):
    """A text."""

    type: Literal["input_text", "output_text", "text"]
    text: NotRequired[str | None]


@json_object
class RefusalPart(TypedDict):
    """A text in which a model refused."""

    type: Literal["refusal"]
    refusal: NotRequired[str | None]


@json_object
class ImagePart(TypedDict):
    """An image, which only engines' own chats read."""

    type: Literal["input_image"]
    image_url: Name


Parts = str | Array[Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]]


@json_object
class MessageItem(TypedDict):
    """A message."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts


@json_object
class CallItem(TypedDict):
    """A call that a model wrote."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: NotRequired[Any]


@json_object
class OutputItem(TypedDict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Parts


@json_object
class ReasoningItem(TypedDict):
    """Thinking of before, which is no part of a template's history."""

    type: Literal["reasoning"]


Item = Annotated[MessageItem | CallItem | OutputItem | ReasoningItem, Field(discriminator="type")]


Items = Annotated[Array[Item], MinLen(1)]


def _name_kinds(items: Any) -> Any:
    """Have an item without a type be a message."""
    if not isinstance(items, list):
        return items
    return [
        item if not isinstance(item, dict) or item.get("type") else {**item, "type": "message"}
        for item in items
    ]


@json_object
class FunctionTool(TypedDict):
    """A function."""

    type: Literal["function"]
    name: FunctionName
    description: NotRequired[Any]
    parameters: NotRequired[Any]
    strict: NotRequired[Any]


@json_object
class TextFormat(TypedDict):
    """The form of the answer."""

    type: NotRequired[str | None]
    name: NotRequired[Any]
    schema: NotRequired[Any]
    strict: NotRequired[Any]


@json_object
class TextConfig(TypedDict):
    """The form of the answer."""

    format: NotRequired[TextFormat | None]


@json_object
class Reasoning(TypedDict):
    """The effort of the model's thinking."""

    effort: NotRequired[str | None]


class InertFields(TypedDict, total=False):
    """Fields that never change an answer, or ask for parts of it that there are none of."""

    client_metadata: NoEffect
    include: NoEffect
    prompt_cache_options: NoEffect
    prompt_cache_retention: NoEffect
    safety_identifier: NoEffect
    service_tier: NoEffect
    stream_options: NoEffect


class SameFields(SharedFields, StopField, EndUserFields, total=False):
    """Fields that mean the same in a chat completion."""

    metadata: Labels
    parallel_tool_calls: bool


@json_object
class ResponseBody(SameFields, InertFields, total=False):
    """A request of OpenAI's responses."""

    input: Required[
        Annotated[str | Annotated[Array[Item], MinLen(1)], BeforeValidator(_name_kinds)]
    ]
    instructions: str
    max_output_tokens: Tokens
    tools: Array[FunctionTool]
    tool_choice: Any
    text: TextConfig
    reasoning: Reasoning
    truncation: Literal["disabled"]
    background: bool
    store: Annotated[bool, Field(description="Only responses in the background are stored.")]


RESPONSE = JsonObject(
    ResponseBody,
    {
        "input": "Send a text, or message, function_call, function_call_output or reasoning items, "
        "each with its whole content.",
        "tools": NO_TOOLS,
        "truncation": "Shorten the input: a text that does not fit is refused.",
    },
)
STATEFUL = {
    "previous_response_id": "Send all earlier items in input.",
    "conversation": "Send all earlier items in input.",
    "prompt": "Nothing is stored: send the prompt's text in instructions.",
}


def as_chat(sent: Mapping[str, Any]) -> tuple[ResponseBody, dict[str, Any]]:
    """Return the validated body, and that of the chat completion that asks for the same.

    Raises:
        InvalidField: A field is wrong, or needs a stored state.
    """
    for name, remedy in STATEFUL.items():
        if sent.get(name) not in (None, False):
            raise field_error(name, "is not served", remedy)
    for name in REPEATED_OBJECTS & sent.keys():
        check_depth(sent[name], name)
    body = RESPONSE.read(sent)
    chat: dict[str, Any] = {
        name: value for name, value in body.items() if name in SameFields.__annotations__
    }
    messages = _read_items(body["input"])
    if "instructions" in body:
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    chat["messages"] = messages
    chat["max_completion_tokens"] = body.get("max_output_tokens")
    tools = body.get("tools", [])
    if tools:
        chat["tools"] = [_read_tool(tool) for tool in sent["tools"]]
    if tools or body.get("tool_choice") != "auto":
        chat["tool_choice"] = _read_choice(body.get("tool_choice"))
    chat["response_format"] = _read_format(body.get("text", {}).get("format"))
    chat["reasoning_effort"] = body.get("reasoning", {}).get("effort")
    if body.get("stream") or body.get("background"):
        chat["stream_options"] = {"include_usage": True}
    return body, chat


def _read_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _read_format(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None:
        return None
    if form.get("type") != "json_schema":
        return {"type": form.get("type")}
    named = {"name": form.get("name"), "schema": form.get("schema"), "strict": form.get("strict")}
    return {"type": "json_schema", "json_schema": named}


def _read_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tool as a chat has it, with the fields in the client's order."""
    names = FunctionTool.__annotations__.keys() - {"type"}
    function = {name: value for name, value in tool.items() if name in names}
    return {"type": "function", "function": function}


def _read_items(items: str | list[Item]) -> list[dict[str, Any]]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for item in items:
        match item["type"]:
            case "message":
                content = _read_parts(item["content"])
                messages.append({"role": item["role"], "content": content})
            case "function_call_output":
                result = {"role": "tool", "tool_call_id": item["call_id"]}
                messages.append({**result, "content": _read_parts(item["output"])})
            case "function_call":
                _add_call(messages, item)
    return messages


def _add_call(messages: list[dict[str, Any]], item: CallItem) -> None:
    """Add a call; calls of one turn are one message in a chat, together with the text before."""
    function = {"name": item["name"], "arguments": item.get("arguments")}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append({"id": item["call_id"], "type": "function", "function": function})


def _read_parts(parts: Parts) -> str | list[dict[str, Any]]:
    if isinstance(parts, str):
        return parts
    return join_parts([_read_part(part) for part in parts])


def _read_part(part: TextPart | RefusalPart | ImagePart) -> dict[str, Any]:
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    text = part.get("refusal") if part["type"] == "refusal" else part.get("text")
    return {"type": "text", "text": text or ""}


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
REPEATED_OBJECTS = frozenset({"metadata", "reasoning", "text", "tool_choice", "tools"})
"""Fields that the answer repeats as they were sent."""
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
        _, chat = as_chat(orjson.loads(now.head))
        return await answer_chat(now.request, chat, None, now._run)

    async def cancel(self) -> None:
        """Have its router end it, which learns of it with its next record; one that has ended stays
        as it is.
        """
        sealed = orjson.dumps([END, "", CANCELLED])
        await self._store.seal(self.request[TENANT], self.key, sealed, orjson.dumps([END])[:-1])

    def standing(self, status: str) -> Reply:
        """It has no output yet, or will have none."""
        return json_reply(self.request, self._translation().standing(status))

    async def _run(self, run: Run, model: str, sent: Mapping[str, Any]) -> Reply:
        request = self.request
        head = self.head.decode()
        store = self._store
        named = (self.request[TENANT], self.key)
        join = partial(request.app[KEPT_RUNS].join, run, self.key, sent, head)
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
    """Answer in the shape of OpenAI's responses, by way of a chat completion."""
    sent = parse_object(await read_body(request))
    body, chat = as_chat(sent)
    ignored = RESPONSE.find_unknown(sent, STATEFUL)
    if body.get("store") and not body.get("background"):
        ignored.insert(0, "store")
    services = request.app[SERVICES]
    warnings = note_ignored(request, ignored)
    id = services.new_id()
    created = int(services.wall())
    is_streamed = body.get("stream", False)
    if body.get("background"):
        is_keyed = KEY_HEADER in request.headers
        if is_keyed:
            id = blake2b(key_of(request).encode(), digest_size=16).hexdigest()
        head = as_json(sent, orjson.OPT_SORT_KEYS)
        response = BackgroundResponse(request, PREFIX + id, head, created, is_streamed, 0, warnings)
        state = await response.look() if is_keyed else None
        if state is not None and state.head != head:
            raise reused()
        return await response.shown(state)
    translation = ResponseTranslation(id, created, sent, warnings)
    translation.place = place_of(request) if is_streamed else None
    return await answer_chat(request, chat, translation)


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
            f"starting_after must be a sequence_number, not {show(after)}.", field="starting_after"
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
