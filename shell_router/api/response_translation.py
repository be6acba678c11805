"""OpenAI's responses as chat completions, and chat completions as responses."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, Required

from annotated_types import MinLen
from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from shell_router.api.conversation import CallId, FunctionName
from shell_router.api.fields import (
    EndUserFields,
    InertFields,
    Labels,
    NoEffect,
    SharedFields,
    StopField,
    TierField,
    Tokens,
)
from shell_router.api.replies import list_shared_fields
from shell_router.api.translation import Events, ItemTranslation, Kind, count_reasoning, read_costs
from shell_router.core.exact_json import NewValues, Values
from shell_router.core.sampling import check_depth
from shell_router.core.validation import Array, JsonObject, Name, field_error


class TextPart(TypedDict):
    """A text."""

    type: Literal["input_text", "output_text", "text"]
    text: NotRequired[str | None]


class RefusalPart(TypedDict):
    """A text in which a model refused."""

    type: Literal["refusal"]
    refusal: NotRequired[str | None]


class ImagePart(TypedDict):
    """An image, which only engines' own chats read."""

    type: Literal["input_image"]
    image_url: Name


Parts = str | Array[Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]]


class MessageItem(TypedDict):
    """A message."""

    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts


class CallItem(TypedDict):
    """A call that a model wrote."""

    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: NotRequired[Any]


