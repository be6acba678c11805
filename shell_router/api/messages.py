"""POST /v1/messages: Anthropic's shape of a chat, translated to a chat completion and back. Nothing
is stored.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from shell_router.api.chat import answer_chat
from shell_router.api.conversation import function_name
from shell_router.api.fields import (
    MAX_TOKENS,
    SAMPLING,
    Fields,
    as_object,
    parse_body,
    read_body,
    shown,
)
from shell_router.api.panels import BRINGING, PANEL_FIELDS
from shell_router.api.replies import anthropic_error, note_ignored
from shell_router.api.services import SERVICES
from shell_router.api.translation import Events, ItemTranslation, Kind, joined
from shell_router.http.app import Reply, Request

OTHERWISE = {"max_tokens", "max_completion_tokens", "response_format", "stop"}
SAME = (
    frozenset({*SAMPLING, "chat_template_kwargs", "lazy", "model", "prefill", "program", "stream"})
    - OTHERWISE
)
SAME |= BRINGING | PANEL_FIELDS
"""Fields that mean the same in a chat completion."""
INERT = frozenset({"cache_control", "service_tier", "speed"})
"""Fields that never change an answer."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(body: Fields) -> dict[str, Any]:
    """The chat completion's body that asks for the same. Raises InvalidField."""
    chat = {name: value for name in body.given(SAME) if (value := body.raw(name)) is not None}
    if (limit := body.integer("max_tokens", 1, MAX_TOKENS)) is None:
        raise body.refuse(
            "max_tokens", "is missing", "Set it to the most tokens that may be written."
        )
    chat |= {"max_completion_tokens": limit, "messages": _messages(body)}
    if (stops := body.listed("stop_sequences")) is not None:
        chat["stop"] = stops
    if tools := [_tool(one) for one in body.objects("tools")]:
        chat["tools"] = tools
    if (choice := body.object("tool_choice")) is not None:
        kind = choice.text("type")
        if kind not in (*CHOICES, "tool"):
            raise choice.refuse("type", f"is {shown(kind)}", "Send auto, any, tool or none.")
        named = {"type": "function", "function": {"name": choice.text("name")}}
        chat["tool_choice"] = named if kind == "tool" else CHOICES[kind]
        chat["parallel_tool_calls"] = not choice.flag("disable_parallel_tool_use")
    _read_thinking(body, chat)
    if (output := body.object("output_config")) is not None:
        if (effort := output.text("effort")) is not None:
            chat["reasoning_effort"] = effort
        if (form := output.object("format")) is not None:
            named = {"name": "answer", "schema": form.raw("schema")}
            chat["response_format"] = {"type": form.text("type"), "json_schema": named}
    if (client := body.object("metadata")) is not None:
        chat["user"] = client.text("user_id")
    if body.flag("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _read_thinking(body: Fields, chat: dict[str, Any]) -> None:
    thinking = body.object("thinking")
    if thinking is None:
        return
    kind = thinking.text("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise thinking.refuse("type", f"is {shown(kind)}", "Send enabled, disabled or adaptive.")
    body.object("chat_template_kwargs")  # refused by name where it is no object
    if kind != "adaptive":
        chat["chat_template_kwargs"] = {
            "enable_thinking": kind == "enabled",
            **chat.get("chat_template_kwargs", {}),
        }
    if (budget := thinking.integer("budget_tokens", 1, MAX_TOKENS)) is not None:
        chat["max_thinking_tokens"] = budget


def _tool(tool: Fields) -> dict[str, Any]:
    if tool.text("type") not in (None, "custom"):
        raise tool.refuse(
            "type", "must be custom", "The router runs no tools of its own: run them in the client."
        )
    found = {"name": function_name(tool), "parameters": tool.raw("input_schema")}
    if (description := tool.text("description")) is not None:
        found["description"] = description
    return {"type": "function", "function": found}


def _messages(body: Fields) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.raw("system") is not None:
        messages.append(
            {"role": "system", "content": joined(body.parts("system", _part, "blocks"))}
        )
    if not (listed := body.objects("messages")):
        raise body.refuse("messages", "is missing or empty", "Send at least one user message.")
    for message in listed:
        if (role := message.text("role")) not in ("user", "assistant"):
            raise message.refuse(
                "role", f"is {shown(role)}", "Send user or assistant; instructions go into system."
            )
        messages += _asked(message) if role == "user" else [_said(message)]
    return messages


def _blocks(message: Fields) -> list[Fields]:
    given = message.parts("content", lambda block: block, "blocks")
    if isinstance(given, str):
        return [Fields({"type": "text", "text": given})]
    return given


def _part(block: Fields) -> dict[str, Any]:
    kind = block.text("type")
    if kind == "text":
        return {"type": "text", "text": block.text("text") or ""}
    if kind == "image":
        source = as_object(block.raw("source"), block.path("source"))
        if (form := source.text("type")) not in ("base64", "url"):
            raise source.refuse(
                "type", f"is {shown(form)}, which is not served here", "Send base64 or url."
            )
        url = source.required_text("url" if form == "url" else "data")
        if form == "base64":
            url = f"data:{source.required_text('media_type')};base64,{url}"
        return {"type": "image_url", "image_url": {"url": url}}
    raise block.refuse(
        "type", f"is {shown(kind)}, which is not served here", "Send text, or an image of a user."
    )


def _asked(message: Fields) -> list[dict[str, Any]]:
    """A user's message: first the results of calls, each a message of its own in a chat."""
    results = []
    parts = []
    for block in _blocks(message):
        if block.text("type") == "tool_result":
            content = (
                ("")
                if (block.raw("content") is None)
                else (joined(block.parts("content", _part, "blocks")))
            )
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": block.required_text("tool_use_id"),
                    "content": content,
                }
            )
        else:
            parts.append(_part(block))
    return results + ([] if results and not parts else [{"role": "user", "content": joined(parts)}])


