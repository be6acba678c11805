"""Every leg failing in every way: one clear error, the other leg freed, the next request served."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scripted.server import Fault, ScriptedSettings
from shell_router.app.pairs import connect_pairs
from shell_router.config import Config, Limits, ModelSettings
from shell_router.core.engine import Tokens
from shell_router.engines.address import PairAddress, PairLimits
from shell_router.engines.sglang import SglangPair
from shell_router.errors import EngineError, EngineRejected, EngineStalled, EngineUnreachable
from tests.fakes.scripted_pair import LIMITS, apart, collect, generation, served, until

IMPATIENT = replace(LIMITS, stall_s=0.3, answer_s=0.3)


def limits_for(fault: Fault) -> PairLimits:
    """Little patience where it is what ends the request, and else none that a busy machine could
    use up.
    """
    return IMPATIENT if fault.kind == "stall" else LIMITS


AT_THE_START = [
    (Fault("refuse"), EngineUnreachable),
    (Fault("status", status=500), EngineRejected),
    (Fault("status", status=400), EngineRejected),
    (Fault("status", status=503), EngineRejected),
    (Fault("close"), EngineUnreachable),
    (Fault("stall"), EngineStalled),
    (Fault("error_event"), EngineRejected),
    (Fault("abort"), EngineRejected),
]
MID_STREAM = [
    (Fault("close", after_tokens=2), EngineUnreachable),
    (Fault("stall", after_tokens=2), EngineStalled),
    (Fault("garbage", after_tokens=2), EngineRejected),
    (Fault("error_event", after_tokens=2), EngineRejected),
    (Fault("abort", after_tokens=2), EngineRejected),
]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("fault", "error"), AT_THE_START, ids=lambda found: getattr(found, "kind", "")
)
async def test_a_leg_that_fails_at_the_start(
    leg: str, fault: Fault, error: type[EngineError]
) -> None:
    async with served(limits=limits_for(fault)) as at:
        at.break_leg(leg, fault)
        with pytest.raises(error) as failed:
            await collect(at.pair, generation("77777777777777777777777777777777"))
        if (
            fault.kind != "stall"
        ):  # a stalled prefill stalls its decode as well, and either may be noticed first
            assert f"{leg} engine" in str(failed.value)
        await at.pair.aclose()
        assert "77777777777777777777777777777777" in at.servers.prefill.aborted
        assert "77777777777777777777777777777777" in at.servers.decode.aborted
        await at.idle()
        at.break_leg(leg, None)
        await collect(at.pair, generation("66666666666666666666666666666666"))
        await at.quiet()


@pytest.mark.parametrize(
    ("fault", "error"), MID_STREAM, ids=lambda found: getattr(found, "kind", "")
)
async def test_decode_that_fails_in_mid_stream(fault: Fault, error: type[EngineError]) -> None:
    async with served(limits=limits_for(fault)) as at:
        at.break_leg("decode", fault)
        seen: list[Tokens] = []
        with pytest.raises(error, match="decode engine"):
            async for event in at.pair.generate(generation("77777777777777777777777777777777")):
                assert isinstance(event, Tokens)
                seen.append(event)
        assert len(seen) <= 2
        await at.pair.aclose()
        assert (
            at.servers.decode.aborted
            == at.servers.prefill.aborted
            == ["77777777777777777777777777777777"]
        )
        await at.idle()
        at.break_leg("decode", None)
        await collect(at.pair, generation("66666666666666666666666666666666"))
        await at.quiet()


async def test_the_engines_status_and_words_reach_the_caller() -> None:
    async with served() as at:
        at.break_leg("decode", Fault("status", status=507, message="the KV pool is full"))
        with pytest.raises(EngineRejected, match="the KV pool is full") as failed:
            await collect(at.pair, generation())
        assert failed.value.status == 507


async def test_a_prefill_that_fails_while_decode_waits_ends_it_at_once() -> None:
    """Decode is waiting for its room without a limit of its own; only the abort ends it."""
    async with served() as at:
        at.break_leg("prefill", Fault("status", status=500))
        with pytest.raises(EngineRejected, match="prefill engine"):
            await collect(at.pair, generation())
        await at.idle()


async def test_a_late_prefill_failure_ends_decode_even_without_a_reader() -> None:
    failing = ScriptedSettings(prefill_s=0.01, fault=Fault("error_event", message="KV lost"))
    async with apart(failing, ScriptedSettings(token_s=60)) as at:
        stream = at.pair.generate(generation("77777777777777777777777777777777"))
        await anext(stream)
        await until(lambda: at.servers.decode.aborted == ["77777777777777777777777777777777"])
        await at.idle()
        with pytest.raises(EngineRejected, match=r"prefill engine .* KV lost"):
            await anext(stream)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_server_that_is_not_there(leg: str) -> None:
    async with served() as at:
        await (at.servers.prefill if leg == "prefill" else at.servers.decode).stop()
        with pytest.raises(EngineUnreachable, match=f"{leg} engine"):
            await collect(at.pair, generation())
        with pytest.raises(EngineUnreachable, match=f"{leg} engine"):
            await at.pair.fleet.ready()
        await at.idle()
        await at.quiet()


async def test_a_faulty_prefill_only_request_names_the_prefill_server() -> None:
    async with served(limits=IMPATIENT) as at:
        for fault, error in AT_THE_START:
            at.break_leg("prefill", fault)
            with pytest.raises(error, match="prefill engine"):
                await at.pair.prefill(generation("77777777777777777777777777777777"))
            await at.pair.aclose()
        at.break_leg("prefill", None)
        await at.idle()
        await at.pair.prefill(generation("66666666666666666666666666666666"))
        await at.quiet()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "error"), AT_THE_START, ids=lambda found: getattr(found, "kind", "")
)
async def test_a_relayed_request_whose_leg_fails(
    leg: str, stream: bool, fault: Fault, error: type[EngineError]
) -> None:
    """Decode's own errors are relayed as they are; everything else raises."""
    async with served(limits=limits_for(fault)) as at:
        at.break_leg(leg, fault)
        body = b'{"input_ids": [1, 2, 3], "stream": %s}' % (b"true" if stream else b"false")
        relayed = b""
        with suppress(EngineError):
            async with at.pair.forward("generate", body) as answer:
                relayed += b"".join([chunk async for chunk in answer.chunks])
            assert b"scripted fault" in relayed
            assert leg == "decode"
        await at.pair.aclose()
        await at.idle()
        at.break_leg(leg, None)
        async with at.pair.forward("generate", b'{"input_ids": [1, 2, 3]}') as answer:
            assert answer.status == 200
            assert b"".join([chunk async for chunk in answer.chunks])
        await at.quiet()


