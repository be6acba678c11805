"""Several prefill and decode servers of one model: who gets what, and who is left alone."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from benchmarks.scripted.server import Fault, ScriptedServer, ScriptedSettings
from shell_router.core.engine import Finish, Generation, Hints, Placement
from shell_router.engines.address import PairAddress, PairLimits
from shell_router.engines.sglang import SglangPair, random_rid
from shell_router.errors import (
    EngineRejected,
    EngineStalled,
    EngineUnavailable,
    EngineUnreachable,
    Overloaded,
)
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.failures import BreakerSettings
from shell_router.routing.placement import EngineState
from shell_router.routing.queue import QueueSettings
from tests.fakes.scripted_pair import (
    BREAKER,
    ONCE,
    ScriptedPool,
    collect,
    generation,
    scripted_pool,
    until,
)


def requests(servers: Sequence[ScriptedServer]) -> list[int]:
    return [server.requests for server in servers]


def of(affinity: str, prompt_tokens: int = 40) -> Generation:
    return replace(generation(f"{affinity}-{prompt_tokens}", prompt_tokens), affinity=affinity)


async def fails(at: ScriptedPool, error: type[Exception], times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(error):
            await collect(at.pool, generation(random_rid()))


@asynccontextmanager
async def impatient() -> AsyncIterator[tuple[ScriptedPool, SglangPair]]:
    """A client that waits 0.3 s for a sign of life, and whose breakers open at once."""
    async with scripted_pool() as at:
        limits, breaker = (
            PairLimits(stall_s=0.3, abort_s=2),
            BreakerSettings(failures=1, open_s=BREAKER.open_s),
        )
        pool = SglangPair(
            *at.pool.fleet.addresses, limits=limits, breaker=breaker, clock=lambda: at.now_s
        )
        yield at, pool
        await pool.aclose()


async def test_requests_at_once_are_spread_over_the_servers_of_each_role() -> None:
    async with scripted_pool(2, 3, ScriptedSettings(token_s=0.01)) as at:
        await asyncio.gather(*(collect(at.pool, generation(f"r{index}")) for index in range(12)))
        assert requests(at.prefills) == [6, 6]
        assert requests(at.decodes) == [4, 4, 4]


async def test_requests_one_after_the_other_take_turns() -> None:
    async with scripted_pool(1, 3) as at:
        for index in range(6):
            await collect(at.pool, generation(f"r{index}"))
        assert requests(at.decodes) == [2, 2, 2]


async def test_a_growing_prompt_stays_with_the_server_that_holds_its_kv() -> None:
    async with scripted_pool(3, 2) as at:
        for affinity in "abc":
            found = [
                (await at.pool.prefill(of(affinity, end))).cached_tokens for end in (50, 100, 150)
            ]
            assert found == [0, 50, 100]
            _, finish = await collect(at.pool, of(affinity, 160))
            assert finish.cached_tokens == 150
        assert requests(at.prefills) == [4, 4, 4]


async def test_a_server_in_several_pairs_is_one_server() -> None:
    async with scripted_pool(2, 2) as at:
        assert len(at.pool.fleet.addresses) == 4
        roles = [server.server.role for server in at.pool.fleet.servers]
        assert roles == ["prefill", "prefill", "decode", "decode"]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_retry_goes_elsewhere(leg: str) -> None:
    async with scripted_pool(2, 2) as at:
        servers = at.prefills if leg == "prefill" else at.decodes
        await servers[0].stop()
        for index in range(6):
            await collect(at.pool, generation(f"r{index}"))
        assert at.pool.fleet.retried == BREAKER.failures, (
            "a server was tried though its breaker was open"
        )
        assert servers[1].requests >= 6


async def test_a_prompt_moves_when_its_server_is_gone() -> None:
    async with scripted_pool(2, 1) as at:
        await at.pool.prefill(of("a", 50))
        home = next(server for server in at.prefills if server.requests)
        await home.stop()
        _, finish = await collect(at.pool, of("a", 60))
        assert finish.cached_tokens == 0
        assert (await at.pool.prefill(of("a", 80))).cached_tokens == 60


@pytest.mark.parametrize(
    ("leg", "open_ones"), [("prefill", [True, False]), ("decode", [False, True])]
)
@pytest.mark.parametrize(
    "fault", [Fault("refuse"), Fault("status"), Fault("error_event")], ids=lambda f: f.kind
)
async def test_only_the_failing_servers_breaker_counts(
    leg: str, open_ones: list[bool], fault: Fault
) -> None:
    async with scripted_pool(retries=ONCE) as at:
        at.strike(fault, (at.prefills if leg == "prefill" else at.decodes)[0])
        await fails(
            at,
            EngineUnreachable if fault.kind == "refuse" else EngineRejected,
            times=BREAKER.failures,
        )
        assert at.breakers() == open_ones
        assert [server.failures for server in at.pool.fleet.servers] == [
            3 * found for found in open_ones
        ]


async def test_an_open_breaker_refuses_at_once_then_tries_and_closes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with scripted_pool(retries=ONCE) as at:
        at.strike(Fault("refuse"), at.decodes[0])
        await fails(at, EngineUnreachable, times=BREAKER.failures)
        assert "circuit breaker of the" in caplog.text
        sent = at.decodes[0].requests
        with pytest.raises(EngineUnavailable, match=r"decode-0 is open.* another 5.0 s") as error:
            await collect(at.pool, generation())
        assert error.value.retry_s == BREAKER.open_s
        at.now_s += BREAKER.open_s
        await fails(at, EngineUnreachable)  # the trial
        await fails(at, EngineUnavailable)
        assert at.decodes[0].requests == sent + 1
        at.strike(None, at.decodes[0])
        at.now_s += BREAKER.open_s
        await collect(at.pool, generation())
        assert at.breakers() == [False, False]
        await collect(at.pool, generation())
        await at.idle()


async def test_a_trial_closes_the_breaker_with_its_first_token_and_not_only_at_its_end() -> None:
    async with scripted_pool(retries=ONCE) as at:
        at.strike(Fault("refuse"), at.decodes[0])
        await fails(at, EngineUnreachable, times=BREAKER.failures)
        at.decodes[0].settings = ScriptedSettings(token_s=60)
        at.now_s += BREAKER.open_s
        async with aclosing(at.pool.generate(generation("trial"))) as stream:
            await anext(stream)
            assert at.breakers() == [False, False]


async def test_a_trial_is_not_spent_while_the_other_role_refuses() -> None:
    async with scripted_pool(retries=ONCE) as at:
        prefill, decode = at.pool.fleet.servers
        for server, opened_s in ((prefill, 0.0), (decode, 1.0)):
            for _ in range(BREAKER.failures):
                server.breaker.note_failure(opened_s)
        at.now_s = BREAKER.open_s  # prefill may be tried, decode not yet
        await fails(at, EngineUnavailable)
        at.now_s += 1.0
        await collect(at.pool, generation())


async def test_a_relayed_stream_that_tells_of_a_failure_does_not_close_a_breaker() -> None:
    async with scripted_pool() as at:
        decode = at.pool.fleet.servers[1]
        for _ in range(BREAKER.failures):
            decode.breaker.note_failure(0.0)
        at.now_s = BREAKER.open_s
        at.strike(Fault("error_event"), at.decodes[0])
        body = b'{"input_ids": [1, 2, 3], "stream": true}'
        async with at.pool.forward("generate", body) as answer:
            assert b"scripted fault" in b"".join([chunk async for chunk in answer.chunks])
        assert decode.breaker.open


async def test_a_prefill_only_request_by_a_real_pair_spends_one_trial() -> None:
    async with scripted_pool(settings=ScriptedSettings(warms=()), retries=ONCE) as at:
        await at.pool.fleet.probe()
        for _ in range(BREAKER.failures):
            at.pool.fleet.servers[0].breaker.note_failure(at.now_s)
        at.now_s += BREAKER.open_s
        async with at.pool.forward("prefill_only", b'{"input_ids": [1, 2, 3]}') as answer:
            assert answer.status == 200
            assert [chunk async for chunk in answer.chunks]


async def test_a_transfer_that_failed_may_be_the_fault_of_either_server() -> None:
    async with scripted_pool(retries=ONCE) as at:
        at.strike(
            Fault("status", message="Prefill transfer failed for request rank=0"), at.prefills[0]
        )
        await fails(at, EngineRejected)
        assert [server.failures for server in at.pool.fleet.servers] == [1, 1]


async def test_what_is_wrong_with_a_request_opens_no_breaker() -> None:
    async with scripted_pool(settings=ScriptedSettings(context_length=30)) as at:
        for _ in range(2 * BREAKER.failures):
            with pytest.raises(Exception, match="40 tokens"):
                await collect(at.pool, generation(prompt_tokens=40))
        assert at.breakers() == [False, False]


@pytest.mark.parametrize("status", [500, 503])
async def test_a_request_that_every_attempt_is_refused_opens_no_breaker(status: int) -> None:
    async with scripted_pool() as at:
        for fails_always in (at.prefills[0], at.decodes[0]):
            at.strike(Fault("status", status=status), fails_always)
            await fails(at, EngineRejected, times=2 * BREAKER.failures)
            assert at.breakers() == [False, False]
            assert not any(server.failures for server in at.pool.fleet.servers)
            at.strike(None, fails_always)
            await collect(at.pool, generation(random_rid()))


async def test_a_refusal_that_another_server_does_not_make_counts_on_its_server() -> None:
    async with scripted_pool(1, 2) as at:
        at.strike(Fault("status", status=500), at.decodes[0])
        for _ in range(2 * BREAKER.failures):
            await collect(at.pool, generation(random_rid()))
        assert at.breakers() == [False, True, False]


async def test_failing_prefill_only_requests_open_the_prefills_breaker_alone() -> None:
    async with scripted_pool() as at:
        at.strike(Fault("refuse"), at.prefills[0])
        for _ in range(BREAKER.failures):
            with pytest.raises(EngineUnreachable):
                await at.pool.prefill(generation())
        assert at.breakers() == [True, False]
        with pytest.raises(EngineUnavailable):
            await at.pool.prefill(generation())


async def test_silence_after_the_first_token_is_decodes_own() -> None:
    async with impatient() as (at, pool):
        at.strike(Fault("stall", after_tokens=1), at.decodes[0])
        with pytest.raises(EngineStalled):
            await collect(pool, generation())
        assert [server.failures for server in pool.fleet.servers] == [0, 1]


async def test_silence_before_it_may_be_eithers_and_success_clears() -> None:
    async with impatient() as (at, pool):
        at.strike(Fault("stall"), at.prefills[0])
        with pytest.raises(EngineStalled):
            await collect(pool, generation())
        assert [server.failures for server in pool.fleet.servers] == [1, 1]
        assert [server.breaker.open for server in pool.fleet.servers] == [True, True]
        at.strike(None, at.prefills[0])
        at.now_s += BREAKER.open_s
        await collect(pool, generation())
        assert [server.breaker.open for server in pool.fleet.servers] == [False, False]


async def test_the_model_serves_while_one_server_of_each_role_does() -> None:
    async with scripted_pool(2, 2) as at:
        assert await at.pool.fleet.serves()
        await at.prefills[0].stop()
        await at.decodes[1].stop()
        assert await at.pool.fleet.serves()
        await at.decodes[0].stop()
        assert not await at.pool.fleet.serves()


async def test_a_server_of_the_other_role_is_named_when_it_is_probed() -> None:
    async with scripted_pool() as at:
        swapped = SglangPair(PairAddress(at.decodes[0].url, at.prefills[0].url, "127.0.0.1", 1))
        with pytest.raises(
            EngineRejected, match=r"prefill engine .* disaggregation mode is decode"
        ):
            await swapped.fleet.probe()
        await swapped.aclose()


async def test_requests_under_way_are_counted_and_end_with_their_streams() -> None:
    async with scripted_pool(settings=ScriptedSettings(token_s=5)) as at:
        async with aclosing(at.pool.generate(generation())) as stream:
            await anext(stream)
            assert [one.running for one in in_flight(at.pool)] == [0, 1]
        await at.pool.aclose()
        assert [one.running for one in in_flight(at.pool)] == [0, 0]


def in_flight(pool: SglangPair) -> list[EngineState]:
    return [at.load for role in pool.fleet.dispatchers.values() for at in role.tracked]


@asynccontextmanager
async def queueing(queue: QueueSettings) -> AsyncIterator[tuple[ScriptedPool, SglangPair]]:
    """One pair whose tokens take their time, and a client that holds requests back."""
    async with scripted_pool(settings=ScriptedSettings(token_s=0.005)) as at:
        scheduling = SchedulingSettings(queue=queue, poll_s=0.01, stale_s=60.0)
        pool = SglangPair(
            *at.pool.fleet.addresses, limits=PairLimits(abort_s=2), scheduling=scheduling
        )
        yield at, pool
        await pool.aclose()


async def test_what_is_in_flight_is_forgotten_on_every_way_to_end() -> None:
    async with scripted_pool(2, 2, ScriptedSettings(token_s=0.001)) as at:
        await collect(at.pool, generation("whole"))
        await at.pool.prefill(of("grown", 50))
        async with aclosing(at.pool.generate(generation("left"))) as stream:
            await anext(stream)
            assert sum(load.running for load in in_flight(at.pool)) == 1, (
                "decode's: prefill has done its part"
            )
            assert sum(load.held_tokens for load in in_flight(at.pool)) > 40
        async with at.pool.forward(
            "generate", b'{"input_ids": [1, 2, 3], "stream": true}'
        ) as answer:
            await anext(aiter(answer.chunks))
        await at.prefills[0].stop()
        for index in range(4):
            await collect(at.pool, generation(f"retried-{index}"))
        assert at.pool.fleet.retried
        assert [(one.running, one.tokens) for one in in_flight(at.pool)] == [(0, 0)] * 4


async def test_requests_wait_in_the_router_while_a_server_runs_as_many_as_it_may() -> None:
    async with queueing(QueueSettings(max_running=2)) as (at, pool):
        most = 0

        async def ask(number: int) -> None:
            nonlocal most
            async with aclosing(pool.generate(generation(f"r{number}"))) as stream:
                async for _ in stream:
                    most = max(most, at.decodes[0].running)

        await asyncio.gather(*(ask(number) for number in range(8)))
        assert most == 2
        assert pool.fleet.dispatchers["decode"].waits.count == 6
        assert [(one.running, one.tokens) for one in in_flight(pool)] == [(0, 0)] * 2


async def test_no_more_requests_wait_than_may() -> None:
    async with queueing(QueueSettings(max_running=1, max_waiting=1)) as (at, pool):
        async with aclosing(pool.generate(generation("holds"))) as stream:
            await anext(stream)
            waits = asyncio.create_task(collect(pool, generation("waits")))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="1 requests wait"):
                await collect(pool, generation("refused"))
        await waits
        assert at.decodes[0].requests == 2


async def test_native_requests_of_two_tenants_take_turns_however_many_one_of_them_sends() -> None:
    async with queueing(QueueSettings("least_attained", max_running=1)) as (_, pool):
        ended: list[str] = []

        async def ask(tenant: str) -> None:
            async with pool.forward(
                "generate", b'{"input_ids": [1, 2, 3]}', hints=Hints(tenant)
            ) as answer:
                async for _ in answer.chunks:
                    pass
                ended.append(tenant)

        async with aclosing(pool.generate(generation("holds"))) as stream:
            await anext(stream)
            waiting = [asyncio.create_task(ask(tenant)) for tenant in [*["flood"] * 8, "quiet"]]
            await until(lambda: pool.fleet.dispatchers["decode"].waiting == len(waiting))
        await asyncio.gather(*waiting)
        assert ended.index("quiet") <= 1


async def test_a_request_that_is_given_up_while_it_waits_never_reaches_a_server() -> None:
    async with queueing(QueueSettings(max_running=1)) as (at, pool):
        async with aclosing(pool.generate(generation("holds"))) as stream:
            await anext(stream)
            waits = asyncio.create_task(collect(pool, generation("waits")))
            await asyncio.sleep(0)
            assert pool.fleet.dispatchers["decode"].waiting == 1
            waits.cancel()
            await asyncio.wait([waits])
            assert pool.fleet.dispatchers["decode"].waiting == 0
        assert at.decodes[0].requests == 1


async def test_the_servers_state_is_followed_while_it_is_asked_for() -> None:
    async with queueing(QueueSettings()) as (_, pool), pool.fleet.follow():
        decode = pool.fleet.dispatchers["decode"].tracked[0]
        async with aclosing(pool.generate(generation("one", 400))) as stream:
            await anext(stream)
            async with asyncio.timeout(2):
                while decode.reported is None or not decode.reported.running:  # noqa: ASYNC110 - it is polled
                    await asyncio.sleep(0)
            assert decode.reported.tokens >= 400
            assert decode.reported.kv_usage > 0


async def test_each_attempts_placement_is_reported_with_its_reason() -> None:
    seen: list[tuple[Placement, ...]] = []

    def note(*placed: Placement) -> None:
        seen.append(placed)

    async with scripted_pool(1, 2) as at:
        await at.decodes[0].stop()
        events = [one async for one in at.pool.generate(replace(generation("r"), on_placed=note))]
        assert isinstance(events[-1], Finish)
    assert [[one.engine for one in placed] for placed in seen] == [
        ["prefill-0", "decode-0"],
        ["prefill-0", "decode-1"],
    ]
    assert [one.why for one in seen[0]] == ["only_engine", "tie"]


async def test_updates_by_real_pairs_and_real_requests_never_wait_for_each_other_in_a_circle() -> (
    None
):
    async with scripted_pool(settings=ScriptedSettings(warms=(), prefill_s=0.002)) as at:
        queue = QueueSettings(max_running=1, max_prefill_tokens=1, wait_s=1e6)
        pool = SglangPair(*at.pool.fleet.addresses, scheduling=SchedulingSettings(queue=queue))
        await pool.fleet.probe()
        assert pool.fleet.prefill_ways == ("pair",)
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            for index in range(6):
                group.create_task(pool.prefill(generation(f"u{index}", 40 + index)))
                group.create_task(collect(pool, generation(f"r{index}", 60 + index)))
        assert [(one.running, one.tokens) for one in in_flight(pool)] == [(0, 0)] * 2
        await pool.aclose()


async def test_a_request_that_cannot_be_written_down_leaves_nothing_in_flight() -> None:
    async with scripted_pool() as at:
        with pytest.raises(TypeError):
            await collect(at.pool, replace(generation("odd"), sampling={"temperature": object()}))
        assert [(one.running, one.tokens) for one in in_flight(at.pool)] == [(0, 0)] * 2
