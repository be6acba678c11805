"""Engines as processes: started, waited for, started again, stopped. The engines are small HTTP
servers.
"""

import asyncio
import os
import shutil
import socket
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from launch.sglang_cpu.pair import free_ports
from shell_router.app import load_config
from shell_router.errors import EngineUnreachable
from shell_router.launching.plan import EngineCommand, LaunchPlan, plan
from shell_router.launching.supervisor import Engines, Patience, run_engines
from shell_router.processes.command import CommandProcess
from shell_router.processes.restarts import RestartPolicy
from tests.fakes import fake_engine
from tests.fakes.command import survivors
from tests.fakes.timers import Lines, logged

PATIENCE = Patience(start_s=30, stop_s=10, poll_s=0.02, prefill_away_s=0.001)
AT_ONCE = RestartPolicy(delay_s=0.001)
LIMIT_S = 30

DEPLOYMENT = """
models:
  m:
    path: /no/model
    pairs:
      - {{prefill: "http://127.0.0.1:{}", decode: "http://127.0.0.1:{}", bootstrap_port: {}, launch: {{{launch}}}}}
launch: {{python: {python}}}
"""

Launched = Callable[..., AbstractAsyncContextManager[Engines]]


@pytest.fixture
def lines() -> Lines:
    return Lines()


def launched(folder: Path, launch: str = "") -> LaunchPlan:
    """A plan of one pair of fake engines on free ports."""
    python = fake_engine.interpreter(folder, Path(fake_engine.__file__))
    file = folder / "launch.yaml"
    file.write_text(
        DEPLOYMENT.format(*free_ports(3), launch=launch, python=python), encoding="utf-8"
    )
    return plan(load_config(file, {}), folder=folder, python=sys.executable)


async def as_is(engines: Sequence[EngineCommand]) -> None:
    """Engines of models that sleep are left awake."""


async def get(engine: EngineCommand, path: str) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.get(engine.ready_url.replace("health", path)) as answer,
    ):
        return await answer.text()


async def pids(*engines: EngineCommand) -> set[int]:
    return {int(pid) for engine in engines for pid in (await get(engine, "health")).split()}


async def end(engine: EngineCommand) -> None:
    with pytest.raises(aiohttp.ClientError):
        await get(engine, "end")


async def test_engines_serve_inside_and_are_gone_after_with_their_children(
    tmp_path: Path, lines: Lines
) -> None:
    planned = launched(tmp_path)
    async with run_engines(
        planned, policy=AT_ONCE, patience=PATIENCE, sleep=as_is, tell=lines
    ) as engines:
        running = await pids(*planned.engines)
        assert len(running) == 4
        assert engines.restarts() == {"m/prefill": 0, "m/decode": 0}
    assert survivors(running) == set()


async def test_an_engine_that_ignores_sigterm_is_killed(tmp_path: Path, lines: Lines) -> None:
    planned = launched(tmp_path, launch="flags: --stubborn")
    async with run_engines(
        planned, policy=AT_ONCE, patience=replace(PATIENCE, stop_s=0.05), sleep=as_is, tell=lines
    ):
        running = await pids(*planned.engines)
    assert survivors(running) == set()


@pytest.mark.parametrize("dead", [0, 1], ids=["prefill", "decode"])
async def test_a_dead_engine_is_started_again_and_counted(
    tmp_path: Path, lines: Lines, dead: int
) -> None:
    planned = launched(tmp_path)
    engine, other = planned.engines[dead], planned.engines[1 - dead]
    async with run_engines(
        planned, policy=AT_ONCE, patience=PATIENCE, sleep=as_is, tell=lines
    ) as engines:
        before, untouched = await pids(engine), await pids(other)
        for _ in planned.engines:
            await lines.with_words(": ready after")
        await end(engine)
        await lines.with_words(f"{engine.name}: ready after")
        assert engines.restarts() == {engine.name: 1, other.name: 0}
        assert survivors(before) == set(), "its child held the port's memory"
        assert await pids(engine) != before
        assert await pids(other) == untouched
        running = await pids(*planned.engines)
    assert survivors(running) == set()


async def test_an_engine_without_its_log_or_port_is_tried_again_until_it_has_both(
    tmp_path: Path, lines: Lines
) -> None:
    planned = replace(launched(tmp_path), folder=tmp_path / "logs")
    with logged("shell_router.processes", lines):
        async with run_engines(planned, policy=AT_ONCE, patience=PATIENCE, sleep=as_is, tell=lines):
            for _ in planned.engines:
                await lines.with_words(": ready after")
            shutil.rmtree(planned.folder)
            planned.folder.write_text("no folder")
            await end(planned.engines[1])
            assert str(planned.folder) in await lines.with_words("m/decode cannot be started")
            with socket.create_server(("127.0.0.1", *planned.engines[1].ports)):
                planned.folder.unlink()
                await lines.with_words("m/decode cannot listen on 127.0.0.1")
            await lines.with_words("m/decode: ready after")
            assert (planned.folder / "m-decode.log").exists()


