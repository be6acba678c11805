"""Bodies of chats and completions that a model's own servers answer on their OpenAI routes.

They ask for tools, several choices, log probabilities or images.
The router's own way renders a prompt and reads tokens. A chat that it cannot serve goes to both
servers of a pair as the client sent it, and the answer comes back as it is.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Required

import orjson
from annotated_types import Interval

from shell_router.api.bodies import (
    as_json,
    check_asks_nothing,
    check_few,
    check_template_kwargs,
    read_sampling,
)
from shell_router.api.conversation import check_order, read_calls, read_tools
from shell_router.api.fields import (
    CHAT,
    ENGINE_FIELDS,
    MAX_TOP_LOGPROBS,
    NOT_SERVED,
    ChatBody,
    EndUserFields,
    ForwardedFields,
    Names,
    ResponseFormat,
    SamplingFields,
    StopField,
    Tokens,
)
from shell_router.core.engine import ChatServing
from shell_router.core.sampling import RANGES
from shell_router.core.validation import JsonObject, field_error

MAX_CHOICES_BYTES = 2**25
"""The limit of all bodies that the choices of one request are sent in."""

CHOSEN_HERE: dict[str, tuple[Any, ...]] = {
    "routed_dp_rank": (),
    "disagg_prefill_dp_rank": (),
    "data_parallel_rank": (),
}
"""SGLang's fields for routers: a wrong one makes servers answer 500."""

NOT_FORWARDED: dict[str, tuple[Any, ...]] = {
    **CHOSEN_HERE,
    **NOT_SERVED,
    "include_agents": (False,),
    "max_thinking_tokens": (),
    "prediction": (),
}

READ_HERE = frozenset({"lazy", "prefill", "program", "prompt_cache_options"})
"""Fields that a chat may have wherever it is answered, and that mean nothing to engines."""


def asks_engine(body: ChatBody) -> bool:
    """Return whether a validated body asks for something that only an engine's own chats do."""
    fields: Mapping[str, Any] = body
    if any(fields[name] not in ENGINE_FIELDS[name] for name in ENGINE_FIELDS.keys() & fields):
        return True
    return any(map(_is_beyond_text, body["messages"]))


def _is_beyond_text(message: Mapping[str, Any]) -> bool:
    if message["role"] == "tool" or message.get("tool_calls"):
        return True
    content = message.get("content")
    return isinstance(content, list) and any(part["type"] != "text" for part in content)


def read_engine_chat(
    body: ChatBody, sent: Mapping[str, Any], model: str, chat: ChatServing
) -> list[bytes]:
    """Return the bodies to send, one for each of the `n` choices.

    Raises:
        InvalidField: The engine would misread a field, or has no parser for tools.
    """
    what = "is not served together with what the engine does itself"
    check_asks_nothing(sent, NOT_FORWARDED, what)
    if read_tools(body, sent) is not None and chat.tool_parser is None:
        # SGLang parses forced calls by it, too
        raise field_error(
            "tools",
            f"need a parser that finds calls in the outputs of {model}, and its servers have none",
            "Start all of them with --tool-call-parser and the name of the model's format, then "
            "restart the router.",
        )
    _check_messages(body, sent)
    read_sampling(body)
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise field_error("top_logprobs", "needs logprobs", "Set logprobs to true.")
    check_template_kwargs(body.get("chat_template_kwargs", {}))
    bodies = _write_choices(body.get("n", 1), sent, {"model": model}, {*NOT_FORWARDED, *READ_HERE})
    CHAT.find_unknown(sent, NOT_FORWARDED)
    return bodies


def _check_messages(body: ChatBody, sent: Mapping[str, Any]) -> None:
    for at, message in enumerate(sent["messages"]):
        if message.get("tools") is not None:  # SGLang would add them to the body's, unchecked
            path = f"messages[{at}].tools"
            raise field_error(path, "is not served", "Put them into the body's tools.")
    for at, checked in enumerate(body["messages"]):
        fields: Mapping[str, Any] = checked
        read_calls(fields.get("tool_calls") or (), f"messages[{at}].tool_calls")
    check_order(body["messages"])


class CompletionBody(SamplingFields, StopField, ForwardedFields, EndUserFields, total=False):
    """A completion of a prompt."""

    model: Required[Names]
    prompt: Required[str | list[Any]]
    stream: bool
    max_tokens: Tokens
    response_format: ResponseFormat
    logprobs: Annotated[int, Interval(ge=0, le=MAX_TOP_LOGPROBS)]


COMPLETION = JsonObject(CompletionBody)


def read_completion(body: CompletionBody, sent: Mapping[str, Any], model: str) -> list[bytes]:
    """Return the bodies of a completion to send, one for each of the `n` choices.

    Raises:
        InvalidField: The engine would misread a field.
    """
    prompt = _read_prompt(body["prompt"])
    ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (ids or isinstance(prompt, str)):
        raise field_error(
            "prompt", "must be a string or an array of token ids", "Send a request for each prompt."
        )
    check_asks_nothing(sent, NOT_COMPLETED, "is not served")
    read_sampling(body)
    own = {"prompt": prompt, "model": model}
    bodies = _write_choices(body.get("n", 1), sent, own, {*NOT_COMPLETED, "prompt_cache_key"})
    COMPLETION.find_unknown(sent, NOT_COMPLETED)
    return bodies


def _read_prompt(prompt: Any) -> Any:
    """Return the prompt of a list that holds one, as LangChain and lm-eval send it."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        return prompt[0]
    return prompt


NOT_COMPLETED: dict[str, tuple[Any, ...]] = {
    **CHOSEN_HERE,
    "echo": (False,),
    "best_of": (1,),
    "top_a": (0,),
    "suffix": ("",),
    "max_completion_tokens": (),
}


def _write_choices(
    choices: int, sent: Mapping[str, Any], own: Mapping[str, Any], left_out: Collection[str]
) -> list[bytes]:
    """Return a body for each choice: a pair answers a request once.

    Seeds follow each other, or all choices would be the same.

    Args:
        choices: Their number.
        sent: The client's body.
        own: The router's fields, put in.
        left_out: Names of fields that ask for nothing.
    """
    rid = sent.get("rid")
    if rid is not None and not isinstance(rid, str):
        raise field_error("rid", "must be a string")
    whole = {
        name: value for name, value in sent.items() if value is not None and name not in left_out
    }
    whole |= own
    if choices == 1:
        return [as_json(whole)]
    if rid is not None:
        raise field_error("rid", "cannot name several requests", "Leave rid out, or set n to 1.")
    whole["n"] = 1
    first = as_json(whole)
    if len(first) * choices > MAX_CHOICES_BYTES:
        raise field_error(
            "n", f"times the body's size is over {MAX_CHOICES_BYTES} bytes", "Send fewer at a time."
        )
    check_few(first, choices)
    if "seed" not in whole:
        return [first] * choices
    highest = RANGES["sampling_seed"].high
    seeds = [min(whole["seed"] + place, highest) for place in range(1, choices)]
    return [first, *(orjson.dumps({**whole, "seed": seed}) for seed in seeds)]
