"""Several requests to an engine, answered as the choices of one."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from math import inf
from typing import Any

import orjson

from shell_router.api.frames import ChatFrames
from shell_router.api.replies import join_warnings
from shell_router.api.runs import Run
from shell_router.api.streaming import DONE, LiveRun, data_frame
from shell_router.core.engine import Relayed
from shell_router.core.exact_json import NewValues
from shell_router.engines.wire import EventSplitter

Forward = Callable[[Any], AbstractAsyncContextManager[Relayed]]


@asynccontextmanager
async def open_choice(choice: tuple[Run, ChatFrames]) -> AsyncIterator[Relayed]:
    """Give the answer of a run, which ends with the context."""
    run, frames = choice
    stream = run.asked.stream
    async with LiveRun(run.answer, frames.wants) as live:
        await live.wait_begun(inf)

        async def write() -> AsyncIterator[bytes]:
            while not live.drained:
                written = frames.events(await live.take(inf))
                if stream and written:
                    yield written
            answer = live.answer()
            yield frames.answer(answer) if stream else orjson.dumps(frames.whole(answer))

        yield Relayed(200, "text/event-stream" if stream else "application/json", write())


@asynccontextmanager
async def forward_choices(forward: Forward, bodies: Sequence[Any]) -> AsyncIterator[Relayed]:
    """Send all `bodies` at a time, and join their answers into one with as many choices.

    On leaving, none of them runs on. Raises what `forward` raises.
    """
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(enter(forward(body))) for body in bodies]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        answers = [task.result() for task in tasks]
        first = next((answer for answer in answers if answer.status >= 400), answers[0])
        if first.status >= 400:
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
    own = {"choices": choices, "usage": _add_counts([body["usage"] for body in bodies])}
    yield orjson.dumps({**bodies[0], **own, **join_warnings(*bodies)})


async def _join_streams(answers: Sequence[Relayed]) -> AsyncGenerator[bytes, None]:
    """Yield chunks as they come, each with its choice's number, then the usage and the end."""
    streams = [ChoiceStream(place) for place in range(len(answers))]
    reading = {asyncio.ensure_future(_read_next(each)): at for at, each in enumerate(answers)}
    head: NewValues = {}
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
                    own = {"id": head.get("id")}
                    yield b"".join([data_frame({**event, **own}) for event in events])
                reading[asyncio.ensure_future(_read_next(answers[place]))] = place
        usages = [stream.usage for stream in streams if stream.usage]
        if usages:
            yield data_frame({**head, "choices": [], "usage": _add_counts(usages)})
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
        self.usage: NewValues = {}

    def feed(self, chunk: bytes) -> list[NewValues]:
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


def _add_counts(usages: Sequence[NewValues]) -> NewValues:
    """Return the sums of the counts of one name, also inside of objects."""
    total: NewValues = {}
    for usage in usages:
        for name, count in usage.items():
            if isinstance(count, dict):
                total[name] = _add_counts([total.get(name, {}), count])
            elif count is not None:
                total[name] = total.get(name, 0) + count
    return total


async def _read_next(answer: Relayed) -> bytes:
    """Return the next bytes; empty at the end."""
    return await anext(answer.chunks, b"")