def test_of_a_log_of_any_size_the_end_alone_is_read(tmp_path: Path) -> None:
    process = CommandProcess("a/decode", ("true",), {}, tmp_path / "a-decode.log")
    process.log.touch()
    os.truncate(process.log, 2**24)
    with process.log.open("a") as log:
        log.write("out of memory\n")
    tracemalloc.start()
    try:
        assert process.read_log_tail().endswith("out of memory")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


async def test_an_engine_over_its_limit_is_left_down_and_the_others_go_on(
    tmp_path: Path, lines: Lines
) -> None:
    planned = launched(tmp_path)
    prefill, decode = planned.engines
    policy = RestartPolicy(limit=0)
    with logged("shell_router.processes", lines):
        async with run_engines(
            planned, policy=policy, patience=PATIENCE, sleep=as_is, tell=lines
        ) as engines:
            await end(decode)
            line = await lines.with_words("left down")
            assert "m/decode ended with code 3" in line
            assert "m-decode.log" in line
            assert len(await pids(prefill)) == 2
            assert engines.restarts()["m/decode"] == 0


async def test_an_engine_that_ends_before_it_serves_is_an_error_with_its_last_words(
    tmp_path: Path, lines: Lines
) -> None:
    planned = launched(tmp_path, launch="decode_flags: --no-such-flag")
    with pytest.raises(
        EngineUnreachable, match="m/decode ended before it was ready: …unrecognized arguments"
    ) as failed:
        async with run_engines(planned, policy=AT_ONCE, patience=PATIENCE, sleep=as_is, tell=lines):
            raise AssertionError("it serves")
    log = tmp_path / "m-decode.log"
    assert failed.value.remedy == f"Read {log}; launch.python must be one that has SGLang."


async def test_an_engine_that_is_never_ready_is_an_error_that_names_its_log(
    tmp_path: Path, lines: Lines
) -> None:
    planned = launched(tmp_path, launch="prefill_flags: --never-ready")
    with pytest.raises(
        EngineUnreachable, match=r"m/prefill.*: not ready within 0.2 s\. .*m-prefill\.log"
    ):
        await _enter(planned, replace(PATIENCE, start_s=0.2), lines)


async def test_an_engine_that_finds_its_port_taken_and_goes_on_is_an_error_that_names_the_port(
    tmp_path: Path, lines: Lines
) -> None:
    planned = launched(tmp_path, launch="decode_flags: --finds-port-taken")
    (port,) = planned.engines[1].ports
    with pytest.raises(
        EngineUnreachable, match=f"m/decode cannot listen on 127.0.0.1, port {port}: .*decode.log"
    ):
        await _enter(planned, PATIENCE, lines)


async def test_a_start_that_is_cancelled_stops_what_it_started(
    tmp_path: Path, lines: Lines
) -> None:
    planned = launched(tmp_path, launch="prefill_flags: --never-ready")
    entering = asyncio.create_task(_enter(planned, replace(PATIENCE, report_s=0.05), lines))
    await lines.with_words("m/decode: ready after")
    await lines.with_words("m/prefill: starting for")
    running = await pids(planned.engines[1])
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert survivors(running) == set()


async def _enter(planned: LaunchPlan, patience: Patience, lines: Lines) -> None:
    async with run_engines(planned, policy=AT_ONCE, patience=patience, sleep=as_is, tell=lines):
        raise AssertionError("it serves")


async def test_engines_elsewhere_are_waited_for_and_not_touched(
    tmp_path: Path, lines: Lines
) -> None:
    planned = launched(tmp_path)
    prefill, decode = planned.engines
    there, here = (
        replace(planned, engines=(one,), elsewhere=(other,))
        for one, other in ((prefill, decode), (decode, prefill))
    )
    async with asyncio.TaskGroup() as tasks:
        first = run_engines(there, policy=AT_ONCE, patience=PATIENCE, sleep=as_is, tell=lines)
        entering = tasks.create_task(first.__aenter__())
        async with run_engines(here, policy=AT_ONCE, patience=PATIENCE, sleep=as_is, tell=lines):
            await entering
            running = await pids(prefill)
        assert await pids(prefill) == running
        await first.__aexit__(None, None, None)
    assert survivors(running) == set()
