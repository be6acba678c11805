"""Bodies of chats and completions that a model's own servers answer on their OpenAI routes.

They ask for tools, several choices, log probabilities or images.
The router's own way renders a prompt and reads tokens. A chat that it cannot serve goes to both
servers of a pair as the client sent it, and the answer comes back as it is.
"""

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Required

from annotated_types import Interval

from shell_router.api.bodies import (
    CONSTRAINTS,
    as_json,
    check_asks_nothing,
    check_few,
    check_template_kwargs,
    read_sampling,
)
from shell_router.api.conversation import check_order, name_calls, read_calls, read_tools
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
from shell_router.core.exact_json import Values, write_json
from shell_router.core.sampling import LEAST_TOP_P, RANGES
from shell_router.core.validation import JsonObject, field_error
from shell_router.engines.native_body import RANKS

MAX_CHOICES_BYTES = 2**25
"""The limit of all bodies that the choices of one request are sent in."""

CHOSEN_HERE: dict[str, tuple[Any, ...]] = dict.fromkeys(RANKS, ())

NOT_FORWARDED: dict[str, tuple[Any, ...]] = {
    **CHOSEN_HERE,
    **NOT_SERVED,
    "budget": (),
    "include_agents": (False,),
    "max_thinking_tokens": (),
    "prediction": (),
}

READ_HERE = frozenset({"lazy", "prefill", "program", "prompt_cache_options", "usage"})
"""Fields that a chat may have wherever it is answered, and that mean nothing to engines."""


def asks_engine(body: ChatBody, chat: ChatServing) -> bool:
    """Return whether a validated body asks for something that only an engine's own chats do.

    The router itself has functions called that must be, and what a schema forms without a call.
    """
    fields: Values = body
    asked = {
        name for name in ENGINE_FIELDS.keys() & fields if fields[name] not in ENGINE_FIELDS[name]
    }
    messages = body["messages"]
    if "tools" in asked and chat.tool_parser is None:
        asked.discard("reasoning_effort")  # a hint, which must not keep tools from being offered
    if asked - {"tools"} or any(map(_has_beyond_text, messages)):
        return True
    if chat.tool_parser is None or not CONSTRAINTS.isdisjoint(fields):
        return False
    if fields.get("tool_choice", "auto") not in ("auto", "none"):
        return False
    return bool(asked) or any(message["role"] == "tool" for message in messages)


def _has_beyond_text(message: Values) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part["type"] != "text" for part in content)


def read_engine_chat(body: ChatBody, sent: Values, model: str, chat: ChatServing) -> list[bytes]:
    """Return the bodies to send, one for each of the `n` choices.

    Raises:
        InvalidField: The engine would misread a field, or has no parser for tools.
    """
    what = "is not served together with what the engine does itself"
    check_asks_nothing(sent, NOT_FORWARDED, what)
    reads_calls = chat.reads_calls or chat.tool_parser is not None
    if read_tools(body, sent) is not None and not reads_calls:
        # SGLang parses forced calls by it, too
        raise field_error(
            "tools",
            f"need a parser that finds calls in the outputs of {model}, and its servers have none",
            "Start all of them with --tool-call-parser and the name of the model's format, then "
            "restart the router.",
        )
    messages = _read_messages(sent["messages"])
    read_sampling(body)
    if body.get("top_logprobs") and not body.get("logprobs"):
        raise field_error("top_logprobs", "needs logprobs", "Set logprobs to true.")
    check_template_kwargs(body.get("chat_template_kwargs", {}))
    own = {"model": model, "messages": messages}
    bodies = write_choices(body.get("n", 1), sent, own, {*NOT_FORWARDED, *READ_HERE})
    CHAT.find_unknown(sent, NOT_FORWARDED)
    return bodies


def _read_messages(sent: Sequence[Any]) -> list[Any]:
    """Return validated messages with calls that SGLang can read; raises InvalidField."""
    messages = name_calls(sent)
    for at, message in enumerate(messages):
        if message.get("tools") is not None:  # SGLang would add them to the body's, unchecked
            path = f"messages[{at}].tools"
            raise field_error(path, "is not served", "Put them into the body's tools.")
        if calls := read_calls(message.get("tool_calls") or (), f"messages[{at}].tool_calls"):
            messages[at] = {**message, "tool_calls": [_write_arguments(call) for call in calls]}
    check_order(messages)
    return messages


def _write_arguments(call: Values) -> Values:
    function = call["function"]
    arguments = write_json(function["arguments"]).decode()
    return {**call, "function": {**function, "arguments": arguments}}


class CompletionBody(SamplingFields, StopField, ForwardedFields, EndUserFields, total=False):
    """A completion of a prompt."""

    model: Required[Names]
    prompt: Required[str | list[Any]]
    stream: bool
    max_tokens: Tokens
    response_format: ResponseFormat
    logprobs: Annotated[int, Interval(ge=0, le=MAX_TOP_LOGPROBS)]


COMPLETION = JsonObject(CompletionBody)


def read_completion(body: CompletionBody, sent: Values, model: str) -> list[bytes]:
    """Return the bodies of a completion to send, one for each of the `n` choices.

    Raises:
        InvalidField: The engine would misread a field.
    """
    check_asks_nothing(sent, NOT_COMPLETED, "is not served")
    read_sampling(body)
    own = {"prompt": read_prompt(body), "model": model}
    bodies = write_choices(body.get("n", 1), sent, own, {*NOT_COMPLETED, "prompt_cache_key"})
    COMPLETION.find_unknown(sent, NOT_COMPLETED)
    return bodies


def read_prompt(body: CompletionBody) -> Any:
    """Return the prompt, also of a list that holds one, as LangChain and lm-eval send it.

    Raises:
        InvalidField: It is neither one text nor the token ids of one.
    """
    prompt = body["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (ids or isinstance(prompt, str)):
        raise field_error(
            "prompt", "must be a string or an array of token ids", "Send a request for each prompt."
        )
    return prompt


NOT_COMPLETED: dict[str, tuple[Any, ...]] = {
    **CHOSEN_HERE,
    "echo": (False,),
    "best_of": (1,),
    "top_a": (0,),
    "suffix": ("",),
    "max_completion_tokens": (),
}


def write_choices(
    choices: int, sent: Values, own: Values, left_out: Collection[str]
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
    if whole.get("top_p") == 0:
        whole["top_p"] = LEAST_TOP_P
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
    return [first, *(write_json({**whole, "seed": seed}) for seed in seeds)]
