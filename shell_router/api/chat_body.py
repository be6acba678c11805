"""Reading the body of a chat completion."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shell_router.api.fields import Fields, as_object, shown
from shell_router.api.sampling import read_sampling

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

INERT = frozenset(
    {
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""OpenAI fields that never change an answer: billing, storage, speed."""

REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "best_of": (1,),
    "echo": (False,),
}
"""Fields that would make the answer another one and that are not served, with the values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class ChatBody:
    """A chat completion as asked. Without a `seed` the caller chooses one. Of several `models` one is to be chosen.

    `labels` are the body's `metadata`, which rules between steps may read.
    """

    models: tuple[str, ...]
    messages: tuple[Mapping[str, str], ...]
    sampling: Mapping[str, Any]
    seed: int | None
    stream: bool
    include_usage: bool
    include_agents: bool
    labels: Mapping[str, str]


def read_chat(body: Fields) -> ChatBody:
    """Raises InvalidField for what is missing, wrong or not served."""
    _refuse_unserved(body)
    options = body.object("stream_options")
    return ChatBody(
        models=body.names("model"),
        messages=_messages(body),
        sampling=read_sampling(body),
        seed=body.raw("seed"),
        stream=body.flag("stream"),
        include_usage=options.flag("include_usage") if options else False,
        include_agents=body.flag("include_agents"),
        labels=_labels(body),
    )


def ignored_fields(body: Fields) -> tuple[str, ...]:
    """Fields of a body already read that are set, unknown here, and so without effect."""
    return tuple(name for name in body.unread if name not in INERT)


def _refuse_unserved(body: Fields) -> None:
    for name, harmless in REFUSED.items():
        value = body.raw(name)
        if value is not None and value not in harmless:
            raise body.refuse(name, "is not served as asked", f"Leave {name} out.")


def _labels(body: Fields) -> Mapping[str, str]:
    metadata = body.object("metadata")
    if metadata is None:
        return {}
    return {name: text for name in metadata.unread if (text := metadata.text(name)) is not None}


def _messages(body: Fields) -> tuple[Mapping[str, str], ...]:
    listed = body.listed("messages")
    if not listed:
        raise body.refuse("messages", "is missing or empty", "Send at least one user message.")
    messages = tuple(_message(as_object(one, f"messages[{at}]")) for at, one in enumerate(listed))
    if messages[-1]["role"] != "user":
        raise body.refuse(
            f"messages[{len(messages) - 1}].role", "must be user", "Put the question in the last message."
        )
    return messages


def _message(message: Fields) -> Mapping[str, str]:
    role = message.text("role")
    if role not in ROLES:
        raise message.refuse("role", f"must be one of {', '.join(ROLES)}, not {role!r}")
    return {"role": ROLES[role], "content": _content(message)}


def _content(message: Fields) -> str:
    value = message.raw("content")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise message.refuse("content", f"must be a string or an array of text parts, not {shown(value)}")
    path = message.path("content")
    return "".join(_part(as_object(part, f"{path}[{at}]")) for at, part in enumerate(value))


def _part(part: Fields) -> str:
    if part.text("type") != "text":
        raise part.refuse("type", "must be text", "Only text is served; leave other parts out.")
    text = part.text("text")
    if text is None:
        raise part.refuse("text", "is missing")
    return text
