"""A worker process dies, hangs, fails or is given up, and calls learn of it."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shell_router.errors import EngineError, EngineStalled, EngineUnreachable
from shell_router.processes.worker import WorkerLimits, WorkerProcess
from tests.fakes.command import descendants, survivors

ENTRY = "tests.fakes.obedient_work:load"
MAX_BATCH = 4
LIMIT_S = 60.0

Make = Callable[..., WorkerProcess]


@pytest.fixture
async def make_worker() -> AsyncIterator[Make]:
    async with AsyncExitStack() as opened:

        def make(limits: WorkerLimits | None = None, **arguments: bool) -> WorkerProcess:
            worker = WorkerProcess(
                "obedient",
                ENTRY,
                arguments,
                max_batch=MAX_BATCH,
                limits=limits or WorkerLimits(),
            )
            opened.push_async_callback(worker.aclose)
            return worker

        yield make


def stop(worker: WorkerProcess) -> int:
    """Freeze the process, so that calls certainly wait while the test goes on."""
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    return worker.pid


async def rows(worker: WorkerProcess, text: str) -> int:
    _, states = await worker.ask(text)
    return len(states)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def until_waiting(task: "asyncio.Task[Any]") -> None:
    """Let the call be sent."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()


async def test_the_first_call_starts_the_process_and_later_ones_use_it(make_worker: Make) -> None:
    worker = make_worker()
    assert worker.pid is None
    assert await rows(worker, "abc") == 3
    first = worker.pid
    assert await rows(worker, "abcd") == 4
    assert worker.pid == first
    assert worker.restarts == 0


async def test_waiting_calls_all_get_their_own_answer_and_no_batch_exceeds_the_limit(
    make_worker: Make,
) -> None:
    worker = make_worker()
    await worker.start()
    pid = stop(worker)
    calls = [asyncio.create_task(worker.ask("x" * size)) for size in range(1, 10)]
    await until_waiting(calls[-1])
    os.kill(pid, signal.SIGCONT)
    answers = await asyncio.gather(*calls)
    assert [len(states) for _, states in answers] == list(range(1, 10))
    assert max(together for together, _ in answers) == MAX_BATCH


async def test_calls_that_are_given_up_before_they_are_sent_are_not_sent(make_worker: Make) -> None:
    worker = make_worker()
    await worker.start()
    pid = stop(worker)
    first = asyncio.create_task(worker.ask("first"))
    await until_waiting(first)
    given_up = [asyncio.create_task(worker.ask("die")) for _ in range(3)]
    kept = asyncio.create_task(worker.ask("abc"))
    await until_waiting(kept)
    for call in given_up:
        call.cancel()
    os.kill(pid, signal.SIGCONT)
    together, states = await kept
    assert (together, len(states), worker.restarts) == (1, 3, 0)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_a_process_killed_in_mid_call_fails_the_call_and_the_next_one_works(
    make_worker: Make, end: signal.Signals
) -> None:
    worker = make_worker()
    await worker.start()
    killed = stop(worker)
    call = asyncio.create_task(worker.ask("abc"))
    await until_waiting(call)
    os.kill(killed, end)
    if end is signal.SIGTERM:  # only SIGKILL ends a stopped process by itself
        os.kill(killed, signal.SIGCONT)
    with pytest.raises(EngineUnreachable, match=f"status -{end.value}"):
        await call
    assert await rows(worker, "abc") == 3
    assert worker.pid != killed
    assert worker.restarts == 1


async def test_a_process_killed_while_idle_is_noticed_without_a_call(make_worker: Make) -> None:
    worker = make_worker()
    await worker.start()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        while worker.pid is not None:  # noqa: ASYNC110 - this is under test
            await asyncio.sleep(0)
    assert await rows(worker, "abc") == 3


