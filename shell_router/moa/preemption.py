"""Requests of batches, which leave their engines to online work and go on later."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import TypeVar

from shell_router.core.engine import Finish, Generation, ServedModel, Tokens
from shell_router.moa.journal import can_continue, count_written, is_whole, skip_written

T = TypeVar("T")


class Turn:
    """The time that a request has on its engines, until it is preempted."""

    def __init__(self) -> None:
        self._is_over = False
        self._limit: asyncio.Timeout | None = None

    def end(self) -> None:
        """Preempt the request: what it waits for is cancelled now, or as soon as it waits.

        Idempotent: each of its two engines may end its turn.
        """
        if self._is_over:
            return
        self._is_over = True
        if self._limit is not None:
            self._limit.reschedule(0.0)

    async def wait_for(self, step: Awaitable[T]) -> T | None:
        """Return the outcome of `step`, None if the request was preempted."""
        try:
            async with asyncio.timeout(0.0 if self._is_over else None) as limit:
                self._limit = limit
                return await step
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        finally:
            self._limit = None


async def generate_preemptibly(
    model: ServedModel, request: Generation, on_preempted: Callable[[int], None]
) -> AsyncGenerator[Tokens | Finish, None]:
    """Yield the output of a batch's request; after each preemption ask for the rest of it.

    The rest goes on from the tokens that were yielded, which are those after which an engine can go
    on. If it cannot, as with grammars, all tokens come at the end. `on_preempted` gets the number
    of tokens that were decoded in vain.
    """
    is_continued = can_continue(model, request)
    written = list[int]()
    for number in count():
        turn = Turn()
        rest = skip_written(request, written)
        # engines abort every request whose id begins with an aborted one's
        rid = f"again-{number}.{request.rid}" if number else request.rid
        rest = replace(rest, rid=rid, hints=replace(request.hints, on_preempt=turn.end))
        held = list[Tokens]()
        before = tuple(written)
        left = int(rest.sampling["max_new_tokens"])
        async with aclosing(model.engine.generate(rest)) as stream:
            while (item := await turn.wait_for(anext(stream))) is not None:
                if isinstance(item, Finish):
                    for piece in held:
                        yield piece
                    yield count_written(request, before, item)
                    return
                held.append(item)
                left -= len(item.ids)
                if is_continued and left > 0 and is_whole(model, item):
                    for piece in held:
                        written += piece.ids
                        yield piece
                    held = []
        on_preempted(sum(len(piece.ids) for piece in held))
