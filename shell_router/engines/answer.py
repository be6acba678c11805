"""One attempt's answer, read."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import NoReturn

from shell_router.core.engine_errors import error_message
from shell_router.core.generation import Finish, Tokens
from shell_router.engines.legs import Legs
from shell_router.engines.server_client import HTTP_OK
from shell_router.engines.wire import EventSplitter, OutputReader, read_prefilled, rejected
from shell_router.errors import EngineError, EngineUnreachable, PromptTooLong


async def answer(legs: Legs, *, logprobs: bool) -> AsyncGenerator[Tokens | Finish, None]:
    """Tokens as decode streams them, then one Finish. Ends the legs, however it is left."""
    reader = OutputReader(legs.decode_name, logprobs=logprobs)
    events = EventSplitter()
    begun = False
    try:
        response = await legs.head()
        if response.status != HTTP_OK:
            await refused(legs, response.status)
        while chunk := await legs.read():
            for payload in events.feed(chunk):
                tokens = reader.take(payload)
                if tokens is not None:
                    if not begun:
                        begun = True
                        legs.begun_well()
                    yield tokens
        if reader.finish is None:
            raise EngineUnreachable(f"The {legs.decode_name} closed its stream before the answer ended.")
        yield _with_cached_tokens(legs, reader.finish, await legs.settled())
    except (EngineError, PromptTooLong) as error:
        legs.refused(error)
        raise
    finally:
        legs.close()


async def refused(legs: Legs, status: int) -> NoReturn:
    """Read decode's error answer, and raise EngineRejected or PromptTooLong with its words."""
    body = bytearray()
    while chunk := await legs.read():
        body += chunk
    error = rejected(legs.decode_name, status, error_message(bytes(body)))
    legs.refused(error)
    raise error


def _with_cached_tokens(legs: Legs, finish: Finish, prefill_answer: bytes | None) -> Finish:
    """Decode repeats the prefill's `cached_tokens`, but adds its own hits where it has a prefix cache too."""
    if prefill_answer is None:
        return finish
    return replace(finish, cached_tokens=read_prefilled(legs.prefill_name, prefill_answer).cached_tokens)