async def test_a_process_that_ends_itself_fails_every_call_that_waits(make_worker: Make) -> None:
    worker = make_worker()
    await worker.start()
    outcomes = await asyncio.gather(
        *(worker.ask("die") for _ in range(MAX_BATCH + 1)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [EngineUnreachable] * (MAX_BATCH + 1)
    assert "status 3" in str(outcomes[0])


async def test_a_failing_text_fails_its_call_only(make_worker: Make) -> None:
    worker = make_worker()
    with pytest.raises(EngineError, match="MemoryError: too long a text"):
        await worker.ask("fail")
    assert await rows(worker, "abc") == 3
    assert worker.restarts == 0


async def test_a_body_that_cannot_be_pickled_fails_its_call_only(make_worker: Make) -> None:
    worker = make_worker()
    with pytest.raises(EngineError, match="pickle"):
        await worker.ask(lambda: None)
    assert await rows(worker, "abc") == 3
    assert worker.restarts == 0


async def test_a_process_that_does_not_answer_is_killed_and_replaced(make_worker: Make) -> None:
    worker = make_worker(WorkerLimits(answer_s=0.2))
    await worker.start()
    hung = worker.pid
    with pytest.raises(EngineStalled, match=r"within 0\.2 s"):
        await worker.ask("hang")
    async with asyncio.timeout(LIMIT_S):
        while worker.pid == hung:  # noqa: ASYNC110 - this is under test
            await asyncio.sleep(0)
    await worker.start()
    assert worker.pid != hung
    assert worker.restarts == 1


async def test_a_process_may_be_silent_for_longer_than_one_answer_may_take(
    make_worker: Make,
) -> None:
    worker = make_worker(WorkerLimits(answer_s=0.05, hang_s=3600.0))
    await worker.start()
    pid = stop(worker)
    with pytest.raises(EngineStalled):
        await worker.ask("abc")
    os.kill(pid, signal.SIGCONT)
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                assert await rows(worker, "abcd") == 4
                break
            except EngineStalled:
                continue
    assert worker.pid == pid


async def test_a_cancelled_call_leaves_the_process_and_other_calls_as_they_were(
    make_worker: Make,
) -> None:
    worker = make_worker()
    await worker.start()
    pid = stop(worker)
    given_up = asyncio.create_task(worker.ask("x" * 9))
    kept = asyncio.create_task(worker.ask("abc"))
    await until_waiting(kept)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    os.kill(pid, signal.SIGCONT)
    _, states = await kept
    assert len(states) == 3
    assert await rows(worker, "abcd") == 4
    assert worker.pid == pid


async def test_a_caller_that_gives_up_during_the_start_does_not_end_it_for_others(
    make_worker: Make,
) -> None:
    worker = make_worker()
    impatient = asyncio.create_task(worker.start())
    patient = asyncio.create_task(rows(worker, "abc"))
    await until_waiting(patient)
    impatient.cancel()
    assert await patient == 3
    assert worker.restarts == 0


async def test_work_that_cannot_be_loaded_is_reported_with_its_reason_and_not_retried_at_once(
    make_worker: Make,
) -> None:
    worker = make_worker(WorkerLimits(retry_s=3600), unloadable=True)
    for _ in range(2):
        with pytest.raises(EngineError, match="OSError: no weights"):
            await worker.ask("abc")
    assert worker.restarts == 0


async def test_a_failed_start_is_tried_again_when_its_time_has_come(make_worker: Make) -> None:
    worker = make_worker(WorkerLimits(retry_s=0), unloadable=True)
    for _ in range(2):
        with pytest.raises(EngineError, match="no weights"):
            await worker.start()
    assert worker.restarts == 1


async def test_a_process_that_ends_before_it_is_ready_is_an_engine_error(make_worker: Make) -> None:
    with pytest.raises(EngineUnreachable, match=r"ended \(status 4\) before it was ready"):
        await make_worker(dies=True).start()


async def test_work_that_never_loads_ends_at_the_limit(make_worker: Make) -> None:
    with pytest.raises(EngineStalled, match="not ready within"):
        await make_worker(WorkerLimits(start_s=0.3), slow=True).start()


async def test_closing_ends_the_process_and_calls_that_wait(make_worker: Make) -> None:
    worker = make_worker()
    await worker.start()
    pid = worker.pid
    assert pid is not None
    call = asyncio.create_task(worker.ask("hang"))
    await until_waiting(call)
    await worker.aclose()
    with pytest.raises(EngineUnreachable):
        await call
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineError, match="closed"):
        await worker.ask("abc")


async def test_closing_during_the_start_ends_both(make_worker: Make) -> None:
    worker = make_worker(slow=True)
    call = asyncio.create_task(worker.ask("abc"))
    await until_waiting(call)
    await worker.aclose()
    with pytest.raises(EngineError, match="closed while it started"):
        await call


async def test_large_answers_arrive_whole(make_worker: Make) -> None:
    _, states = await make_worker().ask("x" * 500_000)
    assert states.shape == (500_000, 2)
    assert np.all(states == 1)


async def test_processes_that_ended_leave_no_open_files(make_worker: Make) -> None:
    worker = make_worker()
    await worker.start()
    before = open_files()
    for _ in range(3):
        with pytest.raises(EngineUnreachable):
            await worker.ask("die")
        await worker.start()
    await worker.aclose()
    assert open_files() < before


PARENT = f"""
import asyncio, sys
from shell_router.processes.worker import WorkerProcess

async def main():
    ready = WorkerProcess("ready", "{ENTRY}", {{}})
    await ready.start()
    slow = WorkerProcess("slow", "{ENTRY}", {{"slow": True}})
    loading = asyncio.create_task(slow.start())
    print("started", flush=True)
    await loading

asyncio.run(main())
"""


async def test_processes_end_when_their_parent_is_killed_even_while_they_load() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE, cwd=Path.cwd()
    )
    assert parent.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        await parent.stdout.readline()
        while len(children := descendants(parent.pid)) < 4:  # noqa: ASYNC110 - both workers, their fork server and its tracker
            await asyncio.sleep(0.01)
        parent.kill()
        await parent.wait()
    assert survivors(children) == set()
