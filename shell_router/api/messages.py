"""POST /v1/messages: Anthropic's messages, translated to a chat completion and back.

Nothing is stored.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, Required

from annotated_types import MinLen
from pydantic import Field
from typing_extensions import TypedDict

from shell_router.api.bodies import read_object
from shell_router.api.chat import answer_chat, count_prompt
from shell_router.api.conversation import (
    CallId,
    FunctionName,
    drop_other_tools,
    read_arguments,
)
from shell_router.api.fields import NoEffect, SharedFields, Tokens
from shell_router.api.replies import anthropic_error, json_reply, note_ignored
from shell_router.api.services import SERVICES
from shell_router.api.translation import (
    Events,
    ItemTranslation,
    Kind,
    count_reasoning,
    name_own_fields,
    read_costs,
)
from shell_router.core.exact_json import NewValues, Values
from shell_router.core.validation import Array, JsonObject, Name
from shell_router.http.app import Reply, Request


class TextBlock(TypedDict):
    """A text."""

    type: Literal["text"]
    text: NotRequired[str | None]


class ImageData(TypedDict):
    """An image inside the body."""

    type: Literal["base64"]
    media_type: Name
    data: Name


class ImageUrl(TypedDict):
    """An image elsewhere."""

    type: Literal["url"]
    url: Name


class ImageBlock(TypedDict):
    """An image, which only engines' own chats read."""

    type: Literal["image"]
    source: Annotated[ImageData | ImageUrl, Field(discriminator="type")]


class PlainText(TypedDict):
    """The text of a document."""

    type: Literal["text"]
    data: str


class DocumentBlock(TypedDict):
    """A document, of plain text."""

    type: Literal["document"]
    source: Annotated[PlainText, Field(discriminator="type")]
    title: NotRequired[str | None]
    context: NotRequired[str | None]


Parts = Array[Annotated[TextBlock | ImageBlock | DocumentBlock, Field(discriminator="type")]]


class ToolResult(TypedDict):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: NotRequired[str | Parts | None]


class ToolUse(TypedDict):
    """A call that the model wrote."""

    type: Literal["tool_use"]
    name: FunctionName
    id: CallId
    input: NotRequired[Any]


class Thinking(TypedDict):
    """The thinking of the model."""

    type: Literal["thinking"]
    thinking: NotRequired[str | None]


class RedactedThinking(TypedDict):
    """Thinking that only the API that wrote it can read; left out."""

    type: Literal["redacted_thinking"]


UserBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | ToolResult, Field(discriminator="type")
]
AssistantBlock = Annotated[
    TextBlock | ImageBlock | ToolUse | Thinking | RedactedThinking, Field(discriminator="type")
]


class UserMessage(TypedDict):
    """A message of the user, with the results of calls, or of a system that reminds."""

    role: Literal["user", "system"]
    content: str | Array[UserBlock]


class WrittenMessage(TypedDict):
    """A message that a model wrote."""

    role: Literal["assistant"]
    content: str | Array[AssistantBlock]


class CustomTool(TypedDict):
    """A function; the router runs no tools of its own."""

    type: NotRequired[Literal["custom"] | None]
    name: FunctionName
    description: NotRequired[str | None]
    input_schema: NotRequired[NewValues | None]


class ToolChoice(TypedDict):
    """The calls that the model may or must make."""

    type: Literal["auto", "any", "tool", "none"]
    name: NotRequired[str | None]
    disable_parallel_tool_use: NotRequired[bool | None]


class ThinkingChoice(TypedDict):
    """Whether, and how long, the model thinks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NotRequired[Tokens | None]


class OutputFormat(TypedDict):
    """The form of the answer."""

    type: str
    schema: NotRequired[Any]


class OutputConfig(TypedDict):
    """The effort and the form of the answer."""

    effort: NotRequired[str | None]
    format: NotRequired[OutputFormat | None]


class Client(TypedDict):
    """The tenant's own user."""

    user_id: NotRequired[str | None]


class InertFields(TypedDict, total=False):
    """Fields that never change an answer."""

    cache_control: NoEffect
    service_tier: NoEffect
    speed: NoEffect


class MessagesBody(SharedFields, InertFields, total=False):
    """A request of Anthropic's messages."""

    messages: Required[
        Annotated[
            Array[Annotated[UserMessage | WrittenMessage, Field(discriminator="role")]], MinLen(1)
        ]
    ]
    max_tokens: Required[Tokens]
    system: str | Parts
    stop_sequences: Array[str]
    tools: Array[CustomTool]
    tool_choice: ToolChoice
    thinking: ThinkingChoice
    output_config: OutputConfig
    metadata: Client


