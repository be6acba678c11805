"""A run and its slower reader."""

import asyncio

import pytest

from shell_router.api.streaming import LiveRun
from shell_router.core.events import AgentStarted, AgentTokens, Emit, Event
from shell_router.errors import PromptTooLong
from shell_router.moa.requests import Answer

ANSWER = Answer("done", "stop", {})
STARTED = AgentStarted(0.0, "a", "m")


def everything(_event: Event) -> bool:
    return True


async def test_a_run_ends_although_it_is_not_read_and_all_its_events_wait() -> None:
    async def talkative(emit: Emit) -> Answer:
        for place in range(1000):
            emit(AgentTokens(0.0, "a", (place,), "x"))
            await asyncio.sleep(0)
        return ANSWER

    async with LiveRun(talkative, everything) as run:
        await asyncio.wait([run._task])
        assert not run.drained
        assert len(await run.take(1.0)) == 1000
        assert run.drained and run.answer() == ANSWER


async def test_what_is_refused_before_any_event_is_raised_at_the_start() -> None:
    async def refused(_emit: Emit) -> Answer:
        raise PromptTooLong("too long")

    async with LiveRun(refused, everything) as run:
        with pytest.raises(PromptTooLong):
            await run.wait_begun(1.0)


async def test_what_fails_later_is_raised_at_the_end() -> None:
    async def failing(emit: Emit) -> Answer:
        emit(STARTED)
        raise PromptTooLong("grew too long")

    async with LiveRun(failing, everything) as run:
        await run.wait_begun(1.0)
        assert await run.take(1.0) == [STARTED]
        assert run.drained
        with pytest.raises(PromptTooLong):
            run.answer()


async def test_an_unwanted_event_still_begins_the_run() -> None:
    async def silent(emit: Emit) -> Answer:
        emit(STARTED)
        await asyncio.Event().wait()
        return ANSWER

    async with LiveRun(silent, lambda event: False) as run:
        await run.wait_begun(60.0)
        assert await run.take(0.0) == []


async def test_leaving_cancels_the_run_and_waits_for_its_cleaning_up() -> None:
    cleaned_up = False

    async def endless(emit: Emit) -> Answer:
        nonlocal cleaned_up
        emit(STARTED)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned_up = True
        return ANSWER

    async with LiveRun(endless, everything) as run:
        await run.wait_begun(1.0)
    assert cleaned_up
