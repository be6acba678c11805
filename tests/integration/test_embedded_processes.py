"""Embedded servers as processes: they start together, come back, end together, and never outlive
their parent.
"""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from benchmarks.random_checkpoint import make_checkpoint
from shell_router.errors import EngineUnreachable
from shell_router.processes.restarts import RestartPolicy
from shell_router.standins.embedded.fleet import (
    START_LIMIT_S,
    EmbeddedFleet,
    EmbeddedPair,
    EmbeddedServer,
)
from shell_router.standins.embedded.settings import EmbeddedSettings, ServerSettings
from tests.fakes.command import descendants, survivors
from tests.fakes.shared_engines import SharedEngines
from tests.fakes.timers import Lines, SteppedTimers, logged

LIMIT_S = 60.0

PARENT = """
import asyncio, sys
from shell_router.standins.embedded.fleet import EmbeddedFleet
from shell_router.standins.embedded.settings import EmbeddedSettings

async def main():
    async with EmbeddedFleet({"only": EmbeddedSettings(sys.argv[1])}) as fleet:
        pair = fleet["only"]
        print(pair.prefill.pid, pair.decode.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def folder(engines: SharedEngines) -> str:
    return str(engines.model())


@pytest_asyncio.fixture
async def fleet(engines: SharedEngines, folder: str) -> AsyncIterator[EmbeddedFleet]:
    """Two pairs of one model, so that one's decode server can work with the other's prefill server;
    none comes back.
    """
    pairs = {"first": EmbeddedSettings(folder), "second": EmbeddedSettings(folder)}
    async with EmbeddedFleet(pairs, policy=RestartPolicy(limit=0)) as fleet:
        yield fleet


async def test_a_pair_runs_on_the_cores_it_is_given_and_on_no_core_that_is_not_there(
    engines: SharedEngines, folder: str
) -> None:
    core = max(os.sched_getaffinity(0))
    async with EmbeddedFleet({"only": EmbeddedSettings(folder, cores=(core,))}) as fleet:
        for server in (fleet["only"].prefill, fleet["only"].decode):
            assert os.sched_getaffinity(pid_of(server)) == {core}
    with pytest.raises(EngineUnreachable, match=r"there is no core 100000"):
        await EmbeddedFleet({"only": EmbeddedSettings(folder, cores=(100_000,))}).start()


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def timers() -> SteppedTimers:
    return SteppedTimers()


Made = Callable[..., EmbeddedFleet]


@pytest.fixture
def made(folder: str, lines: Lines, timers: SteppedTimers) -> Made:
    """Makes a fleet of one pair whose restarts wait for `timers`, and which tells its steps to
    `lines`.
    """
    return partial(
        EmbeddedFleet, {"only": EmbeddedSettings(folder)}, on_progress=lines, sleep=timers.sleep
    )


def pair_body(pair: EmbeddedPair, **fields: Any) -> dict[str, Any]:
    return {
        "input_ids": [random.randrange(3, 500) for _ in range(20)],
        "bootstrap_host": pair.address.bootstrap_host,
        "bootstrap_port": pair.address.bootstrap_port,
        "bootstrap_room": random.getrandbits(62),
        **fields,
    }


async def post(
    http: aiohttp.ClientSession, server: EmbeddedServer, body: dict[str, Any]
) -> tuple[int, Any]:
    async with http.post(f"{server.url}/generate", json=body) as response:
        return response.status, await response.json()


async def through_both(http: aiohttp.ClientSession, pair: EmbeddedPair) -> tuple[int, Any]:
    """Decode's answer to a request of three tokens that goes through the whole pair."""
    body = pair_body(pair, sampling_params={"max_new_tokens": 3, "ignore_eos": True})
    _, answered = await asyncio.gather(
        post(http, pair.prefill, body), post(http, pair.decode, body)
    )
    return answered


def pid_of(server: EmbeddedServer) -> int:
    assert server.pid is not None
    return server.pid