MESSAGES = JsonObject(
    MessagesBody,
    {
        "max_tokens": "Set it to the most tokens that may be written.",
        "messages": "Send at least one user message.",
    },
)
BILLING = "x-anthropic-billing-header:"
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


OWN_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "max_thinking_tokens": "thinking.budget_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "user": "metadata.user_id",
}
"""A message's fields, by those of a chat completion."""


def as_chat(body: MessagesBody) -> tuple[NewValues, Sequence[str]]:
    """Return the chat completion's body that asks for the same as a validated body.

    The second is the path of what each message of the chat was made from.
    """
    chat: NewValues = {
        name: value for name, value in body.items() if name in SharedFields.__annotations__
    }
    chat["max_completion_tokens"] = body["max_tokens"]
    chat["messages"], places = _read_messages(body)
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    if "tools" in body:
        chat["tools"] = [_read_tool(tool) for tool in body["tools"]]
    choice = body.get("tool_choice")
    if choice is not None:
        kind = choice["type"]
        function = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = CHOICES.get(kind, function)
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    chat |= _read_thinking(body) | _read_output(body.get("output_config", {}))
    chat["user"] = body.get("metadata", {}).get("user_id")
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat, places


def _read_thinking(body: MessagesBody) -> NewValues:
    thinking = body.get("thinking")
    if thinking is None:
        return {}
    fields: NewValues = {}
    kind = thinking["type"]
    if kind != "adaptive":
        own = body.get("chat_template_kwargs", {})
        fields["chat_template_kwargs"] = {"enable_thinking": kind == "enabled", **own}
    if (budget := thinking.get("budget_tokens")) is not None:
        fields["max_thinking_tokens"] = budget
    return fields


def _read_output(output: OutputConfig) -> NewValues:
    fields: NewValues = {"reasoning_effort": output.get("effort")}
    form = output.get("format")
    if form is not None:
        schema = {"name": "answer", "schema": form.get("schema")}
        fields["response_format"] = {"type": form["type"], "json_schema": schema}
    return fields


def _read_tool(tool: CustomTool) -> NewValues:
    function = {"name": tool["name"], "parameters": tool.get("input_schema")}
    if (description := tool.get("description")) is not None:
        function["description"] = description
    return {"type": "function", "function": function}


def _read_messages(body: MessagesBody) -> tuple[list[NewValues], list[str]]:
    messages: list[NewValues] = []
    places: list[str] = []
    if "system" in body:
        system = body["system"]
        if not isinstance(system, str):  # a changing block would end the prefix cache's use
            system = [part for part in system if not str(part.get("text")).startswith(BILLING)]
        messages.append({"role": "system", "content": _read_parts(system)})
        places.append("system")
    for at, message in enumerate(body["messages"]):
        blocks = _list_blocks(message["content"])
        if message["role"] == "assistant":
            messages.append(_read_assistant(blocks))
        else:
            messages += _read_user(blocks, message["role"])
        places += [f"messages[{at}]"] * (len(messages) - len(places))
    return messages, places


def _read_parts(content: str | Parts) -> str | list[NewValues]:
    """Return a system message's or a result's content; texts are joined as SGLang joins them."""
    if isinstance(content, str):
        return content
    parts = [_read_part(block) for block in content]
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join([part["text"] for part in parts])


def _read_part(block: TextBlock | ImageBlock | DocumentBlock) -> NewValues:
    if block["type"] == "text":
        return {"type": "text", "text": block.get("text") or ""}
    if block["type"] == "document":
        texts = [block.get("title"), block.get("context"), block["source"]["data"]]
        return {"type": "text", "text": "\n".join(filter(None, texts))}
    source = block["source"]
    if source["type"] == "url":
        url = source["url"]
    else:
        url = f"data:{source['media_type']};base64,{source['data']}"
    return {"type": "image_url", "image_url": {"url": url}}


def _read_user(blocks: Sequence[Any], role: str) -> list[NewValues]:
    """Return a user's message; in a chat the result of a call is a message of its own.

    What stands beside results stays where it is, and goes on with their turn.
    """
    messages: list[NewValues] = []
    beside: NewValues = {"role": role}
    if any(block["type"] == "tool_result" for block in blocks):
        beside["continues"] = True
    for block in blocks:
        if block["type"] == "tool_result":
            content = _read_parts(block.get("content") or "")
            result = {"role": "tool", "tool_call_id": block["tool_use_id"]}
            messages.append({**result, "content": content})
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"].append(_read_part(block))
        else:
            messages.append({**beside, "content": [_read_part(block)]})
    return messages or [{**beside, "content": []}]


