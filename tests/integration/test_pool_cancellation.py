"""A caller that goes away, at any moment, leaves nothing running on either server and no task
behind.
"""

import asyncio

import pytest

from benchmarks.scripted.server import Fault, ScriptedSettings
from shell_router.core.engine import Generation, Tokens
from shell_router.engines.address import PairAddress, PairLimits
from shell_router.engines.sglang import SglangPair
from tests.fakes.scripted_pair import Served, collect, generation, served, until


async def cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()


async def nothing_is_left(at: Served, rid: str) -> None:
    await at.pair.aclose()
    assert at.servers.prefill.aborted == at.servers.decode.aborted == [rid]
    await at.idle()
    await at.quiet()


async def test_before_the_prefill_has_ended() -> None:
    async with served(ScriptedSettings(prefill_s=60)) as at:
        task = asyncio.create_task(collect(at.pair, generation("under-way")))
        await until(lambda: at.servers.prefill.running == at.servers.decode.running == 1)
        await cancelled(task)
        await nothing_is_left(at, "under-way")


async def test_before_decodes_first_token() -> None:
    async with served() as at:
        at.break_leg("decode", Fault("stall"))
        task = asyncio.create_task(collect(at.pair, generation("under-way")))
        await until(lambda: at.servers.prefill.requests == 1 and at.servers.prefill.running == 0)
        await until(lambda: at.servers.decode.running == 1)
        await cancelled(task)
        await nothing_is_left(at, "under-way")


async def test_in_mid_stream() -> None:
    async with served() as at:
        at.break_leg("decode", Fault("stall", after_tokens=3))
        seen: list[int] = []

        async def consume() -> None:
            async for event in at.pair.generate(generation("under-way")):
                assert isinstance(event, Tokens)
                seen.extend(event.ids)

        task = asyncio.create_task(consume())
        await until(lambda: len(seen) == 3)
        await cancelled(task)
        await nothing_is_left(at, "under-way")


async def test_closing_the_generator_in_mid_stream() -> None:
    async with served() as at:
        at.break_leg("decode", Fault("stall", after_tokens=3))
        stream = at.pair.generate(generation("under-way"))
        await anext(stream)
        await stream.aclose()
        await nothing_is_left(at, "under-way")


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_after_any_number_of_loop_turns(turns: int) -> None:
    """Cancelled wherever it happens to be, an unfinished request is aborted on both servers."""
    async with served(ScriptedSettings(token_s=60, cut_bytes=16)) as at:
        task = asyncio.create_task(collect(at.pair, generation("under-way")))
        for _ in range(turns):
            await asyncio.sleep(0)
        await cancelled(task)
        await at.pair.aclose()
        await at.idle()
        await at.quiet()


async def test_a_prefill_only_request_is_aborted() -> None:
    async with served(ScriptedSettings(prefill_s=60)) as at:
        task = asyncio.create_task(at.pair.prefill(generation("under-way")))
        await until(lambda: at.servers.prefill.running == 1)
        await cancelled(task)
        await at.pair.aclose()
        assert at.servers.prefill.aborted == ["under-way"]
        assert at.servers.decode.requests == 0
        await at.idle()
        await at.quiet()


@pytest.mark.parametrize("stream", [b"true", b"false"])
async def test_leaving_a_relayed_answer_before_its_head(stream: bytes) -> None:
    async with served(ScriptedSettings(prefill_s=60), rid=lambda: "under-way") as at:
        body = b'{"input_ids": [1, 2], "stream": %s}' % stream

        async def relay() -> None:
            async with at.pair.forward("generate", body):
                pass

        task = asyncio.create_task(relay())
        await until(lambda: at.servers.prefill.running == at.servers.decode.running == 1)
        await cancelled(task)
        await nothing_is_left(at, "under-way")


async def test_leaving_a_relayed_stream_before_its_end() -> None:
    async with served(ScriptedSettings(token_s=0.001), rid=lambda: "under-way") as at:
        body = (
            b'{"input_ids": [1, 2], "stream": true, "sampling_params": {"max_new_tokens": 20000}}'
        )
        async with at.pair.forward("generate", body) as answer:
            await anext(aiter(answer.chunks))
        await nothing_is_left(at, "under-way")


async def test_connections_to_servers_that_never_answer_are_closed() -> None:
    """Such servers do not hear an abort either; the closed connection is all they can notice."""
    opened, closed = 0, 0

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened, closed
        opened += 1
        while await reader.read(65536):
            pass
        closed += 1
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    limits = PairLimits(abort_s=0.05)
    async with server:
        pair = SglangPair(PairAddress(url, url, "127.0.0.1", 1), limits=limits)
        task = asyncio.create_task(collect(pair, generation("under-way")))
        await until(lambda: opened == 2)
        await cancelled(task)
        await until(lambda: opened == closed == 4)  # the two legs and the two aborts
        await pair.aclose()


async def test_leaving_a_relayed_batch_aborts_every_request_of_it() -> None:
    async with served(ScriptedSettings(prefill_s=60), rid=lambda: "under-way") as at:
        body = b'{"text": ["a", "b"], "stream": true}'

        async def relay() -> None:
            async with at.pair.forward("generate", body):
                pass

        task = asyncio.create_task(relay())
        await until(lambda: at.servers.decode.running == 1)
        await cancelled(task)
        await at.pair.aclose()
        assert sorted(at.servers.decode.aborted) == ["under-way_0", "under-way_1"]
        await at.idle()


async def test_the_connections_of_finished_requests_are_kept_and_reused() -> None:
    async with served() as at:
        for index in range(20):
            await collect(at.pair, Generation(f"r{index}", [index + 1, 2], {"max_new_tokens": 2}))
        assert at.servers.prefill.connections == at.servers.decode.connections == 1


async def test_a_third_of_many_cancelled_leaves_nothing() -> None:
    async with served(ScriptedSettings(token_s=0.002)) as at:
        tasks = [
            asyncio.create_task(collect(at.pair, generation(f"r{index}"))) for index in range(60)
        ]
        await until(lambda: at.servers.decode.running == 60)
        for task in tasks[::3]:
            task.cancel()
        await asyncio.wait(tasks)
        assert sum(task.cancelled() for task in tasks) == 20
        await at.idle()
        await at.quiet()
