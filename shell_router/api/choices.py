"""Several requests to an engine, answered as the choices of one."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import orjson

from shell_router.api.streaming import DONE, data_frame
from shell_router.core.engine import Relayed
from shell_router.engines.wire import EventSplitter

Forward = Callable[[bytes], AbstractAsyncContextManager[Relayed]]


@asynccontextmanager
async def forward_choices(forward: Forward, bodies: Sequence[bytes]) -> AsyncIterator[Relayed]:
    """Send all `bodies` at a time, and join their answers into one with as many choices.

    On leaving, none of them runs on. Raises what `forward` raises.
    """
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(stack.enter_async_context(forward(body))) for body in bodies
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        answers = [task.result() for task in tasks]
        first = next((answer for answer in answers if answer.status >= 400), answers[0])
        if len(answers) == 1 or first.status >= 400:
            yield first
            return
        is_stream = first.content_type.startswith("text/event-stream")
        join = _join_streams if is_stream else _join_whole
        placed = tuple(placement for answer in answers for placement in answer.placed)
        async with aclosing(join(answers)) as chunks:
            yield Relayed(first.status, first.content_type, chunks, placed)


async def _join_whole(answers: Sequence[Relayed]) -> AsyncGenerator[bytes, None]:
    bodies = [orjson.loads(b"".join([chunk async for chunk in each.chunks])) for each in answers]
    choices = [
        {**choice, "index": place}
        for place, body in enumerate(bodies)
        for choice in body["choices"]
    ]
    usage = _sum_usage([body["usage"] for body in bodies])
    yield orjson.dumps({**bodies[0], "choices": choices, "usage": usage})


async def _join_streams(answers: Sequence[Relayed]) -> AsyncGenerator[bytes, None]:
    """Yield chunks as they come, each with its choice's number, then the usage and the end."""
    streams = [ChoiceStream(place) for place in range(len(answers))]
    reading = {asyncio.ensure_future(_read_next(each)): at for at, each in enumerate(answers)}
    head: dict[str, Any] = {}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = reading.pop(task)
                chunk = task.result()
                if not chunk:
                    continue
                events = streams[place].feed(chunk)
                if events:
                    head = head or events[0]
                    yield b"".join([data_frame(_rename_choice(event, head)) for event in events])
                reading[asyncio.ensure_future(_read_next(answers[place]))] = place
        usages = [stream.usage for stream in streams if stream.usage]
        if usages:
            yield data_frame({**head, "choices": [], "usage": _sum_usage(usages)})
        yield DONE
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


class ChoiceStream:
    """The events of one choice; its usage is kept for the end."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._splitter = EventSplitter()
        self.usage: dict[str, Any] = {}

    def feed(self, chunk: bytes) -> list[dict[str, Any]]:
        """Return the events that are complete, with the choice's number."""
        events = []
        for payload in self._splitter.feed(chunk):
            if payload == b"[DONE]":
                continue
            event = orjson.loads(payload)
            if event.get("usage") and not event.get("choices"):
                self.usage = event["usage"]
                continue
            for choice in event.get("choices", ()):
                choice["index"] = self._place
            events.append(event)
        return events


def _rename_choice(event: dict[str, Any], head: Mapping[str, Any]) -> dict[str, Any]:
    return {**event, "id": head["id"]} if "id" in event and "id" in head else event


def _sum_usage(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return OpenAI's usage of several choices, in which the prompt counts once."""
    written = sum(usage["completion_tokens"] for usage in usages)
    total = usages[0]["prompt_tokens"] + written
    return {**usages[0], "completion_tokens": written, "total_tokens": total}


async def _read_next(answer: Relayed) -> bytes:
    """Return the next bytes; empty at the end."""
    return await anext(answer.chunks, b"")