def _said(message: Fields) -> dict[str, Any]:
    """An assistant's message."""
    texts = []
    thoughts = []
    calls = []
    for block in _blocks(message):
        match block.text("type"):
            case "tool_use":
                function = {"name": block.required_text("name"), "arguments": block.raw("input")}
                calls.append(
                    {"id": block.required_text("id"), "type": "function", "function": function}
                )
            case "thinking":
                thoughts.append(block.text("thinking") or "")
            case "redacted_thinking":
                pass  # only the API that wrote it can read it
            case _:
                texts.append(_part(block))
    found = {
        "role": "assistant",
        "content": joined(texts),
        "reasoning_content": "".join(thoughts),
        "tool_calls": calls,
    }
    return {name: said for name, said in found.items() if said or name == "content"}


class MessageTranslation(ItemTranslation):
    """A chat completion, or the chunks of one, as a message. `id` is fresh."""

    def __init__(
        self, id: str, asked: Mapping[str, Any], warnings: Mapping[str, list[str]]
    ) -> None:
        super().__init__(asked)
        self._about = {
            "id": f"msg_{id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            **warnings,
        }

    def _begun(self) -> Events:
        usage = {"input_tokens": 0, "output_tokens": 0}  # known at the end
        nothing: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return [("message_start", {"message": {**self._about, **nothing}})]

    def _opened(self, kind: Kind, call: Mapping[str, Any]) -> Events:
        self.items.append({**BLOCKS[kind], **call})
        return [
            (
                "content_block_start",
                {"index": len(self.items) - 1, "content_block": dict(self.items[-1])},
            )
        ]

    def _grown(self, text: str) -> Events:
        kind, name = DELTAS[self.items[-1]["type"]]
        return [
            (
                "content_block_delta",
                {"index": len(self.items) - 1, "delta": {"type": kind, name: text}},
            )
        ]

    def _closed(self, text: str) -> Events:
        block = self.items[-1]
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[DELTAS[block["type"]][1]] = text
        return [("content_block_stop", {"index": len(self.items) - 1})]

    def _ended(self) -> Events:
        last = self.answer()
        delta = {name: last[name] for name in ("stop_reason", "stop_sequence")}
        return [("message_delta", {"delta": delta, "usage": last["usage"]}), ("message_stop", {})]

    def _failed(self, error: Mapping[str, Any]) -> Events:
        return [("error", {"error": anthropic_error(error)})]

    def answer(self) -> dict[str, Any]:
        """See `ItemTranslation`."""
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        usage = {
            "input_tokens": self.usage.get("prompt_tokens", 0) - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": self.usage.get("completion_tokens", 0),
        }
        ended = {
            "stop_reason": REASONS.get(self.reason, "end_turn"),
            "stop_sequence": None,
            "usage": usage,
        }
        return {**self._about, "content": self.items, **ended}


BLOCKS: Mapping[Kind, dict[str, Any]] = {
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


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments; what is no JSON object, as one that was cut off, in Anthropic's
    wrapping."""
    try:
        found = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        found = None
    if isinstance(found, dict):
        return found
    return {"INVALID_JSON": text}


async def create_message(request: Request) -> Reply:
    """Answer as a chat completion, in the shape of Anthropic's messages."""
    body = parse_body(await read_body(request))
    chat = as_chat(body)
    body.check_spelling(SAME | INERT)
    warnings = note_ignored(request, [name for name in body.unread if name not in INERT])
    translation = MessageTranslation(request.app[SERVICES].new_id(), body.as_dict(), warnings)
    return await answer_chat(request, Fields(chat), translation)