def _list_blocks(content: str | Sequence[Any]) -> Sequence[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _read_assistant(blocks: Sequence[Any]) -> NewValues:
    texts = []
    thoughts = []
    calls = []
    for block in blocks:
        match block["type"]:
            case "tool_use":
                function = {"name": block["name"], "arguments": block.get("input")}
                calls.append({"id": block["id"], "type": "function", "function": function})
            case "thinking":
                thoughts.append(block.get("thinking") or "")
            case "redacted_thinking":
                pass
            case _:
                texts.append(_read_part(block))
    message: NewValues = {"role": "assistant", "content": texts}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


class MessageTranslation(ItemTranslation):
    """A chat completion, or the chunks of one, as a message. `id` is fresh."""

    def __init__(self, id: str, sent: Values, warnings: Mapping[str, list[str]]) -> None:
        super().__init__(sent, warnings)
        self._stops = sent.get("stop_sequences") or ()
        self._about = {
            "id": f"msg_{id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
        }

    def _write_begin(self) -> Events:
        usage = {"input_tokens": 0, "output_tokens": 0}  # known at the end
        nothing: NewValues = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return [("message_start", {"message": {**self._about, **nothing, **self.warnings}})]

    def _write_open(self, kind: Kind, call: Values) -> Events:
        self.items.append({**BLOCKS[kind], **call})
        return [
            (
                "content_block_start",
                {"index": len(self.items) - 1, "content_block": dict(self.items[-1])},
            )
        ]

    def _write_growth(self, text: str) -> Events:
        kind, name = DELTAS[self.items[-1]["type"]]
        return [
            (
                "content_block_delta",
                {"index": len(self.items) - 1, "delta": {"type": kind, name: text}},
            )
        ]

    def _write_close(self, text: str) -> Events:
        block = self.items[-1]
        if block["type"] == "tool_use":
            block["input"] = read_arguments(text)
        else:
            block[DELTAS[block["type"]][1]] = text
        return [("content_block_stop", {"index": len(self.items) - 1})]

    def _write_end(self) -> Events:
        last = self.answer()
        delta = {name: last[name] for name in ("stop_reason", "stop_sequence")}
        end = {"delta": delta, "usage": last["usage"], **self.warnings}
        return [("message_delta", end), ("message_stop", {})]

    def _write_failure(self, error: Values) -> Events:
        return [("error", {"error": anthropic_error(error)})]

    def answer(self) -> NewValues:
        """See `ItemTranslation`."""
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        usage = {
            "input_tokens": self.usage.get("prompt_tokens", 0) - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": self.usage.get("completion_tokens", 0),
            "output_tokens_details": {"thinking_tokens": count_reasoning(self.usage)},
            **read_costs(self.usage),
        }
        ended: NewValues = {
            "stop_reason": REASONS.get(self.reason, "end_turn"),
            "stop_sequence": None,
            "usage": usage,
        }
        if self.reason == "stop" and self.matched in self._stops:
            ended |= {"stop_reason": "stop_sequence", "stop_sequence": self.matched}
        return {**self._about, "content": self.items, **ended, **self.warnings}


BLOCKS: Mapping[Kind, NewValues] = {
    "message": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "function_call": {"type": "tool_use", "input": {}},
}
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


async def count_tokens(request: Request) -> Reply:
    """Count the tokens of a message's prompt; see `count_prompt`."""
    sent, _ = drop_other_tools({"max_tokens": 1, **await read_object(request)}, "custom")
    chat, places = as_chat(MESSAGES.read(sent))
    with name_own_fields(request, OWN_FIELDS, places):
        tokens = await count_prompt(request, chat)
    return json_reply(request, {"input_tokens": tokens})


async def create_message(request: Request) -> Reply:
    """Answer in the shape of Anthropic's messages, by way of a chat completion."""
    sent, other_tools = drop_other_tools(await read_object(request), "custom")
    body = MESSAGES.read(sent)
    warnings = note_ignored(request, [*other_tools, *MESSAGES.find_unknown(sent)])
    translation = MessageTranslation(request.app[SERVICES].new_id(), sent, warnings)
    chat, places = as_chat(body)
    with name_own_fields(request, OWN_FIELDS, places):
        return await answer_chat(request, chat, translation, bends_limits=True)
