"""The asking of engines for their state, under a virtual clock."""

import asyncio
import logging
from dataclasses import dataclass, field

import pytest

from shell_router.engines.server_client import Monitor
from shell_router.errors import EngineUnreachable
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.routing.dispatcher import Dispatcher, SchedulingSettings
from shell_router.routing.engine_selection import SelectionSettings
from shell_router.routing.failures import Breaker
from shell_router.routing.placement import EngineReport

IDLE = EngineReport(0.0, 0, 0, 0)


@dataclass
class Engines:
    """Two engines; those named in `silent` do not answer, those in `slow` take their time."""

    silent: set[str] = field(default_factory=set)
    slow_s: dict[str, float] = field(default_factory=dict)
    asked: dict[str, list[float]] = field(default_factory=lambda: {"a": [], "b": []})

    async def ask(self, engine: str) -> EngineReport:
        self.asked[engine].append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.slow_s.get(engine, 0.0))
        if engine in self.silent:
            raise EngineUnreachable("gone", remedy="Start it.")
        return IDLE


async def follow(engines: Engines, seconds: float) -> Dispatcher[str]:
    settings, clock = (
        SchedulingSettings(SelectionSettings("gimbal")),
        asyncio.get_running_loop().time,
    )
    dispatcher = Dispatcher([(name, name, Breaker()) for name in engines.asked], settings, clock)
    async with Monitor(dispatcher, engines.ask):
        await asyncio.sleep(seconds)
    return dispatcher


def test_every_engine_is_asked_at_once_and_then_again_and_again() -> None:
    engines = Engines()
    run_virtual(follow(engines, 2.5))
    assert engines.asked == {"a": [0, 1, 2], "b": [0, 1, 2]}


def test_a_slow_engine_delays_no_others_news() -> None:
    engines = Engines(slow_s={"a": 10.0})
    dispatcher = run_virtual(follow(engines, 3.5))
    assert len(engines.asked["b"]) == 4
    assert dispatcher.tracked[0].reported is None


def test_one_that_does_not_answer_is_asked_less_and_less_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engines = Engines(silent={"a"})
    with caplog.at_level(logging.WARNING):
        dispatcher = run_virtual(follow(engines, 100.0))
    assert engines.asked["a"] == [0, 2, 6, 14, 30, 60, 90]
    assert dispatcher.tracked[0].failed_polls == 7
    assert caplog.text.count("does not report its state") == 1


def test_no_engine_is_polled_after_the_end() -> None:
    engines = Engines()

    async def whole() -> int:
        await follow(engines, 0.5)
        await asyncio.sleep(10.0)
        return len(asyncio.all_tasks())

    assert run_virtual(whole()) == 1
    assert engines.asked["a"] == [0]