async def kill(server: EmbeddedServer) -> None:
    """End its process without a farewell; returns when the fleet has noticed."""
    os.kill(pid_of(server), signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        await server.dead.wait()


async def process_ended(pid: int) -> None:
    """Wait, without polling, until the process of that id has ended; it need not be a child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(LIMIT_S):
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def test_a_killed_prefill_server_fails_its_requests_and_leaves_decode_serving(
    fleet: EmbeddedFleet, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = fleet["first"], fleet["second"]
    async with aiohttp.ClientSession() as http, asyncio.timeout(LIMIT_S):
        orphan = asyncio.create_task(post(http, first.decode, pair_body(first)))
        long = pair_body(
            first, stream=True, sampling_params={"max_new_tokens": 300, "ignore_eos": True}
        )
        prefill = asyncio.create_task(post(http, first.prefill, {**long, "stream": False}))
        async with http.post(f"{first.decode.url}/generate", json=long) as running:
            await running.content.readuntil(b"\n\n")
            await prefill
            os.kill(pid_of(first.prefill), signal.SIGKILL)
            await first.prefill.dead.wait()
            last = json.loads((await running.text()).split("\n\n")[-3].removeprefix("data: "))
        assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
        status, _ = await orphan
        assert status == 500
        body = pair_body(second, sampling_params={"max_new_tokens": 3, "ignore_eos": True})
        (_, _), (status, answer) = await asyncio.gather(
            post(http, second.prefill, body), post(http, first.decode, body)
        )
        assert (status, answer["meta_info"]["completion_tokens"]) == (200, 3)
        assert (first.prefill.exit_code, first.alive, first.decode.alive) == (
            -signal.SIGKILL,
            False,
            True,
        )
    (logged,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert logged.startswith(
        f"Embedded engine first/prefill (pid {first.prefill.pid}) was ended by SIGKILL. It "
        "ended "
        "too"
    )
    assert logged.endswith("then start this command again.")
    assert fleet.restarts_of("first") == {"first/prefill": 0, "first/decode": 0}


@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_a_killed_server_comes_back_at_its_address_and_serves(
    engines: SharedEngines, made: Made, lines: Lines, timers: SteppedTimers, mode: str
) -> None:
    async with (
        made() as fleet,
        aiohttp.ClientSession() as http,
        asyncio.timeout(LIMIT_S),
    ):
        pair = fleet["only"]
        before = {**pair.servers}
        address = pair.address
        assert (await through_both(http, pair))[0] == 200
        dead = before.pop(f"only/{mode}")
        await kill(dead)
        await dead.dead.wait()
        await timers.until_waiting(1.0)
        assert len(timers.delays_s) == 1
        timers.step(1.0)
        await lines.with_words(f"only/{mode} is ready again")
        assert pair.address == address
        assert pair.alive and not dead.alive
        assert pair.servers[f"only/{mode}"].pid != dead.pid
        assert pair.servers.items() >= before.items(), "the other server was left alone"
        status, answer = await through_both(http, pair)
        assert (status, answer["meta_info"]["completion_tokens"]) == (200, 3)
        assert fleet.restarts_of("only") == {f"only/{mode}": 1, **dict.fromkeys(before, 0)}
        assert timers.delays_s == [], "a server that serves is not killed for being late"
        back = pair.servers[f"only/{mode}"]
        await kill(back)
        await back.dead.wait()
        assert (pair.alive, back.exit_code) == (False, -signal.SIGKILL)


async def test_a_restart_that_fails_or_takes_too_long_is_tried_again(
    engines: SharedEngines, tmp_path: Path, lines: Lines, timers: SteppedTimers
) -> None:
    config = make_checkpoint(tmp_path) / "config.json"
    pairs = {"only": EmbeddedSettings(str(tmp_path))}
    with logged("shell_router", lines):
        async with EmbeddedFleet(pairs, on_progress=lines, sleep=timers.sleep) as fleet:
            await kill(fleet["only"].decode)
            config.rename(tmp_path / "away")
            await timers.until_waiting(1.0)
            timers.step(1.0)
            await lines.with_words("only/decode cannot start: ConfigError: ")
            await lines.with_words(
                "only/decode ended with code 1 before it was ready again. It is started "
                "again in "
                "2 s"
            )
            await timers.until_waiting(2.0)
            assert len(timers.delays_s) == 1
            (tmp_path / "away").rename(config)
            timers.step(2.0)
            await timers.until_waiting(START_LIMIT_S)
            timers.step(START_LIMIT_S)  # and it has only just begun to load
            await lines.with_words(
                "only/decode was not ready 180 s after its restart; it is killed"
            )
            await lines.with_words("only/decode was ended by SIGKILL before it was ready again")
            await timers.until_waiting(4.0)
            assert len(timers.delays_s) == 1
            timers.step(4.0)
            await lines.with_words("only/decode is ready again")
            assert fleet["only"].alive
            assert fleet.restarts_of("only") == {"only/prefill": 0, "only/decode": 3}


@pytest.mark.parametrize("under_way", [False, True])
async def test_a_stop_during_a_restart_leaves_nothing_running_and_nothing_pending(
    made: Made, timers: SteppedTimers, caplog: pytest.LogCaptureFixture, under_way: bool
) -> None:
    async with made() as fleet:
        prefill = pid_of(fleet["only"].prefill)
        await kill(fleet["only"].decode)
        await timers.until_waiting(1.0)
        before = descendants(os.getpid())
        if under_way:
            timers.step(1.0)  # the new process is asked for, and loads the model while all ends
            await timers.until_waiting(START_LIMIT_S)
        assert len(timers.delays_s) == 1
        caplog.clear()
        await fleet.stop()
        assert timers.delays_s == []
        assert survivors({prefill} | (descendants(os.getpid()) - before)) == set()
    assert not caplog.records


async def test_a_stop_that_is_cancelled_leaves_no_process(made: Made) -> None:
    fleet = made()
    await fleet.start()
    servers = {pid_of(fleet["only"].prefill), pid_of(fleet["only"].decode)}
    stopping = asyncio.create_task(fleet.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert survivors(servers, limit_s=0) == set()


async def test_stopping_a_fleet_ends_every_server_in_order(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = EmbeddedFleet({"only": EmbeddedSettings(folder)})
    await fleet.start()
    servers = (fleet["only"].prefill, fleet["only"].decode)
    await fleet.stop()
    for server in servers:
        await process_ended(pid_of(server))
    assert [server.exit_code for server in servers] == [0, 0]
    assert not caplog.records
    await fleet.stop()


async def test_a_server_that_is_killed_while_it_starts_is_dead(folder: str) -> None:
    server = EmbeddedServer("only/decode", ServerSettings(EmbeddedSettings(folder), "decode"))
    async with asyncio.timeout(LIMIT_S):
        while server.pid is None:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0)
        server.terminate()
        await server.dead.wait()
    assert server.exit_code == -signal.SIGKILL


async def test_servers_end_when_their_parent_is_killed(folder: str) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, folder, stdout=asyncio.subprocess.PIPE, cwd=Path.cwd()
    )
    assert parent.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        children = [int(pid) for pid in (await parent.stdout.readline()).split()]
        assert len(children) == 2
        parent.kill()
        await parent.wait()
        for pid in children:
            await process_ended(pid)


FORK_SERVER_KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from shell_router.standins.embedded.fleet import EmbeddedFleet
from shell_router.standins.embedded.settings import EmbeddedSettings

def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

async def main():
    told = asyncio.Queue()
    pairs = {"only": EmbeddedSettings(sys.argv[1])}
    async with EmbeddedFleet(pairs, on_progress=told.put_nowait) as fleet:
        pair = fleet["only"]
        before = {pair.prefill.pid, pair.decode.pid}
        os.kill(parent(pair.decode.pid), signal.SIGKILL)
        back = 0
        while back < 2:
            back += "ready again" in await told.get()
        after = {pair.prefill.pid, pair.decode.pid}
        print(pair.alive and not before & after, *before, flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_servers_come_back_when_the_fork_server_is_killed(folder: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FORK_SERVER_KILLED, folder),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path.cwd(),
    )
    async with asyncio.timeout(LIMIT_S):
        output, _ = await process.communicate()
    came_back, *before = output.decode().split()
    assert (process.returncode, came_back) == (0, "True")
    assert survivors(set(map(int, before))) == set()


async def test_a_folder_that_is_no_model_fails_the_start_by_name_and_leaves_nothing(
    engines: SharedEngines, tmp_path: Path
) -> None:
    steps: list[str] = []
    fleet = EmbeddedFleet(
        {"broken": EmbeddedSettings(str(tmp_path))},
        on_progress=steps.append,
    )
    with pytest.raises(EngineUnreachable, match=r"broken/\w+ cannot start: .*config\.json"):
        await fleet.start()
    assert steps == ["importing torch and transformers"]


async def test_a_start_may_fail_with_a_message_of_any_length(
    engines: SharedEngines, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "x" * 100_000}), encoding="utf-8"
    )
    pairs = {"broken": EmbeddedSettings(str(tmp_path))}
    with pytest.raises(EngineUnreachable, match=r"broken/\w+ cannot start: ValueError: .*xxx"):
        await EmbeddedFleet(pairs, start_limit_s=LIMIT_S).start()


async def test_a_start_that_takes_too_long_is_given_up(folder: str) -> None:
    with pytest.raises(EngineUnreachable, match=r"not ready within 0\.01 s"):
        await EmbeddedFleet({"only": EmbeddedSettings(folder)}, start_limit_s=0.01).start()


async def test_a_start_that_is_no_longer_wanted_leaves_no_process(folder: str) -> None:
    importing = asyncio.Event()
    fleet = EmbeddedFleet({"only": EmbeddedSettings(folder)}, on_progress=lambda _: importing.set())
    before = descendants(os.getpid())
    starting = asyncio.create_task(fleet.start())
    await importing.wait()
    while not (started := descendants(os.getpid()) - before):  # noqa: ASYNC110 # they are there within a few turns
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert survivors(started) == set()