async def test_an_answer_in_one_piece_is_waited_for_as_long_as_a_request_may_take() -> None:
    async with served() as at:
        at.break_leg("decode", Fault("stall"))
        config = Config({"small": ModelSettings(Path())}, limits=Limits(request_timeout_s=0.3))
        pair = connect_pairs("small", at.pair.fleet.addresses, config)
        with pytest.raises(EngineStalled, match="decode engine"):
            async with asyncio.timeout(10), pair.forward("generate", b'{"input_ids": [1, 2, 3]}'):
                pass
        await pair.aclose()


async def test_a_stream_that_stalls_names_the_leg() -> None:
    async with served(ScriptedSettings(token_s=60), limits=IMPATIENT) as at:
        with pytest.raises(EngineStalled, match="decode engine"):
            await collect(at.pair, generation())
        await at.idle()


async def test_aborts_to_a_dead_server_do_not_hold_up_closing() -> None:
    async with served(limits=IMPATIENT) as at:
        at.break_leg("decode", Fault("stall", after_tokens=1))
        stream = at.pair.generate(generation())
        await anext(stream)
        await at.servers.decode.stop()
        await stream.aclose()
        await at.quiet()


async def test_a_url_that_is_no_engine_is_named() -> None:
    """A decode server in the prefill's place has no route `prefill_only`."""
    async with served() as at:
        address = PairAddress(at.servers.decode.url, at.servers.decode.url, "127.0.0.1", 1)
        with pytest.raises(EngineRejected) as failed:
            await SglangPair(address).prefill(generation())
        assert failed.value.status == 404


async def test_many_failures_at_once_leave_no_task_and_no_connection() -> None:
    async with served(ScriptedSettings(token_s=0.001)) as at:
        at.break_leg("decode", Fault("close", after_tokens=3, times=16))
        results = await asyncio.gather(
            *(collect(at.pair, generation(f"r{index}")) for index in range(32)),
            return_exceptions=True,
        )
        assert sum(isinstance(result, EngineUnreachable) for result in results) == 16
        await at.idle()
        await at.quiet()
