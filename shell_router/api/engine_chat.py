"""Chats that a model's own servers answer on their OpenAI routes: tools, several choices, log
probabilities, images.

The router's own way renders a prompt and reads tokens. What it does not do itself goes to both
servers of a pair as the client sent it, and the answer comes back as it is.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import orjson

from shell_router.api.conversation import read_messages, read_tools
from shell_router.api.fields import (
    MAX_SEED,
    SAMPLING,
    Fields,
    as_json,
    check_few,
    read_sampling,
    read_template_kwargs,
)
from shell_router.core.engine import ChatServing, Relayed
from shell_router.engines.wire import EventSplitter

MAX_CHOICES = 16
MAX_CHOICES_BYTES = 2**25
"""Of all bodies that the choices of one request are sent in."""
MAX_TOP_LOGPROBS = 20

ENGINE_FIELDS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "tools": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "separate_reasoning": (True,),
    "reasoning_effort": (),
}
"""What only an engine's own chats do, with the values that ask for nothing."""

CHOSEN_HERE: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"), ()
)
"""SGLang's fields for routers: a wrong one makes servers answer 500."""

NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": (),
    "best_of": (1,),
    "echo": (False,),
    "top_a": (0,),
}
"""Fields that would make the answer another one and that no chat has here, with the values that ask
for nothing.
"""

NOT_FORWARDED: dict[str, tuple[Any, ...]] = {
    **CHOSEN_HERE,
    **NOT_SERVED,
    "include_agents": (False,),
    "max_thinking_tokens": (),
    "prediction": (),
}

READ_HERE = frozenset({"lazy", "prefill", "program", "prompt_cache_options"})
"""Fields that a chat may have wherever it is answered, and that mean nothing to engines."""


def asks_engine(body: Fields) -> bool:
    """Whether the body asks for something that only an engine's own chats do."""
    if any(body.raw(name) not in ENGINE_FIELDS[name] for name in body.given(ENGINE_FIELDS)):
        return True
    messages = body.raw("messages")
    return isinstance(messages, list) and any(
        isinstance(one, dict) and _beyond_text(one) for one in messages
    )


def _beyond_text(message: dict[str, Any]) -> bool:
    content = message.get("content")
    if isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") != "text" for part in content
    ):
        return True
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def read_engine_chat(body: Fields, model: str, chat: ChatServing) -> list[bytes]:
    """The bodies to send, one for each of the `n` choices. Raises InvalidField for what the engine
    would misread.
    """
    body.refuse_unless(NOT_FORWARDED, "is not served together with what the engine does itself")
    if (
        read_tools(body) is not None and chat.tool_parser is None
    ):  # SGLang parses forced calls by it, too
        raise body.refuse(
            "tools",
            f"need a parser that finds calls in the outputs of {model}, and its servers have none",
            (
                "Start all of them with --tool-call-parser and the name of the model's format, "
                "then "
                "restart the router."
            ),
        )
    read_messages(body, _content)
    read_sampling(body)
    _check_values(body)
    bodies = _each_choice(body, model, {}, {*NOT_FORWARDED, *READ_HERE})
    body.check_spelling({*ENGINE_FIELDS, *NOT_FORWARDED, *SAMPLING})
    return bodies


def _check_values(body: Fields) -> None:
    for flag in ("logprobs", "separate_reasoning", "stream"):
        body.flag(flag)
    if body.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) and not body.flag("logprobs"):
        raise body.refuse("top_logprobs", "needs logprobs", "Set logprobs to true.")
    for name in ("logit_bias", "stream_options", "metadata"):
        body.object(name)
    read_template_kwargs(body)


def _content(message: Fields) -> str | list[str]:
    if message.raw("tools") is not None:  # SGLang would add them to the body's, unchecked
        raise message.refuse("tools", "is not served", "Put them into the body's tools.")
    return message.parts("content", lambda part: part.required_text("type"))


def read_completion(body: Fields, model: str) -> list[bytes]:
    """The bodies of /v1/completions to send, one for each of the `n` choices. Raises
    InvalidField."""
    prompt = _one_prompt(body.raw("prompt"))
    ids = isinstance(prompt, list) and bool(prompt) and all(type(one) is int for one in prompt)
    if not ids and not (isinstance(prompt, str) and prompt):
        raise body.refuse(
            "prompt", "must be a string or an array of token ids", "Send a request for each prompt."
        )
    body.refuse_unless(NOT_COMPLETED, "is not served")
    read_sampling(body)
    body.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    body.flag("stream")
    for name in ("logit_bias", "stream_options"):
        body.object(name)
    bodies = _each_choice(body, model, {"prompt": prompt}, {*NOT_COMPLETED, "prompt_cache_key"})
    body.check_spelling({*SAMPLING, *NOT_COMPLETED})
    return bodies


def _one_prompt(given: Any) -> Any:
    """The prompt of a list that holds one, as LangChain and lm-eval send it."""
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        return given[0]
    return given


NOT_COMPLETED: dict[str, tuple[Any, ...]] = {
    **CHOSEN_HERE,
    "echo": (False,),
    "best_of": (1,),
    "top_a": (0,),
    "suffix": ("",),
    "max_completion_tokens": (),
}


def _each_choice(
    body: Fields, model: str, own: Mapping[str, Any], left_out: Collection[str]
) -> list[bytes]:
    """A body for each choice: a pair answers a request once. Seeds follow each other, or all would
    be the same.

    `own` fields are put in; those that are `left_out` ask for nothing.
    """
    choices = body.integer("n", 1, MAX_CHOICES) or 1
    rid = body.text("rid")
    whole = {
        name: said
        for name, said in body.as_dict().items()
        if said is not None and name not in left_out
    }
    whole |= {**own, "model": model}
    if choices == 1:
        return [as_json(whole)]
    if rid is not None:
        raise body.refuse("rid", "cannot name several requests", "Leave rid out, or set n to 1.")
    seed = body.raw("seed")
    seeds = [
        {} if seed is None else {"seed": min(seed + place, MAX_SEED)} for place in range(choices)
    ]
    bodies = [as_json(whole | own | {"n": 1}) for own in seeds[:1]]
    if len(bodies[0]) * choices > MAX_CHOICES_BYTES:
        raise body.refuse(
            "n", f"times the body's size is over {MAX_CHOICES_BYTES} bytes", "Send fewer at a time."
        )
    check_few(bodies[0], choices)
    return bodies + [orjson.dumps(whole | own | {"n": 1}) for own in seeds[1:]]


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
