"""A request that fails before its first token is sent again unnoticed; later failures are
reported."""

from dataclasses import replace

import orjson
import pytest

from benchmarks.scripted.server import Fault, ScriptedSettings
from shell_router.core.engine import Tokens
from shell_router.errors import EngineError, EngineRejected, EngineUnreachable
from shell_router.routing.failures import BreakerSettings
from tests.fakes.scripted_pair import ScriptedPool, collect, generation, scripted_pool

PASSING = [
    Fault("refuse"),
    Fault("status", status=503),
    Fault("close"),
    Fault("error_event"),
    Fault("abort"),
]
BODY = b'{"input_ids": [1, 2, 3], "stream": %s}'


def once(fault: Fault, at: ScriptedPool, leg: str) -> None:
    fault = Fault(fault.kind, fault.after_tokens, fault.status, fault.message, times=1)
    at.strike(fault, (at.prefills if leg == "prefill" else at.decodes)[0])


async def relayed(at: ScriptedPool, body: bytes) -> bytes:
    async with at.pool.forward("generate", body) as answer:
        assert answer.status == 200
        return b"".join([chunk async for chunk in answer.chunks])


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.kind)
async def test_a_failure_that_passes_is_not_noticed(
    leg: str, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_pool(settings=ScriptedSettings(log_bodies=8)) as at:
        expected = await collect(at.pool, generation("first"))
        once(fault, at, leg)
        tokens, finish = await collect(at.pool, generation("second"))
        assert tokens == expected[0]
        assert finish.completion_tokens == 8
        assert at.pool.fleet.retried == 1
        assert "attempt 1 failed" in caplog.text and f"{leg} engine" in caplog.text
        await at.idle()


async def test_a_retry_takes_a_new_room_and_an_id_that_no_abort_of_the_first_reaches() -> None:
    async with scripted_pool(settings=ScriptedSettings(log_bodies=8)) as at:
        once(Fault("status", status=500), at, "prefill")
        await collect(at.pool, generation("mine"))
        first, second = map(orjson.loads, at.decodes[0].bodies)
        assert first["bootstrap_room"] != second["bootstrap_room"]
        assert (
            first["rid"] == "mine"
            and not second["rid"].startswith("mine")
            and "mine" in second["rid"]
        )
        await at.pool.aclose()
        assert at.decodes[0].aborted == at.prefills[0].aborted == ["mine"]


async def test_after_a_token_nothing_is_sent_again() -> None:
    async with scripted_pool() as at:
        at.strike(Fault("close", after_tokens=2), at.decodes[0])
        seen = list[int]()
        with pytest.raises(EngineUnreachable):
            async for event in at.pool.generate(generation()):
                assert isinstance(event, Tokens)
                seen += event.ids
        assert len(seen) == 2
        assert (at.pool.fleet.retried, at.decodes[0].requests) == (0, 1)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_lasting_failure_is_reported_after_the_last_attempt(leg: str) -> None:
    async with scripted_pool() as at:
        broken = (at.prefills if leg == "prefill" else at.decodes)[0]
        at.strike(Fault("status", status=500), broken)
        with pytest.raises(EngineRejected, match=f"{leg} engine .* 500"):
            await collect(at.pool, generation())
        assert (at.pool.fleet.retried, broken.requests) == (2, 3)
        await at.idle()


async def test_attempts_end_with_the_failure_that_opened_the_breaker() -> None:
    async with scripted_pool(breaker=BreakerSettings(failures=2)) as at:
        at.strike(Fault("refuse"), at.decodes[0])
        with pytest.raises(EngineUnreachable, match="decode engine cannot be reached"):
            await collect(at.pool, generation())
        assert (at.pool.fleet.retried, at.decodes[0].requests) == (1, 2)


@pytest.mark.parametrize("status", [400, 404, 501])
async def test_a_refusal_is_reported_at_once(status: int) -> None:
    async with scripted_pool() as at:
        at.strike(Fault("status", status=status), at.prefills[0])
        with pytest.raises(EngineError):
            await collect(at.pool, generation())
        assert (at.pool.fleet.retried, at.prefills[0].requests) == (0, 1)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize(
    "fault", [Fault("refuse"), Fault("status", status=503), Fault("close")], ids=lambda f: f.kind
)
async def test_a_relayed_request_is_sent_again_under_a_fresh_id(
    leg: str, stream: bytes, fault: Fault
) -> None:
    async with scripted_pool(settings=ScriptedSettings(log_bodies=8)) as at:
        once(fault, at, leg)
        assert b"output_ids" in await relayed(at, BODY % stream)
        first, second = map(orjson.loads, at.decodes[0].bodies)
        assert first["rid"] != second["rid"] and first["bootstrap_room"] != second["bootstrap_room"]
        assert at.pool.fleet.retried == 1
        await at.idle()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"top_logprobs_num": 1, "return_logprob": True}, "top_logprobs_num"),
        ({"sampling_params": {"regex": "a", "temperature": 0}}, "regex"),
        ({"sampling_params": {"of_a_later_sglang": 1, "ebnf": "x"}}, "ebnf, of_a_later_sglang"),
    ],
)
async def test_a_server_that_dies_of_a_request_is_the_only_one_that_gets_it(
    leg: str, body: dict[str, object], names: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_pool(prefills=2, decodes=2) as at:
        for server in at.prefills if leg == "prefill" else at.decodes:
            at.strike(Fault("close"), server)
        with pytest.raises(EngineUnreachable):
            await relayed(at, orjson.dumps({"input_ids": [1], "stream": True, **body}))
        assert at.pool.fleet.retried == 0
        assert f"may die of its {names}: The {leg} engine" in caplog.text
        await at.idle()


async def test_a_generation_with_a_grammar_that_ended_a_server_is_not_sent_again() -> None:
    async with scripted_pool() as at:
        at.strike(Fault("close"), at.decodes[0])
        asked = replace(generation(), sampling={"max_new_tokens": 8, "json_schema": "{}"})
        with pytest.raises(EngineUnreachable):
            await collect(at.pool, asked)
        assert (at.pool.fleet.retried, at.decodes[0].requests) == (0, 1)


async def test_a_request_that_a_living_server_refuses_is_sent_again_with_any_field() -> None:
    async with scripted_pool() as at:
        once(Fault("status", status=503), at, "decode")
        body = {"input_ids": [1], "sampling_params": {"regex": "a"}}
        assert b"output_ids" in await relayed(at, orjson.dumps(body))
        assert at.pool.fleet.retried == 1
