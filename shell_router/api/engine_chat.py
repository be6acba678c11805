"""Chats that a model's own servers answer on their OpenAI routes: tools, several choices, log
probabilities, images.

The router's own way renders a prompt and reads tokens. A chat that it cannot serve goes to both
servers of a pair as the client sent it, and the answer comes back as it is.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from typing import Annotated, Any, Required

import orjson
from annotated_types import Interval

from shell_router.api.chat_body import (
    CHAT,
    ENGINE_FIELDS,
    MAX_TOP_LOGPROBS,
    NOT_SERVED,
    ChatBody,
    ForwardedFields,
)
from shell_router.api.conversation import check_order, read_calls, read_tools
from shell_router.api.fields import (
    EndUserFields,
    Names,
    ResponseFormat,
    SamplingFields,
    StopField,
    Tokens,
    as_json,
    check_asks_nothing,
    check_few,
    check_template_kwargs,
    read_sampling,
)
from shell_router.core.engine import ChatServing, Relayed
from shell_router.core.sampling import RANGES
from shell_router.core.validation import JsonObject, field_error, json_object
from shell_router.engines.wire import EventSplitter

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


@json_object
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


Forward = Callable[[bytes], AbstractAsyncContextManager[Relayed]]


@asynccontextmanager
async def choices_as_one(forward: Forward, bodies: Sequence[bytes]) -> AsyncIterator[Relayed]:
    """Send all `bodies` at a time, their answers as one with as many choices. Raises what `forward`
    raises.

    On leaving, none of them runs on.
    """
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.TaskGroup() as tasks:
                begun = [
                    tasks.create_task(stack.enter_async_context(forward(body))) for body in bodies
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        relayed = [one.result() for one in begun]
        first = next((one for one in relayed if one.status >= 400), relayed[0])
        if len(relayed) == 1 or first.status >= 400:
            yield first
            return
        if first.content_type.startswith("text/event-stream"):
            joined = _joined_stream
        else:
            joined = _joined_whole
        async with aclosing(joined(relayed)) as chunks:
            yield Relayed(
                first.status,
                first.content_type,
                chunks,
                tuple(at for one in relayed for at in one.placed),
            )


async def _joined_whole(relayed: Sequence[Relayed]) -> AsyncGenerator[bytes, None]:
    answers = [orjson.loads(b"".join([chunk async for chunk in one.chunks])) for one in relayed]
    choices = [
        {**choice, "index": place} for place, one in enumerate(answers) for choice in one["choices"]
    ]
    yield orjson.dumps(
        {**answers[0], "choices": choices, "usage": _summed([one["usage"] for one in answers])}
    )


def _summed(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's usage of several choices: the prompt counts once."""
    written = sum(one["completion_tokens"] for one in usages)
    return {
        **usages[0],
        "completion_tokens": written,
        "total_tokens": usages[0]["prompt_tokens"] + written,
    }


async def _joined_stream(relayed: Sequence[Relayed]) -> AsyncGenerator[bytes, None]:
    """Chunks as they come, each with its choice's number; the usage and the end mark of all come
    last.
    """
    events = [EventSplitter() for _ in relayed]
    usages: list[dict[str, Any]] = []
    last: dict[str, Any] = {}
    reading = {asyncio.ensure_future(_next(one)): place for place, one in enumerate(relayed)}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = reading.pop(task)
                if not (chunk := task.result()):
                    continue
                frames = b""
                for event in [
                    orjson.loads(one) for one in events[place].feed(chunk) if one != b"[DONE]"
                ]:
                    last = last or event
                    if event.get("usage") and not event.get("choices"):
                        usages.append(event["usage"])
                        continue
                    for choice in event.get("choices", ()):
                        choice["index"] = place
                    frames += b"data: %b\n\n" % orjson.dumps(
                        event | ({"id": last["id"]} if "id" in event else {})
                    )
                if frames:
                    yield frames
                reading[asyncio.ensure_future(_next(relayed[place]))] = place
        if usages:
            yield b"data: %b\n\n" % orjson.dumps({**last, "choices": [], "usage": _summed(usages)})
        yield b"data: [DONE]\n\n"
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _next(relayed: Relayed) -> bytes:
    """The next bytes; empty at the end."""
    return await anext(relayed.chunks, b"")