class OutputItem(TypedDict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Parts


class ReasoningItem(TypedDict):
    """Thinking of before, which is no part of a template's history."""

    type: Literal["reasoning"]


Item = Annotated[MessageItem | CallItem | OutputItem | ReasoningItem, Field(discriminator="type")]


def _name_kinds(items: Any) -> Any:
    """Have an item without a type be a message."""
    if not isinstance(items, list):
        return items
    return [
        item if not isinstance(item, dict) or item.get("type") else {**item, "type": "message"}
        for item in items
    ]


class FunctionTool(TypedDict):
    """A function."""

    type: Literal["function"]
    name: FunctionName
    description: NotRequired[str | None]
    parameters: NotRequired[NewValues | None]
    strict: NotRequired[bool | None]


class TextFormat(TypedDict):
    """The form of the answer."""

    type: NotRequired[str | None]
    name: NotRequired[Any]
    schema: NotRequired[Any]
    strict: NotRequired[Any]


class TextConfig(TypedDict):
    """The form of the answer."""

    format: NotRequired[TextFormat | None]
    verbosity: NotRequired[Any]


class Reasoning(TypedDict):
    """The effort of the model's thinking."""

    effort: NotRequired[str | None]


class SameFields(SharedFields, StopField, EndUserFields, TierField, total=False):
    """Fields that mean the same in a chat completion."""

    metadata: Labels
    parallel_tool_calls: bool


class ResponseBody(SameFields, InertFields, total=False):
    """A request of OpenAI's responses."""

    client_metadata: NoEffect
    include: NoEffect
    stream_options: NoEffect
    input: Required[
        Annotated[str | Annotated[Array[Item], MinLen(1)], BeforeValidator(_name_kinds)]
    ]
    instructions: str
    max_output_tokens: Tokens
    tools: Array[FunctionTool]
    tool_choice: Any
    text: TextConfig
    reasoning: Reasoning
    truncation: Literal["disabled", "auto"]
    background: bool
    store: Annotated[bool, Field(description="Only responses in the background are stored.")]


ITEMS = "Send message, function_call, function_call_output or reasoning items, each whole."
RESPONSE = JsonObject(
    ResponseBody,
    {
        "input": ITEMS,
        "input.type": ITEMS,
        "input.content.type": "Send input_text, or input_image with image_url.",
    },
)
STATEFUL = {
    "previous_response_id": "Send all earlier items in input.",
    "conversation": "Send all earlier items in input.",
    "prompt": "Nothing is stored: send the prompt's text in instructions.",
}


OWN_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""A response's fields, by those of a chat completion."""


def as_chat(sent: Values) -> tuple[ResponseBody, NewValues, Sequence[str]]:
    """Return the validated body, and that of the chat completion that asks for the same.

    The last is the path of what each message of the chat was made from.

    Raises:
        InvalidField: A field is wrong, or needs a stored state.
    """
    for name, remedy in STATEFUL.items():
        if sent.get(name) not in (None, False):
            raise field_error(name, "is not served", remedy)
    for name in REPEATED_OBJECTS & sent.keys():
        check_depth(sent[name], name)
    body = RESPONSE.read(sent)
    chat: NewValues = {
        name: value for name, value in body.items() if name in SameFields.__annotations__
    }
    messages, places = _read_items(body["input"])
    if "instructions" in body:
        messages.insert(0, {"role": "system", "content": body["instructions"]})
        places.insert(0, "instructions")
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
    return body, chat, places


def _read_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _read_format(form: TextFormat | None) -> NewValues | None:
    if form is None:
        return None
    if form.get("type") != "json_schema":
        return {"type": form.get("type")}
    schema = {"name": form.get("name"), "schema": form.get("schema"), "strict": form.get("strict")}
    return {"type": "json_schema", "json_schema": schema}


def _read_tool(tool: Values) -> NewValues:
    """Return the tool as a chat has it, with the fields in the client's order."""
    names = FunctionTool.__annotations__.keys() - {"type"}
    function = {name: value for name, value in tool.items() if name in names}
    return {"type": "function", "function": function}


def _read_items(items: str | list[Item]) -> tuple[list[NewValues], list[str]]:
    """Return the chat's messages, and the path of the item that each begins with."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}], ["input"]
    messages: list[NewValues] = []
    places: list[str] = []
    for at, item in enumerate(items):
        match item["type"]:
            case "message":
                content = _read_parts(item["content"])
                messages.append({"role": item["role"], "content": content})
            case "function_call_output":
                result = {"role": "tool", "tool_call_id": item["call_id"]}
                messages.append({**result, "content": _read_parts(item["output"])})
            case "function_call":
                _add_call(messages, item)
        if len(messages) > len(places):
            places.append(f"input[{at}]")
    return messages, places


def _add_call(messages: list[NewValues], item: CallItem) -> None:
    """Add a call; calls of one turn are one message in a chat, together with the text before."""
    function = {"name": item["name"], "arguments": item.get("arguments")}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    calls = messages[-1].setdefault("tool_calls", [])
    calls.append({"id": item["call_id"], "type": "function", "function": function})


def _read_parts(parts: Parts) -> str | list[NewValues]:
    if isinstance(parts, str):
        return parts
    return [_read_part(part) for part in parts]


def _read_part(part: TextPart | RefusalPart | ImagePart) -> NewValues:
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    text = part.get("refusal") if part["type"] == "refusal" else part.get("text")
    return {"type": "text", "text": text or ""}


class ResponseTranslation(ItemTranslation):
    """A chat completion, or the chunks of one, as a response. `id` is fresh."""

    def __init__(
        self, id: str, created: int, sent: Values, warnings: Mapping[str, list[str]]
    ) -> None:
        super().__init__(sent, warnings)
        self._id = id
        self._sent = 0
        self._at: NewValues = {}
        self._about = {
            "id": f"resp_{id}",
            "object": "response",
            "created_at": created,
            "model": self.model,
            **{name: sent.get(name) for name in REPEATED},
            "metadata": sent.get("metadata") or {},
            "parallel_tool_calls": sent.get("parallel_tool_calls", True) is not False,
            "background": sent.get("background") is True,
            "previous_response_id": None,
            "store": sent.get("background") is True,
            "text": sent.get("text") or {"format": {"type": "text"}},
            "tool_choice": sent.get("tool_choice") or "auto",
            "tools": sent.get("tools") or [],
            "truncation": "disabled",
        }

    def _write_begin(self) -> Events:
        response = self.describe("in_progress")
        return [
            ("response.created", {"response": response}),
            ("response.in_progress", {"response": response}),
        ]

    def _write_open(self, kind: Kind, call: Values) -> Events:
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

    def _write_growth(self, text: str) -> Events:
        kind = self.items[-1]["type"]
        return [(f"response.{NAMES[kind]}.delta", {**self._at, "delta": text, **LOGPROBS[kind]})]

    def _write_close(self, text: str) -> Events:
        item = self.items[-1]
        kind = item["type"]
        done = f"response.{NAMES[item['type']]}.done"
        item["status"] = "incomplete" if self.reason == "length" else "completed"
        events: list[tuple[str, Values]]
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

    def _part(self, what: str, part: Values) -> tuple[str, Values]:
        return f"response.content_part.{what}", {**self._at, "part": part}

    def _write_end(self) -> Events:
        response = self.answer()
        return [(f"response.{response['status']}", {"response": response})]

    def _write_failure(self, error: Values) -> Events:
        # clients know no other error in a stream
        return [("response.failed", {"response": self.describe_failure(error)})]

    def describe_failure(self, error: Values) -> NewValues:
        """Return the response that failed."""
        return self.describe("failed", {**list_shared_fields(error), "code": "server_error"})

    def answer(self) -> NewValues:
        """See `ItemTranslation`."""
        return self.describe("completed" if self.reason in ("stop", "tool_calls") else "incomplete")

    def _number(self, event: NewValues) -> NewValues:
        """Number the event; in resumable streams by the offset of its last character."""
        self._sent = self._sent + 1 if self.place is None else self.place.at
        return {**event, "sequence_number": self._sent - 1}

    def describe(self, status: str, error: dict[str, str] | None = None) -> NewValues:
        """Return the response with the items that are there, in this status."""
        incomplete = {"reason": "max_output_tokens"}
        return {
            **self._about,
            "status": status,
            "error": error,
            "incomplete_details": incomplete if status == "incomplete" else None,
            "usage": _read_usage(self.usage),
            "output": list(self.items),
            **self.warnings,
        }


REPEATED = ("instructions", "max_output_tokens", "reasoning", "temperature", "top_p", "user")
REPEATED_OBJECTS = frozenset({"metadata", "reasoning", "text", "tool_choice", "tools"})
"""Fields that the answer repeats as they were sent."""
OWN: Mapping[Kind, tuple[str, NewValues]] = {
    "message": ("msg", {"role": "assistant", "content": []}),
    "reasoning": ("rs", {"summary": [], "content": []}),
    "function_call": ("fc", {"arguments": ""}),
}
"""The beginning of items' ids, and the fields that each kind has."""
PARTS: Mapping[str, NewValues] = {
    "message": {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": {"type": "reasoning_text", "text": ""},
}
NAMES = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
}
LOGPROBS: Mapping[str, NewValues] = {
    "message": {"logprobs": []},
    "reasoning": {},
    "function_call": {},
}


def _read_usage(usage: Values) -> NewValues | None:
    if not usage:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": count_reasoning(usage)},
        "total_tokens": usage["total_tokens"],
        **read_costs(usage),
    }
