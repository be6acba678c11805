"""The pair client against healthy scripted servers."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import aiohttp
import orjson
import pytest

from benchmarks.scripted.server import Fault, ScriptedSettings
from shell_router.core.engine import TIERS, Finish, Generation, Hints, Tokens
from shell_router.engines.address import PairLimits
from shell_router.engines.sglang import SglangPair
from shell_router.errors import EngineRejected, InvalidRequest, PromptTooLong
from shell_router.routing.placement import EngineReport
from tests.fakes.scripted_pair import LIMITS, apart, collect, generation, joined, served, until


async def test_tokens_then_one_finish() -> None:
    async with served() as at:
        tokens, finish = await collect(at.pair, generation(new_tokens=5))
        assert len(joined(tokens).ids) == 5
        assert finish == Finish("length", prompt_tokens=40, completion_tokens=5, cached_tokens=0)


@pytest.mark.parametrize(
    "settings",
    [
        ScriptedSettings(incremental=False),
        ScriptedSettings(cut_bytes=1),
        ScriptedSettings(cut_bytes=5, crlf=True),
        ScriptedSettings(token_s=0.0005),
    ],
)
async def test_every_way_of_writing_a_stream_reads_the_same(settings: ScriptedSettings) -> None:
    async with served() as plain, served(settings) as other:
        request = generation(logprobs=True)
        one, finish = await collect(plain.pair, request)
        another, other_finish = await collect(other.pair, request)
        assert (joined(one), finish) == (joined(another), other_finish)


async def test_both_servers_get_the_same_fields_but_only_decode_streams() -> None:
    async with served(ScriptedSettings(log_bodies=4)) as at:
        await collect(at.pair, Generation("r", [1, 2, 3], {"max_new_tokens": 2, "top_k": 7}))
        prefill, decode = (
            orjson.loads(server.bodies[0]) for server in (at.servers.prefill, at.servers.decode)
        )
        assert (prefill.pop("stream"), decode.pop("stream")) == (False, True)
        assert prefill == decode
        assert prefill["sampling_params"] == {"max_new_tokens": 2, "top_k": 7}
        assert (prefill["rid"], prefill["input_ids"]) == ("r", [1, 2, 3])


async def test_every_attempt_has_a_room_of_its_own() -> None:
    async with served(ScriptedSettings(log_bodies=8)) as at:
        for attempt in range(3):
            await collect(at.pair, generation(f"r{attempt}"))
        rooms = {orjson.loads(body)["bootstrap_room"] for body in at.servers.decode.bodies}
        assert len(rooms) == 3
        assert all(0 <= room < 2**63 for room in rooms)


async def test_cached_tokens_are_the_prefills() -> None:
    async with served() as at:
        await collect(at.pair, generation("first", prompt_tokens=100))
        _, finish = await collect(at.pair, generation("second", prompt_tokens=150))
        assert finish.cached_tokens == 100


async def test_the_stop_token_is_counted_but_not_yielded() -> None:
    async with served() as at:
        tokens, _ = await collect(at.pair, generation())
        ids = [token for found in tokens for token in found.ids]
        stopped = Generation(
            "s", list(range(1, 41)), {"max_new_tokens": 8, "stop_token_ids": [ids[4]]}
        )
        tokens, finish = await collect(at.pair, stopped)
        assert [token for found in tokens for token in found.ids] == ids[:4]
        assert (finish.reason, finish.completion_tokens) == ("stop", 5)


async def test_the_stream_flows_while_the_prefill_leg_is_silent() -> None:
    silent = apart(ScriptedSettings(prefill_s=30), ScriptedSettings())
    async with silent as at, aclosing(at.pair.generate(generation())) as stream:
        assert isinstance(await anext(stream), Tokens)


async def test_where_the_legs_disagree_the_prefills_cached_tokens_count() -> None:
    async with apart(ScriptedSettings(), ScriptedSettings()) as at:
        await collect(at.pair, generation("first", prompt_tokens=100))
        _, finish = await collect(at.pair, generation("second", prompt_tokens=150))
        assert finish.cached_tokens == 100


async def test_a_prefill_answer_that_never_comes_costs_the_count_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with apart(ScriptedSettings(prefill_s=30), ScriptedSettings()) as at:
        pair = SglangPair(*at.pair.fleet.addresses, limits=PairLimits(settle_s=0.01))
        _, finish = await collect(pair, generation("lone"))
        assert finish.cached_tokens == 0
        assert "without the prefill engine" in caplog.text
        await pair.aclose()
        assert at.servers.prefill.aborted == ["lone"]
        await at.idle()


async def test_a_prompt_over_the_context_is_the_clients_error() -> None:
    async with served(ScriptedSettings(context_length=30)) as at:
        with pytest.raises(PromptTooLong, match="40 tokens"):
            await collect(at.pair, generation(prompt_tokens=40))
        await at.idle()


async def test_prefill_only_warms_the_cache_and_says_so() -> None:
    async with served() as at:
        found = [
            await at.pair.prefill(generation(f"p{end}", prompt_tokens=end))
            for end in (50, 100, 150, 150)
        ]
        assert [one.cached_tokens for one in found] == [0, 50, 100, 149]
        assert [one.prompt_tokens for one in found] == [50, 100, 150, 150]
        _, finish = await collect(at.pair, generation("final", prompt_tokens=160))
        assert finish.cached_tokens == 150


@pytest.mark.parametrize(("warms", "way"), [(("route",), "route"), ((), "pair")])
async def test_the_probe_finds_the_way_that_warms(warms: tuple[str, ...], way: str) -> None:
    async with served(ScriptedSettings(warms=warms)) as at:  # type: ignore[arg-type]
        assert await at.pair.fleet.probe() == (way,)
        assert at.pair.fleet.prefill_ways == (way,)
        await at.pair.prefill(generation("a", prompt_tokens=100))
        assert (await at.pair.prefill(generation("b", prompt_tokens=120))).cached_tokens == 100
        await at.idle()


async def test_a_cache_that_nothing_warms_is_named_with_its_remedy() -> None:
    async with served(ScriptedSettings(cache_tokens=0)) as at:
        with pytest.raises(EngineRejected, match="disable-radix-cache"):
            await at.pair.fleet.probe()


@pytest.mark.parametrize(("overlaps", "waits"), [(True, 8), (False, 0)])
async def test_equal_prompts_wait_for_the_first_where_a_server_overlaps_passes(
    overlaps: bool, waits: int
) -> None:
    info = {"disable_overlap_schedule": not overlaps}
    async with served(ScriptedSettings(server_info=info, prefill_s=0.01)) as at:
        await at.pair.fleet.probe()
        requests = [generation(f"r{index}", 1200) for index in range(9)]
        results = await asyncio.gather(*(collect(at.pair, request) for request in requests))
        assert at.pair.fleet.waited_for_prefix == waits
        assert sum(finish.cached_tokens == 1199 for _, finish in results) >= waits
        await at.quiet()


async def test_a_request_that_waits_for_a_prompt_that_fails_is_answered() -> None:
    async with served(ScriptedSettings(server_info={"disable_overlap_schedule": False})) as at:
        await at.pair.fleet.probe()
        at.break_leg("prefill", Fault("status", times=1))
        requests = [generation(f"r{index}", 1200) for index in range(3)]
        failed, *others = await asyncio.gather(
            *(collect(at.pair, request) for request in requests), return_exceptions=True
        )
        assert isinstance(failed, EngineRejected)
        assert not any(isinstance(other, BaseException) for other in others)
        assert at.pair.fleet.waited_for_prefix == 2
        await at.quiet()


BY_PRIORITY = {"enable_priority_scheduling": True}
LOW_FIRST = {**BY_PRIORITY, "schedule_low_priority_values_first": True}


@pytest.mark.parametrize(
    ("prefill", "decode", "priorities"),
    [
        (BY_PRIORITY, BY_PRIORITY, [1, 0, -1]),
        (LOW_FIRST, LOW_FIRST, [-1, 0, 1]),
        (BY_PRIORITY, {}, [None] * 3),
        ({}, BY_PRIORITY, [None] * 3),
        (BY_PRIORITY, LOW_FIRST, [None] * 3),
    ],
)
async def test_servers_that_all_schedule_by_priority_get_the_requests_class(
    prefill: dict[str, bool], decode: dict[str, bool], priorities: list[int | None]
) -> None:
    pair = [ScriptedSettings(server_info=info, log_bodies=9) for info in (prefill, decode)]
    async with apart(*pair) as at:
        await at.pair.fleet.probe()
        for tier in TIERS:
            await collect(at.pair, replace(generation(tier), hints=Hints(tier=tier)))
        for server in (at.servers.prefill, at.servers.decode):
            bodies = [orjson.loads(body) for body in server.bodies]
            sent = {body["rid"]: body.get("priority") for body in bodies}
            assert [sent[tier] for tier in TIERS] == priorities


async def test_loads_and_health_are_read_from_both_servers() -> None:
    async with served(ScriptedSettings(token_s=5)) as at:

        async def states() -> list[EngineReport]:
            return [await server.report() for server in at.pair.fleet.servers]

        await at.pair.fleet.ready()
        assert [(one.running, one.waiting) for one in await states()] == [(0, 0), (0, 0)]
        stream = at.pair.generate(generation())
        await anext(stream)
        prefill, decode = await states()
        assert (prefill.running, decode.running) == (0, 1)
        await stream.aclose()
        await at.idle()


async def test_many_requests_at_once_leave_nothing() -> None:
    async with served() as at:
        results = await asyncio.gather(
            *(collect(at.pair, generation(f"r{index}", 20 + index)) for index in range(64))
        )
        assert all(finish.completion_tokens == 8 for _, finish in results)
        assert (at.servers.prefill.aborted, at.servers.decode.aborted) == ([], [])
        await at.quiet()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_relayed_answer_is_decodes_own_bytes(stream: bool) -> None:
    async with served(ScriptedSettings(log_bodies=1), rid=lambda: "relayed") as at:
        body = b'{"input_ids": [1,2,3], "sampling_params": {"temperature": 1.50}, "later": null'
        body += b', "stream": true}' if stream else b"}"
        for _ in range(2):  # the second time the prompt is cached, and stays so
            async with at.pair.forward("generate", body) as answer:
                relayed = b"".join([chunk async for chunk in answer.chunks])
        assert at.servers.decode.bodies[0].startswith(body[:-1])
        assert at.servers.decode.bodies == at.servers.prefill.bodies
        assert answer.content_type.startswith("text/event-stream" if stream else "application/json")
        async with aiohttp.ClientSession() as session:
            async with session.post(
                f"{at.servers.prefill.url}/generate", data=at.servers.prefill.bodies[0]
            ):
                pass
            async with session.post(
                f"{at.servers.decode.url}/generate", data=at.servers.decode.bodies[0]
            ) as direct:
                assert await direct.read() == relayed
        assert (at.servers.prefill.aborted, at.servers.decode.aborted) == ([], [])


async def test_a_relayed_error_status_comes_through_and_frees_both_legs() -> None:
    async with served() as at:
        async with at.pair.forward("generate", b"{}") as answer:
            body = b"".join([chunk async for chunk in answer.chunks])
        assert answer.status == 400
        assert b"input_ids" in body
        await at.idle()


@pytest.mark.parametrize("warms", [("route",), ()])
async def test_prefill_only_is_relayed_in_every_way(warms: tuple[str, ...]) -> None:
    async with served(ScriptedSettings(warms=warms)) as at:  # type: ignore[arg-type]
        await at.pair.fleet.probe()
        ids = orjson.dumps(list(range(60)))
        for _ in range(2):
            async with at.pair.forward("prefill_only", b'{"input_ids": %s}' % ids) as answer:
                found = orjson.loads(b"".join([chunk async for chunk in answer.chunks]))
        assert answer.status == 200
        assert found["meta_info"]["cached_tokens"] == 59


async def test_a_body_that_is_no_object_reaches_no_engine() -> None:
    async with served() as at:
        with pytest.raises(InvalidRequest):
            async with at.pair.forward("generate", b"[]"):
                pass
        assert at.servers.prefill.requests == at.servers.decode.requests == 0


async def test_a_closed_pair_holds_no_connection_and_can_be_used_again() -> None:
    async with served() as at:
        for _ in range(2):
            await collect(at.pair, generation())
            await at.pair.aclose()
            await until(
                lambda: at.servers.prefill.connections == at.servers.decode.connections == 0
            )


async def test_a_prefill_by_a_real_pair_merges_log_probabilities_though_its_client_asked_for_a_stream() -> (
    None
):
    async with served(ScriptedSettings(warms=())) as at:
        await at.pair.fleet.probe()
        body = (
            b'{"input_ids": [1, 2, 3], "stream": true, "return_logprob": true, '
            b'"logprob_start_len": 0}'
        )
        async with at.pair.forward("prefill_only", body) as answer:
            found = orjson.loads(b"".join([chunk async for chunk in answer.chunks]))
        assert [token for _, token, _ in found["meta_info"]["input_token_logprobs"]] == [1, 2, 3]


async def test_a_request_may_send_the_further_fields_that_its_key_names_and_others_may_not() -> (
    None
):
    async with served(ScriptedSettings(log_bodies=8)) as at:
        body = b'{"input_ids": [1], "return_hidden_states": true}'
        async with at.pair.forward("generate", body, fields=["return_hidden_states"]) as answer:
            assert b"".join([chunk async for chunk in answer.chunks])
        assert orjson.loads(at.servers.decode.bodies[-1])["return_hidden_states"] is True
        with pytest.raises(InvalidRequest, match="native_fields"):
            at.pair.forward("generate", body)


async def test_with_isolation_each_tenants_requests_carry_a_cache_key_of_its_own() -> None:
    async with served(ScriptedSettings(log_bodies=8)) as at:
        pair = SglangPair(*at.pair.fleet.addresses, limits=LIMITS, isolates=True)
        await collect(pair, replace(generation(), hints=Hints(user="alice")))
        await pair.prefill(replace(generation(), hints=Hints(user="alice")))
        async with pair.forward("generate", b'{"input_ids": [1]}', hints=Hints("bob")) as answer:
            assert b"".join([chunk async for chunk in answer.chunks])
        with pytest.raises(InvalidRequest, match="extra_key"):
            pair.forward(
                "generate", b'{"input_ids": [1], "extra_key": "alice"}', hints=Hints("bob")
            )
        with pytest.raises(InvalidRequest, match="extra_key"):
            pair.forward(
                "generate", b'{"input_ids": [1], "extra_key": "alice"}', fields=["extra_key"]
            )
        keys = [orjson.loads(body).get("extra_key") for body in at.servers.prefill.bodies]
        assert keys == ["alice", "alice", "bob"]
        await pair.aclose()
        await collect(at.pair, replace(generation(), hints=Hints(user="alice")))
        assert b"extra_key" not in at.servers.prefill.bodies[-1]
