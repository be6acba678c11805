"""What breaks on a real pair: one clear error soon, the other server freed, the next request served."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from time import monotonic

import aiohttp
import pytest
import pytest_asyncio

from launch.sglang_cpu.pair import CpuPair
from shell_router.core.generation import Finish, Generation
from shell_router.engines.address import PairAddress, PairLimits
from shell_router.engines.pair import SglangPair
from shell_router.engines.scripted_server import Fault, ScriptedPair, ScriptedSettings
from shell_router.errors import EngineRejected, EngineStalled, EngineUnreachable
from tests.fakes.engine_loads import held, idle

pytestmark = pytest.mark.sglang

Measured = Callable[[str, float], None]
LIMITS = PairLimits(stall_s=20, answer_s=20)
FREED_LIMIT_S = 10.0
LONG, SHORT = 4000, 6


def address(own: CpuPair) -> PairAddress:
    return PairAddress(own.prefill.url, own.decode.url, own.bootstrap_host, own.bootstrap_port)


@pytest_asyncio.fixture
async def client(own_sglang: CpuPair) -> AsyncIterator[SglangPair]:
    pair = SglangPair(address(own_sglang), limits=LIMITS)
    yield pair
    await pair.aclose()


def request(rid: str, new_tokens: int, prompt_tokens: int = 60) -> Generation:
    ids = [20 + (at * 7 + len(rid)) % 200 for at in range(prompt_tokens)]
    return Generation(rid, ids, {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True})


async def finish_of(pair: SglangPair, asked: Generation) -> Finish:
    events = [event async for event in pair.generate(asked)]
    assert isinstance(events[-1], Finish)
    return events[-1]


async def served_again(pair: SglangPair) -> None:
    async with asyncio.timeout(60):
        assert (await finish_of(pair, request("next", SHORT))).completion_tokens == SHORT


async def both_idle(session: aiohttp.ClientSession, own: CpuPair) -> float:
    return await idle(session, own.prefill.url, own.decode.url, limit_s=FREED_LIMIT_S)


async def test_a_prefill_that_answers_400_ends_its_decode(
    own_sglang: CpuPair, client: SglangPair, session: aiohttp.ClientSession, measured: Measured
) -> None:
    async with ScriptedPair(ScriptedSettings(fault=Fault("status", status=400))) as scripted:
        at = PairAddress(
            scripted.prefill.url, own_sglang.decode.url, own_sglang.bootstrap_host, own_sglang.bootstrap_port
        )
        broken = SglangPair(at, limits=LIMITS)
        began_s = monotonic()
        with pytest.raises(EngineRejected, match="prefill engine"):
            await finish_of(broken, request("refused", SHORT))
        measured("prefill answers 400: time to error", monotonic() - began_s)
        await broken.aclose()
    measured(
        "prefill answers 400: decode free after",
        await idle(session, own_sglang.decode.url, limit_s=FREED_LIMIT_S) - began_s,
    )
    await served_again(client)


async def test_a_caller_that_leaves_during_prefill_frees_both(
    own_sglang: CpuPair, client: SglangPair, session: aiohttp.ClientSession, measured: Measured
) -> None:
    task = asyncio.create_task(finish_of(client, request("leaves", SHORT, prompt_tokens=8000)))
    await until_running(session, own_sglang)
    left_s = monotonic()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    measured("caller leaves before the first token: both free after", await both_idle(session, own_sglang) - left_s)
    await served_again(client)


async def until_running(session: aiohttp.ClientSession, own: CpuPair) -> None:
    async with asyncio.timeout(FREED_LIMIT_S):
        while not await held(session, own.prefill.url, own.decode.url):
            pass


async def test_a_caller_that_leaves_during_decode_frees_both(
    own_sglang: CpuPair, client: SglangPair, session: aiohttp.ClientSession, measured: Measured
) -> None:
    async with aclosing(client.generate(request("leaves-late", LONG))) as stream:
        await anext(stream)
        left_s = monotonic()
    measured("caller leaves during decode: both free after", await both_idle(session, own_sglang) - left_s)
    await served_again(client)


async def test_a_stalled_decode_is_noticed_and_freed_when_it_goes_on(
    own_sglang: CpuPair, session: aiohttp.ClientSession, measured: Measured
) -> None:
    impatient = SglangPair(address(own_sglang), limits=PairLimits(stall_s=2, abort_s=20))
    async with aclosing(impatient.generate(request("stalled", LONG))) as stream:
        await anext(stream)
        own_sglang.decode.signal(signal.SIGSTOP)
        try:
            began_s = monotonic()
            with pytest.raises(EngineStalled, match="decode engine"):
                async for _ in stream:
                    pass
            measured("decode stalls (limit 2 s): time to error", monotonic() - began_s)
        finally:
            own_sglang.decode.signal(signal.SIGCONT)
            resumed_s = monotonic()
    await impatient.aclose()
    patient = SglangPair(address(own_sglang), limits=LIMITS)
    measured("decode stalls: both free after going on", await both_idle(session, own_sglang) - resumed_s)
    await served_again(patient)
    await patient.aclose()


async def test_a_decode_killed_in_mid_stream_is_one_error_and_its_successor_serves(
    own_sglang: CpuPair, client: SglangPair, session: aiohttp.ClientSession, measured: Measured
) -> None:
    async with aclosing(client.generate(request("orphan", LONG))) as stream:
        await anext(stream)
        own_sglang.decode.kill()
        began_s = monotonic()
        with pytest.raises(EngineUnreachable, match="decode engine"):
            async for _ in stream:
                pass
        measured("decode killed mid-stream: time to error", monotonic() - began_s)
    prefill_idle_s = await idle(session, own_sglang.prefill.url, limit_s=FREED_LIMIT_S)
    measured("decode killed mid-stream: prefill free after", prefill_idle_s - began_s)
    await client.aclose()
    own_sglang.start()
    await served_again(client)


async def test_a_prefill_killed_while_it_prefills_is_one_error_and_its_successor_serves(
    own_sglang: CpuPair, client: SglangPair, session: aiohttp.ClientSession, measured: Measured
) -> None:
    task = asyncio.create_task(finish_of(client, request("halfway", SHORT, prompt_tokens=8000)))
    await until_running(session, own_sglang)
    own_sglang.prefill.kill()
    began_s = monotonic()
    with pytest.raises((EngineUnreachable, EngineRejected)):
        await task
    measured("prefill killed: time to error", monotonic() - began_s)
    decode_idle_s = await idle(session, own_sglang.decode.url, limit_s=FREED_LIMIT_S)
    measured("prefill killed: decode free after", decode_idle_s - began_s)
    await client.aclose()
    own_sglang.start()
    await served_again(client)
