"""The embedder's process dies, hangs, fails or is given up; its model is a small script's
(`embedding_child`).
"""

import asyncio
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

import shell_router
from shell_router.engines.embedding import SupervisedEmbedder
from shell_router.errors import EngineError, EngineStalled, EngineUnreachable
from shell_router.launching.side_process import ANSWER, DO, FORGET, READY, REQUEST
from shell_router.launching.side_work import Inbox

SCRIPT = Path(__file__).with_name("embedding_child.py")
ENV = {**os.environ, "PYTHONPATH": str(Path(shell_router.__file__).parents[1])}


@pytest.fixture
async def make_embedder():
    async with AsyncExitStack() as opened:

        def make(*flags, **limits):
            embedder = SupervisedEmbedder([sys.executable, str(SCRIPT), *flags], ENV, **limits)
            opened.push_async_callback(embedder.aclose)
            return embedder

        yield make


async def stop(pid):
    """Freeze the process, so that calls certainly wait while the test goes on."""
    os.kill(pid, signal.SIGSTOP)


async def until_waiting(task):
    """Let the call write its request."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()


async def test_the_first_call_starts_the_process_and_later_ones_use_it(make_embedder):
    embedder = make_embedder()
    assert embedder.pid is None
    assert (await embedder.embed("abc")).shape == (3, 2)
    first = embedder.pid
    await embedder.embed("abcd")
    assert embedder.pid == first
    assert embedder.restarts == 0


async def test_waiting_calls_all_get_their_own_answer_and_no_batch_exceeds_the_limit(make_embedder):
    embedder = make_embedder()
    await embedder.start()
    await stop(embedder.pid)
    calls = [asyncio.create_task(embedder.embed("x" * size)) for size in range(1, 10)]
    await until_waiting(calls[-1])
    os.kill(embedder.pid, signal.SIGCONT)
    states = await asyncio.gather(*calls)
    assert [len(rows) for rows in states] == list(range(1, 10))
    assert max(rows[0, 0] for rows in states) <= 4


def test_calls_are_taken_oldest_first_together_and_without_the_texts_of_those_given_up():
    inbox = Inbox()
    for call in range(1, 8):
        inbox.put(call, b"text %d" % call)
    inbox.forget(2)
    inbox.forget(99)
    assert inbox.take(4) == {1: b"text 1", 2: None, 3: b"text 3", 4: b"text 4"}
    assert inbox.take(4) == {5: b"text 5", 6: b"text 6", 7: b"text 7"}


def test_calls_that_were_given_up_are_answered_so_that_the_process_does_not_look_hung():
    gate, opened = os.pipe()
    command = [sys.executable, str(SCRIPT), "--gate", str(gate)]
    with subprocess.Popen(
        command, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[gate]
    ) as child:
        child.stdin.write(
            REQUEST.pack(DO, 1, 1)
            + b"x"
            + REQUEST.pack(FORGET, 1, 0)
            + REQUEST.pack(DO, 2, 1)
            + b"y"
        )
        child.stdin.flush()
        while struct.unpack("i", fcntl.ioctl(child.stdin, termios.FIONREAD, bytes(4))) != (0,):
            pass
        os.write(opened, b"go")
        calls = []
        for _ in range(3):
            _, call, size = ANSWER.unpack(child.stdout.read(ANSWER.size))
            child.stdout.read(size)
            calls.append(call)
            if call == 2:
                break
        child.stdin.close()
    os.close(gate), os.close(opened)
    assert calls == [READY, 1, 2]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
async def test_a_process_killed_in_mid_call_fails_the_call_and_the_next_one_works(
    make_embedder, end
):
    embedder = make_embedder()
    await embedder.start()
    killed = embedder.pid
    await stop(killed)
    call = asyncio.create_task(embedder.embed("abc"))
    await until_waiting(call)
    os.kill(killed, end)
    if end is signal.SIGTERM:  # only SIGKILL ends a stopped process by itself
        os.kill(killed, signal.SIGCONT)
    with pytest.raises(EngineUnreachable, match=f"status -{end.value}"):
        await call
    assert (await embedder.embed("abc")).shape == (3, 2)
    assert embedder.pid != killed
    assert embedder.restarts == 1


async def test_a_process_that_ends_itself_fails_every_call_that_waits(make_embedder):
    embedder = make_embedder()
    await embedder.start()
    outcomes = await asyncio.gather(
        *(embedder.embed("die") for _ in range(3)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [EngineUnreachable] * 3
    assert "status 3" in str(outcomes[0])


async def test_a_failing_text_fails_its_call_only(make_embedder):
    embedder = make_embedder()
    with pytest.raises(EngineError, match="MemoryError: too long a text"):
        await embedder.embed("fail")
    assert (await embedder.embed("abc")).shape == (3, 2)
    assert embedder.restarts == 0


async def test_a_process_that_does_not_answer_is_killed_and_replaced(make_embedder):
    embedder = make_embedder(timeout_s=0.2)
    await embedder.start()
    hung = embedder.pid
    with pytest.raises(EngineStalled, match="4 characters"):
        await embedder.embed("hang")
    assert (await embedder.embed("abc")).shape == (3, 2)
    assert embedder.pid != hung
    assert embedder.restarts == 1


async def test_a_cancelled_call_leaves_the_process_and_other_calls_as_they_were(make_embedder):
    embedder = make_embedder()
    await embedder.start()
    pid = embedder.pid
    await stop(pid)
    given_up = asyncio.create_task(embedder.embed("x" * 9))
    kept = asyncio.create_task(embedder.embed("abc"))
    await until_waiting(kept)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    os.kill(pid, signal.SIGCONT)
    assert (await kept).shape == (3, 2)
    assert (await embedder.embed("abcd")).shape == (4, 2)
    assert embedder.pid == pid


async def test_the_process_learns_what_was_given_up_and_its_late_answer_is_dropped(make_embedder):
    embedder = make_embedder("--contrary")
    await embedder.start()
    given_up = asyncio.create_task(embedder.embed("abc"))
    await until_waiting(given_up)
    given_up.cancel()
    await asyncio.wait({given_up})
    assert len(await embedder.embed("count")) == 1


async def test_a_caller_that_gives_up_during_the_start_does_not_end_it_for_others(make_embedder):
    embedder = make_embedder()
    impatient, patient = (
        asyncio.create_task(embedder.start()),
        asyncio.create_task(embedder.embed("abc")),
    )
    await until_waiting(patient)
    impatient.cancel()
    assert (await patient).shape == (3, 2)
    assert embedder.restarts == 0


async def test_a_model_that_cannot_be_loaded_is_reported_with_its_reason_and_not_retried_at_once(
    make_embedder,
):
    embedder = make_embedder("--unloadable", retry_s=3600)
    for _ in range(2):
        with pytest.raises(EngineError, match="OSError: no weights"):
            await embedder.embed("abc")
    assert embedder.restarts == 0


async def test_a_failed_start_is_tried_again_when_its_time_has_come(make_embedder):
    embedder = make_embedder("--unloadable", retry_s=0)
    for _ in range(2):
        with pytest.raises(EngineError, match="no weights"):
            await embedder.start()
    assert embedder.restarts == 1


async def test_a_model_that_never_loads_ends_at_the_limit(make_embedder):
    with pytest.raises(EngineStalled, match="not ready within"):
        await make_embedder("--slow", start_timeout_s=0.3).start()


async def test_a_missing_interpreter_is_an_engine_error():
    with pytest.raises(EngineUnreachable, match="could not be started"):
        await SupervisedEmbedder(["/nowhere/python"], ENV).start()


async def test_closing_ends_the_process_and_calls_that_wait(make_embedder):
    embedder = make_embedder()
    await embedder.start()
    pid = embedder.pid
    call = asyncio.create_task(embedder.embed("hang"))
    await until_waiting(call)
    await embedder.aclose()
    with pytest.raises(EngineUnreachable):
        await call
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineError, match="closed"):
        await embedder.embed("abc")


async def test_closing_during_the_start_ends_both(make_embedder):
    embedder = make_embedder("--slow")
    call = asyncio.create_task(embedder.embed("abc"))
    await until_waiting(call)
    await embedder.aclose()
    with pytest.raises(EngineError, match="closed while it started"):
        await call


async def test_large_states_arrive_whole(make_embedder):
    states = await make_embedder().embed("x" * 500_000)
    assert states.shape == (500_000, 2)
    assert np.all(states == 1)


def test_the_process_ends_with_its_parents_pipe_even_while_it_loads():
    command = [sys.executable, str(SCRIPT), "--slow"]
    with subprocess.Popen(command, env=ENV, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            child.stdin.close()
            assert child.wait(timeout=30) == 0
        finally:
            child.kill()
