"""Lines run as chat completions."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shell_router.api import ApiSettings, Services
from shell_router.api.chat import Chats
from shell_router.api.live import Targets
from shell_router.app.fleet_changes import FleetChanges
from shell_router.batch.api.lines import BatchLine, LineResult
from shell_router.batch.api.runner import ChatLines, PoolLines
from shell_router.batch.api.storage import BatchRecord
from shell_router.batch.pool import Pool, load_pool
from shell_router.core.events import Emit
from shell_router.errors import (
    AgentFailed,
    AgentTimeout,
    EngineAborted,
    EngineRejected,
    EngineStalled,
    EngineUnavailable,
    EngineUnreachable,
)
from shell_router.moa.requests import Answer, MoaRequest
from shell_router.topology import Topology
from tests.fakes.api_server import ENDPOINT, line, live
from tests.fakes.moa import ScriptedMoa
from tests.fakes.pools import write_pool
from tests.fakes.scripted_engine import Gates

BATCH = BatchRecord("batch_1", "tenant", "file-1", ENDPOINT, "24h", 0, 3600)
AWAY = EngineUnreachable("connection refused")


def caused_by(cause: Exception) -> AgentFailed:
    error = AgentFailed("agent a failed")
    error.__cause__ = cause
    return error


class Failing:
    """Fails with each of `errors` in turn, then answers by `moa`."""

    def __init__(self, moa: ScriptedMoa, *errors: Exception) -> None:
        self._moa = moa
        self._errors = list(errors)

    async def run(self, topology: Topology, request: MoaRequest, emit: Emit) -> Answer:
        if self._errors:
            raise self._errors.pop(0)
        return await self._moa.executor.run(topology, request, emit)


class Pauses:
    """Remembers how long it was asked to wait."""

    def __init__(self) -> None:
        self.taken_s: list[float] = []

    async def __call__(self, pause_s: float) -> None:
        self.taken_s.append(pause_s)


async def given(*names: str) -> AsyncIterator[BatchLine]:
    for number, name in enumerate(names, 1):
        yield BatchLine(number, name, line(name, f"Ask {name}")["body"])


def runner(
    *errors: Exception,
    sleep: Pauses | None = None,
    concurrency: int = 4,
    moa: ScriptedMoa | None = None,
    pool: Pool | None = None,
    folder: Path = Path("pools"),
    pauses_s: tuple[float, ...] = (1, 2),
) -> ChatLines:
    moa = moa or ScriptedMoa()
    services = Services(
        Failing(moa, *errors), moa.programs, live(moa.models), moa.models, {}, FleetChanges({}, {})
    )
    chats = Chats(services, ApiSettings(), Targets(services.topologies, services.models))
    pools = {} if pool is None else {"panel": PoolLines("panel", pool, folder, services)}
    return ChatLines(chats, concurrency, pools, pauses_s=pauses_s, sleep=sleep or Pauses())


async def run(lines: ChatLines, *names: str) -> list[LineResult]:
    kept: list[LineResult] = []

    async def keep(result: LineResult) -> None:
        kept.append(result)

    await lines.run(BATCH, given(*names), keep)
    return kept


async def test_lines_that_a_pool_takes_come_after_all_others_and_say_why_it_could_not_run(
    tmp_path: Path,
) -> None:
    pool = replace(load_pool(write_pool(tmp_path)), profile=None)
    lines = runner(pool=pool, folder=tmp_path)
    kept: list[LineResult] = []

    async def keep(result: LineResult) -> None:
        kept.append(result)

    async def mixed() -> AsyncIterator[BatchLine]:
        for number, (name, model) in enumerate(
            (("a", "panel"), ("hot", "panel"), ("b", "small")), 1
        ):
            fields = {"temperature": 1.0} if name == "hot" else {}
            yield BatchLine(number, name, line(name, model=model, **fields)["body"])

    await lines.run(BATCH, mixed(), keep)
    assert [(one.custom_id, one.status) for one in kept] == [("hot", 400), ("b", 200), ("a", 502)]
    assert "temperature" in str(kept[0].body) and "There is no profile" in str(kept[2].body)


@pytest.mark.parametrize(
    "error",
    [AWAY, EngineUnavailable("breaker open"), EngineRejected("busy", status=503), caused_by(AWAY)],
)
async def test_a_line_whose_engine_is_away_is_asked_again_after_a_pause(error: Exception) -> None:
    pauses = Pauses()
    (result,) = await run(runner(error, sleep=pauses), "a")
    assert result.succeeded and pauses.taken_s == [1]


async def test_a_line_whose_engine_stays_away_fails_in_the_end() -> None:
    pauses = Pauses()
    (result,) = await run(runner(AWAY, AWAY, AWAY, sleep=pauses), "a")
    assert result.status == 502 and pauses.taken_s == [1, 2]


@pytest.mark.parametrize(
    "error",
    [
        EngineStalled("silent"),
        EngineAborted("aborted"),
        EngineRejected("crash", status=500),
        caused_by(EngineStalled("silent")),
    ],
)
async def test_a_line_whose_engine_fails_is_asked_again_only_a_few_times(error: Exception) -> None:
    (result,) = await run(runner(error, error), "a")
    assert result.succeeded
    pauses = Pauses()
    (result,) = await run(runner(*[error] * 9, sleep=pauses, pauses_s=(1, 2, 4)), "a")
    assert not result.succeeded and pauses.taken_s == [1, 2]


@pytest.mark.parametrize(
    "error",
    [AgentTimeout("slow"), EngineRejected("no", status=400), ValueError("a fault")],
)
async def test_a_line_that_may_be_at_fault_itself_is_not_asked_again(error: Exception) -> None:
    pauses = Pauses()
    (result,) = await run(runner(error, sleep=pauses), "a")
    assert not result.succeeded and result.body is not None and not pauses.taken_s


async def test_a_line_that_waits_for_its_engine_keeps_no_other_from_running() -> None:
    waiting, release = asyncio.Event(), asyncio.Event()

    async def pause(_: float) -> None:
        waiting.set()
        await release.wait()

    lines = runner(AWAY, sleep=pause, concurrency=1)  # type: ignore[arg-type]
    first = asyncio.ensure_future(run(lines, "first"))
    await waiting.wait()
    (second,) = await run(lines, "second")
    assert second.succeeded and not first.done()
    release.set()
    assert [one.succeeded for one in await first] == [True]


async def test_two_batches_share_the_room_in_turn() -> None:
    gates = Gates("small")
    moa = ScriptedMoa(pace=gates.pace)
    lines = runner(concurrency=2, moa=moa)
    both = [asyncio.ensure_future(run(lines, *names)) for names in ("abc", "xyz")]
    await gates.until_waiting(2)
    await _turns(100)
    assert len(moa.running) == 2
    gates.open("small")
    assert [len(kept) for kept in await asyncio.gather(*both)] == [3, 3]
    asked = [
        next(
            name
            for name in "abcxyz"
            if f"Ask {name}" in moa.tokenizers["small"].decode(one.input_ids)
        )
        for one in moa.engines["small"].generated
    ]
    assert set(asked[:4]) == set("abxy")


async def test_no_more_lines_are_held_than_can_run() -> None:
    taken: list[int] = []

    async def counted() -> AsyncIterator[BatchLine]:
        async for one in given(*"abcdef"):
            taken.append(one.number)
            yield one

    release = asyncio.Event()

    async def keep(_: LineResult) -> None:
        await release.wait()

    running = asyncio.ensure_future(runner(concurrency=2).run(BATCH, counted(), keep))
    await _until(lambda: len(taken) == 3)  # two that run, and one for which there is no room yet
    await _turns(100)
    assert taken == [1, 2, 3]
    release.set()
    await running
    assert taken == [1, 2, 3, 4, 5, 6]


async def _turns(count: int) -> None:
    """Let whatever can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 # nothing sets an event for it
            await asyncio.sleep(0)
