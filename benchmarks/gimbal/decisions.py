"""What a decision costs: the router's dispatcher, by the clock of this machine."""

import asyncio
from collections.abc import Iterator
from random import Random
from time import perf_counter_ns, thread_time_ns
from typing import Any

import numpy as np

from shell_router.core.engine import Hints
from shell_router.engines.server_client import take_slot
from shell_router.routing.dispatcher import Dispatcher, EngineSlot, SchedulingSettings
from shell_router.routing.engine_selection import POLICIES, SelectionSettings
from shell_router.routing.failures import Breaker
from shell_router.routing.placement import EngineReport, PlacementRequest
from shell_router.routing.queue import ORDERS, QueueSettings

ENGINES, IN_FLIGHT, PROMPT = 64, 1000, 2000


async def decision_rows(decisions: int) -> list[dict[str, Any]]:
    """A row per policy, then one per order, in microseconds."""
    rows = [await _chosen(policy, decisions) for policy in POLICIES]
    return [*rows, *[await _ordered(order, decisions) for order in ORDERS]]


async def _chosen(policy: str, decisions: int) -> dict[str, Any]:
    """One request comes and another goes, 1000 being in flight."""
    dispatcher = _dispatcher(SchedulingSettings(SelectionSettings(policy)))
    wanted = _wanted()
    slots = [await take_slot(dispatcher, next(wanted)) for _ in range(IN_FLIGHT)]
    took = []
    for number in range(decisions):
        one = next(wanted)
        begun = _clocks()
        slot = await take_slot(dispatcher, one)
        took.append(_since(begun))
        slots[number % IN_FLIGHT].close()
        slots[number % IN_FLIGHT] = slot
    return _row(f"policy {policy}", took)


async def _ordered(order: str, decisions: int) -> dict[str, Any]:
    """960 requests run, 40 wait: one ends, and the next is found and placed."""
    queue = QueueSettings(order, max_running=15, wait_s=1e6)
    dispatcher = _dispatcher(SchedulingSettings(SelectionSettings("scored"), queue))
    wanted = _wanted()
    tasks = [asyncio.create_task(take_slot(dispatcher, next(wanted))) for _ in range(IN_FLIGHT)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running: list[EngineSlot[str]] = [task.result() for task in tasks if task.done()]
    waiting = [task for task in tasks if not task.done()]
    took, draws = [], Random(0)
    for _ in range(decisions):
        waiting.append(asyncio.create_task(take_slot(dispatcher, next(wanted))))
        await asyncio.sleep(0)
        slot = running.pop(draws.randrange(len(running)))
        begun = _clocks()
        slot.close()
        took.append(_since(begun))
        await asyncio.sleep(0)
        running += [task.result() for task in waiting if task.done()]
        waiting = [task for task in waiting if not task.done()]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return _row(f"order {order}", took)


def _dispatcher(settings: SchedulingSettings) -> Dispatcher[str]:
    named = [(f"engine {at}", f"engine-{at}", Breaker()) for at in range(ENGINES)]
    dispatcher = Dispatcher(named, settings, asyncio.get_running_loop().time)
    for index in range(ENGINES):
        dispatcher.report(index, EngineReport(0.5 + index / 200, 1000 * index, 15, 0))
    return dispatcher


def _wanted() -> Iterator[PlacementRequest]:
    """Prompts of 2000 tokens of fifty users, half of each what all share."""
    draws, shared = Random(0), list(range(PROMPT // 2))
    number = 0
    while True:
        number += 1
        ids = shared + [number * PROMPT + at for at in range(PROMPT // 2)]
        hints = Hints(
            f"user-{draws.randrange(50)}",
            f"program-{number // 13}",
            "tree",
            f"p-{number % 13}",
            300.0,
        )
        yield PlacementRequest(PROMPT, ids, 1000, hints)


def _clocks() -> tuple[int, int]:
    return perf_counter_ns(), thread_time_ns()


def _since(begun: tuple[int, int]) -> tuple[float, float]:
    """Microseconds by the clock, and of this thread's own work: others may take the core in
    between.
    """
    wall, own = _clocks()
    return (wall - begun[0]) / 1e3, (own - begun[1]) / 1e3


def _row(name: str, took_us: list[tuple[float, float]]) -> dict[str, Any]:
    (p50, own50), (p99, own99) = np.percentile(np.array(took_us), (50, 99), axis=0)
    return {
        "decision": name,
        "engines": ENGINES,
        "in flight": IN_FLIGHT,
        "p50 us": p50,
        "p99 us": p99,
        "CPU p50 us": own50,
        "CPU p99 us": own99,
    }
