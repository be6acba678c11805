"""A dead engine, in time that is stepped: started again after a while, or left down."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shell_router.errors import EngineUnreachable
from shell_router.processes.restarts import RestartPolicy, keep_running
from tests.fakes.timers import SteppedTimers

ENDED = "Engine a/decode was ended by SIGKILL."


class Engine:
    """Ends when a test says so; a start returns at once, or fails while `broken`."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.time = SteppedTimers()
        self.starts_s: list[float] = []
        self.broken = False
        self._ends = asyncio.Semaphore(0)
        self.keeping = asyncio.create_task(
            keep_running(
                self._ended,
                self._start,
                restarted_s=[],
                policy=policy,
                clock=self.time.clock,
                sleep=self.time.sleep,
            )
        )

    async def end(self) -> list[float]:
        """It ends; what the next start waits for."""
        self._ends.release()
        await settled()
        return self.time.delays_s

    async def end_and_come_back(self) -> float:
        """Seconds between its end and its start."""
        (delay_s,) = await self.end()
        self.time.step(delay_s)
        await settled()
        return delay_s

    async def _ended(self) -> str:
        await self._ends.acquire()
        return ENDED

    async def _start(self) -> None:
        self.starts_s.append(self.time.now_s)
        if self.broken:
            self._ends.release()
            raise EngineUnreachable("no model there")


async def settled() -> None:
    """Let every task run until all wait."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[Engine]:
    made = Engine(RestartPolicy())
    yield made
    made.keeping.cancel()


async def test_a_dead_engine_is_started_again_after_its_delay_and_not_before(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    assert await engine.end() == [1.0]
    engine.time.step(0.999)
    await settled()
    assert engine.starts_s == []
    engine.time.step(0.001)
    await settled()
    assert engine.starts_s == [1.0]
    (line,) = caplog.records
    assert (line.levelname, line.getMessage()) == (
        "WARNING",
        f"{ENDED} It is started again in 1 s; until it is ready, requests that need it fail.",
    )


async def test_an_engine_that_keeps_dying_is_left_down_and_an_error_says_what_to_do(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    assert [await engine.end_and_come_back() for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert await engine.end() == []
    assert engine.keeping.done()
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert line.startswith(
        f"{ENDED} It ended too often and is left down; requests that need it fail."
    )
    assert line.endswith("then start this command again.")


async def test_ten_minutes_later_an_engine_has_all_its_restarts_again(engine: Engine) -> None:
    for _ in range(5):
        await engine.end_and_come_back()
    engine.time.step(600.0)
    assert await engine.end_and_come_back() == 1.0


async def test_a_start_that_fails_is_tried_again_later(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.broken = True
    await engine.end_and_come_back()
    assert engine.time.delays_s == [2.0]
    assert "no model there" in caplog.text


async def test_after_a_cancel_nothing_is_started(engine: Engine) -> None:
    await engine.end()
    engine.keeping.cancel()
    await settled()
    engine.time.step(1000.0)
    assert (engine.time.delays_s, engine.starts_s) == ([], [])
