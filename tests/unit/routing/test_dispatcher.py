"""Who gets which engine, and when: the dispatcher with engines that are mere names, under a virtual
clock.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.core.engine import Hints, Session
from shell_router.engines.server_client import take_slot
from shell_router.errors import EngineUnavailable, Overloaded
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.routing.dispatcher import Dispatcher, EngineSlot, SchedulingSettings
from shell_router.routing.engine_selection import SelectionSettings
from shell_router.routing.failures import Breaker, BreakerSettings
from shell_router.routing.placement import EngineReport, EngineState, PlacementRequest
from shell_router.routing.queue import ORDERS, QueueSettings

ONE_AT_A_TIME = QueueSettings(max_running=1)


def dispatcher(
    queue: QueueSettings = ONE_AT_A_TIME,
    selection: SelectionSettings | None = None,
    engines: int = 2,
    **role: bool,
) -> Dispatcher[str]:
    breaker = BreakerSettings(failures=1, open_s=5.0)
    named = [(f"engine {at}", f"pair-{at}", Breaker(breaker)) for at in range(engines)]
    found = SchedulingSettings(selection or SelectionSettings(), queue)
    return Dispatcher(named, found, asyncio.get_running_loop().time, **role)


def wanted(tokens: int = 10, affinity: str | None = None, **hints: object) -> PlacementRequest:
    ids = None if affinity is None else range(tokens)
    return PlacementRequest(tokens, ids, affinity=affinity, hints=Hints(**hints))  # type: ignore[arg-type]


def virtually(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """The test, run under a virtual clock."""

    async def whole() -> None:
        await test()

    def run() -> None:
        run_virtual(whole())

    run.__name__ = test.__name__
    return run


def nothing_on(load: EngineState) -> bool:
    return not any(
        (
            load.running,
            load.updates,
            load.prefill_tokens,
            load.output_tokens,
            load.held_tokens,
            load.waiting,
        )
    ) and (load.waiting_tokens == 0)


async def soon() -> None:
    """Let all tasks that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


@virtually
async def test_without_limits_no_request_waits() -> None:
    at = dispatcher(QueueSettings())
    places = [await take_slot(at, wanted()) for _ in range(10)]
    assert [place.engine for place in places] == ["engine 0", "engine 1"] * 5
    assert at.choices.total() == 10


@virtually
async def test_who_waits_gets_whichever_engine_is_free_first() -> None:
    at = dispatcher()
    held = [await take_slot(at, wanted()) for _ in range(2)]
    waiting = asyncio.create_task(take_slot(at, wanted()))
    await soon()
    assert (at.waiting, waiting.done()) == (1, False)
    await asyncio.sleep(3.0)
    held[1].close()
    assert (await waiting).engine == "engine 1"
    assert (at.waiting, at.waits.count, at.waits.sum_s) == (0, 1, 3.0)


@virtually
async def test_bound_at_its_arrival_it_waits_for_that_engine() -> None:
    at = dispatcher(replace(ONE_AT_A_TIME, bind="arrival"), SelectionSettings("round_robin"))
    held = [await take_slot(at, wanted()) for _ in range(2)]
    waiting = asyncio.create_task(take_slot(at, wanted()))
    await soon()
    held[1].close()
    await soon()
    assert not waiting.done()
    held[0].close()
    assert (await waiting).engine == "engine 0"


def of_session(id: str, parent: str = "", user: str = "alice") -> PlacementRequest:
    return wanted(user=user, session=Session(id, parent, parent or id))


@virtually
async def test_a_session_leaves_an_engine_that_is_full_or_long_unused() -> None:
    at = dispatcher()
    first = await take_slot(at, of_session("a"))
    elsewhere = await take_slot(at, of_session("a"))
    assert (first.engine, elsewhere.engine) == ("engine 0", "engine 1")
    first.close()
    elsewhere.close()
    again = await take_slot(at, of_session("a"))
    assert (again.engine, at.choices["session"]) == ("engine 1", 1), "where its last request went"
    again.close()
    await asyncio.sleep(301)
    (await take_slot(at, of_session("a"))).close()
    assert at.choices["session"] == 1


@virtually
async def test_children_share_only_their_parents_prefill_server() -> None:
    for role, shared in (({"decodes": False}, 3), ({"prefills": False}, 0)):
        at = dispatcher(QueueSettings(), **role)
        for child in "abc":
            (await take_slot(at, of_session(child, "parent"))).close()
        (await take_slot(at, of_session("parent"))).close()
        assert at.choices["session"] == shared


@virtually
async def test_sessions_of_two_tenants_and_agents_of_a_graph_have_engines_of_their_own() -> None:
    at = dispatcher(QueueSettings(), engines=9)
    for user in ("alice", "bob"):
        (await take_slot(at, of_session("a", user=user))).close()
        for agent in ("left", "right"):
            session = Session("a", "", "a")
            graph = wanted(user=user, session=session, topology="duo", agent=agent)
            (await take_slot(at, graph)).close()
    assert at.choices["session"] == 0
    (await take_slot(at, of_session("a"))).close()
    assert at.choices["session"] == 1


@virtually
async def test_a_prompt_that_grows_for_one_adapter_has_no_home_for_another() -> None:
    at = dispatcher(QueueSettings(), engines=3)
    for adapter in ("algebra", "algebra", "biology", None):
        place = await take_slot(at, replace(wanted(affinity="run"), adapter=adapter))
        place.close()
    assert at.choices["growing_prompt"] == 1


@virtually
async def test_a_growing_prompt_waits_for_the_engine_that_holds_its_kv_and_lets_others_pass() -> (
    None
):
    at = dispatcher()
    first = await take_slot(at, wanted(affinity="tree"))
    other = await take_slot(at, wanted())
    grown = asyncio.create_task(take_slot(at, wanted(30, affinity="tree")))
    unbound = asyncio.create_task(take_slot(at, wanted()))
    await soon()
    other.close()
    assert (await unbound).engine == "engine 1"
    assert not grown.done()
    first.close()
    assert (await grown).engine == "engine 0"
    assert at.choices["growing_prompt"] == 1
    assert at.tracked[0].load.prefill_tokens == 20, "10 of its 30 tokens are there already"


@virtually
async def test_a_clients_session_chooses_the_engine_of_one_tenant_and_counts_every_prompt_in_full() -> (
    None
):
    at = dispatcher(QueueSettings(), engines=3)
    slots = [
        await take_slot(at, PlacementRequest(2000, hints=of_session("1", user=user).hints))
        for user in ("alice", "bob", "bob")
    ]
    assert [slot.engine for slot in slots] == ["engine 0", "engine 1", "engine 1"]
    assert [one.load.prefill_tokens for one in at.tracked] == [2000, 4000, 0]


@virtually
async def test_the_order_decides_who_is_next() -> None:
    at = dispatcher(replace(ONE_AT_A_TIME, order="shortest_prefill"), engines=1)
    held, done = await take_slot(at, wanted()), list[int]()

    async def ask(tokens: int) -> None:
        place = await take_slot(at, wanted(tokens))
        done.append(tokens)
        place.close()

    async with asyncio.TaskGroup() as group:
        for tokens in (900, 30, 200):
            group.create_task(ask(tokens))
        await soon()
        held.close()
    assert done == [30, 200, 900]


@virtually
async def test_programs_of_a_tenant_take_turns_however_many_requests_one_of_them_has() -> None:
    at = dispatcher(replace(ONE_AT_A_TIME, order="least_attained"), engines=1)
    held, done = await take_slot(at, of_session("loop")), list[str]()

    async def ask(session: str) -> None:
        place = await take_slot(at, of_session(session))
        done.append(session)
        place.note_tokens(5)
        place.close()

    async with asyncio.TaskGroup() as group:
        for session in ("loop", "loop", "loop", "loop", "chat", "chat"):
            group.create_task(ask(session))
        await soon()
        held.close()
    assert done == ["chat", "loop", "chat", "loop", "loop", "loop"]


@virtually
async def test_cancelled_while_it_waits_it_frees_its_turn() -> None:
    at = dispatcher(engines=1)
    held = await take_slot(at, wanted())
    given_up, stays = (asyncio.create_task(take_slot(at, wanted())) for _ in range(2))
    await soon()
    given_up.cancel()
    await soon()
    assert at.waiting == 1
    held.close()
    assert (await stays).engine == "engine 0"


@virtually
async def test_cancelled_in_the_moment_of_its_turn_it_gives_the_place_back() -> None:
    at = dispatcher(engines=1)
    held = await take_slot(at, wanted())
    given_up, stays = (asyncio.create_task(take_slot(at, wanted())) for _ in range(2))
    await soon()
    held.close()  # its turn has come
    given_up.cancel()  # and it does not know yet
    assert (await stays).engine == "engine 0"
    with pytest.raises(asyncio.CancelledError):
        await given_up


@virtually
async def test_who_waits_too_long_is_refused_with_what_to_do() -> None:
    at = dispatcher(replace(ONE_AT_A_TIME, wait_s=7.0), engines=1)
    held = await take_slot(at, wanted())
    with pytest.raises(EngineUnavailable, match=r"within 7 s.*scheduling\.queue\.wait_s"):
        await take_slot(at, wanted())
    assert (asyncio.get_running_loop().time(), at.waiting) == (7.0, 0)
    held.close()
    assert nothing_on(at.tracked[0].load)


@virtually
async def test_when_the_last_engine_fails_no_request_waits_for_it() -> None:
    at = dispatcher(engines=1)
    held = await take_slot(at, wanted())
    waiting = asyncio.create_task(take_slot(at, wanted()))
    await soon()
    at.tracked[0].breaker.note_failure(0.0)
    held.close()
    with pytest.raises(EngineUnavailable, match="circuit breaker"):
        await waiting


@virtually
async def test_of_those_that_wait_only_one_probes_an_engine_that_failed() -> None:
    at = dispatcher(QueueSettings(max_running=3))
    at.tracked[0].breaker.note_failure(0.0)
    held = [await take_slot(at, wanted()) for _ in range(3)]
    waiting = [asyncio.create_task(take_slot(at, wanted())) for _ in range(4)]
    await asyncio.sleep(6.0)  # the breaker of engine 0 allows a probe again
    held[0].close()
    await soon()
    assert sorted(task.result().engine for task in waiting if task.done()) == [
        "engine 0",
        "engine 1",
    ]
    at.tracked[0].breaker.note_success()
    held[1].close()
    assert [(await task).engine for task in waiting].count("engine 0") == 2


@virtually
async def test_bound_to_an_engine_that_failed_it_goes_elsewhere() -> None:
    at = dispatcher(replace(ONE_AT_A_TIME, bind="arrival"), SelectionSettings("round_robin"))
    held = [await take_slot(at, wanted()) for _ in range(2)]
    waiting = asyncio.create_task(take_slot(at, wanted()))
    await soon()
    at.tracked[0].breaker.note_failure(0.0)
    held[1].close()
    assert (await waiting).engine == "engine 1"


@virtually
async def test_an_engine_takes_no_more_while_enough_is_to_be_prefilled_there() -> None:
    at = dispatcher(QueueSettings(max_prefill_tokens=100), engines=1)
    first = await take_slot(at, wanted(150))
    waiting = asyncio.create_task(take_slot(at, wanted()))
    await soon()
    assert not waiting.done()
    first.note_prefill()
    assert (await waiting).engine == "engine 0"


@virtually
async def test_an_engine_takes_no_more_while_its_kv_is_expected_to_fill() -> None:
    at = dispatcher(QueueSettings(max_tokens=200), engines=1)
    first = await take_slot(at, replace(wanted(150), max_output_tokens=60))
    waiting = asyncio.create_task(take_slot(at, wanted()))
    await soon()
    assert not waiting.done()
    first.note_tokens(60)
    first.close()
    assert (await waiting).engine == "engine 0"


@virtually
async def test_updates_neither_take_the_places_of_real_requests_nor_wait_for_them() -> None:
    at = dispatcher(engines=1)
    update = PlacementRequest(10, max_output_tokens=0, update=True)
    first = await take_slot(at, update)
    real = await take_slot(at, wanted())
    again = await take_slot(at, update)
    for place in (first, real, again):
        place.close()
    assert nothing_on(at.tracked[0].load)


@virtually
async def test_a_stale_report_is_ignored() -> None:
    at = dispatcher(QueueSettings(), SelectionSettings("gimbal"))
    for index, usage in enumerate((0.95, 0.1)):
        at.report(index, EngineReport(usage, 0, 0, 0))
    assert (await take_slot(at, wanted())).placement().why == "lowest_kv_usage"
    await asyncio.sleep(SchedulingSettings().stale_s)
    assert (await take_slot(at, wanted())).placement().why == "no_metrics"


@virtually
async def test_a_batch_takes_as_many_places_as_it_has_requests() -> None:
    at = dispatcher(QueueSettings(max_running=4), engines=1)
    batch = await take_slot(at, replace(wanted(), requests=3))
    await take_slot(at, wanted())
    waits = asyncio.create_task(take_slot(at, wanted()))
    await soon()
    assert (at.tracked[0].load.running, at.waiting) == (4, 1)
    batch.close()
    (await waits).close()
    assert at.tracked[0].load.running == 1


@virtually
async def test_a_place_says_where_it_is_and_why() -> None:
    at = dispatcher(selection=SelectionSettings("round_robin"))
    placed = (await take_slot(at, wanted())).placement()
    assert str(placed) == "pair-0 (round_robin: turn)"


@virtually
async def test_requests_that_share_a_long_prefix_meet_on_one_engine() -> None:
    at = dispatcher(QueueSettings(), SelectionSettings("scored"))
    shared = list(range(1280))

    async def ask(*more: int) -> EngineSlot[str]:
        return await take_slot(
            at, PlacementRequest(len(shared) + 1, ids=[*shared, *more], max_output_tokens=1)
        )

    first = await ask(1)
    first.note_tokens(1)
    second = await ask(2)
    assert second.engine == first.engine
    assert at.tracked[0].load.prefill_tokens == 1, "what is known to be there is not counted"


ENGINES = 4


async def ask_scored(at: Dispatcher[str], start: int, *own: int) -> EngineSlot[str]:
    """Ask for 16,000 tokens from `start` on, and for tokens of its own."""
    ids = [*range(start, start + 16_000), *own]
    return await take_slot(at, PlacementRequest(len(ids), ids))


@virtually
async def test_a_burst_of_eight_computes_its_shared_prefix_on_one_engine() -> None:
    at = dispatcher(QueueSettings(), SelectionSettings("scored"), ENGINES)
    for agent in range(8):
        await ask_scored(at, 0, *range(-200 - 200 * agent, -200 * agent))
    computed = sum(one.load.prefill_tokens for one in at.tracked)
    assert computed < 16_000 + 8 * 300, "own tokens, and the rest of a block"


@virtually
async def test_siblings_leave_the_holder_of_their_prefix_once_it_is_overloaded() -> None:
    at = dispatcher(QueueSettings(), SelectionSettings("scored"), ENGINES)
    holder = (await ask_scored(at, 0)).engine
    at.tracked[0].load.prefill_tokens += 40_000
    assert holder == at.tracked[0].engine
    assert (await ask_scored(at, 0)).engine != holder


@virtually
async def test_random_prompts_are_spread_within_the_work_of_one() -> None:
    at = dispatcher(QueueSettings(), SelectionSettings("scored"), ENGINES)
    draws = random.Random(0)
    for number in range(200):
        ids = range(number << 20, (number << 20) + draws.randrange(1, 3000))
        await take_slot(at, PlacementRequest(len(ids), ids))
    work = [one.load.prefill_tokens + 8 * one.load.output_tokens for one in at.tracked]
    assert max(work) - min(work) <= 3000 + 8 * 128


def without_a_queue() -> Dispatcher[str]:
    """Algorithm 1 with fresh reports of engines whose KV is half empty."""
    named = [(f"engine {at}", f"pair-{at}", Breaker(BreakerSettings())) for at in range(ENGINES)]
    at = Dispatcher(named, SchedulingSettings(SelectionSettings("gimbal")), lambda: 0.0)
    for index in range(ENGINES):
        at.report(index, EngineReport(0.5, 0, 0, 0))
    return at


def given_a_slot(at: Dispatcher[str], **hints: object) -> EngineSlot[str]:
    slot = at.submit(wanted(**hints))
    assert isinstance(slot, EngineSlot)
    return slot


@pytest.mark.parametrize("busiest", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_one_user_among_ten_never_holds_more_than_a_bounded_share_of_an_engine(
    busiest: float, seed: int
) -> None:
    at, draw, running = without_a_queue(), random.Random(seed), list[tuple[str, EngineSlot[str]]]()
    for _ in range(400):
        user = "user 0" if draw.random() < busiest else f"user {draw.randrange(10)}"
        slot = given_a_slot(at, user="tenant", end_user=user)
        running.append((user, slot))
        here = [whose for whose, other in running if other.engine == slot.engine]
        bound = ceil(1.5 * len(running) / ENGINES)
        assert here.count(user) <= bound
        assert slot.why == "turn" or len(here) <= bound, (
            "but for users that come for the first time"
        )
        while running and draw.random() < 0.45:
            running.pop(draw.randrange(len(running)))[1].close()
    assert at.choices["user_affinity"] > 100, "and yet users come back to their engines"


def test_one_tenants_requests_go_to_one_engine_as_long_as_it_has_its_share() -> None:
    at = without_a_queue()
    for _ in range(20):
        given_a_slot(at, user="tenant").close()
    assert at.choices == {"turn": 1, "user_affinity": 19}
    engines = [given_a_slot(at, user="tenant").engine for _ in range(400)]
    assert max(engines.count(engine) for engine in at.engines) <= 150


class Batch:
    """Requests of a batch, which leave their slots in the order in which they are preempted."""

    def __init__(self, at: Dispatcher[str]) -> None:
        self.at = at
        self.slots: dict[int, EngineSlot[str]] = {}
        self.preempted: list[int] = []
        self.asked: list[asyncio.Task[None]] = []

    async def ask(self, number: int, tokens: int = 10) -> None:
        def leave() -> None:
            self.preempted.append(number)
            asyncio.get_running_loop().call_soon(self.slots.pop(number).close)

        request = wanted(tokens, tier="batch", on_preempt=leave)
        self.slots[number] = await take_slot(self.at, request)

    async def ask_all(self, requests: int) -> None:
        self.asked += [asyncio.create_task(self.ask(number)) for number in range(requests)]
        await soon()

    async def give_up(self) -> None:
        for task in self.asked:
            task.cancel()
        await soon()


@pytest.mark.parametrize("policy", ["round_robin", "gimbal", "least_running", "scored"])
def test_a_batch_is_spread_over_idle_engines_by_every_policy(policy: str) -> None:
    async def ask() -> None:
        at = dispatcher(QueueSettings(), SelectionSettings(policy), engines=4)
        batch = Batch(at)
        await batch.ask_all(32)
        assert [one.batch_load.running for one in at.tracked] == 4 * [8]

    run_virtual(ask())


@virtually
async def test_requests_of_a_batch_stay_on_a_remote_server_which_would_be_paid_twice() -> None:
    at = dispatcher(QueueSettings(), engines=1, preempts=False)
    batch = Batch(at)
    await batch.ask_all(8)
    online = await take_slot(at, wanted(5000))
    assert not batch.preempted and len(batch.slots) == 8
    await batch.ask_all(1)
    assert at.tracked[0].batch_load.running == 9
    online.close()


@virtually
async def test_online_requests_get_their_slot_at_once_and_the_latest_of_a_batch_leaves() -> None:
    at = dispatcher(QueueSettings(max_running=2, age_s=1.0), engines=1)
    batch = Batch(at)
    await batch.ask_all(3)
    for slot in batch.slots.values():
        slot.note_prefill()
    await asyncio.sleep(100.0)
    online = [at.submit(wanted()), at.submit(wanted())]
    assert all(isinstance(slot, EngineSlot) for slot in online) and batch.preempted == [1, 0]
    await soon()
    waits = at.submit(wanted())
    assert not isinstance(waits, EngineSlot)
    online[0].close()  # type: ignore[union-attr]
    await soon()
    assert waits.slot is not None and not batch.slots, "however long the batch has waited"
    online[1].close()  # type: ignore[union-attr]
    waits.slot.close()
    await soon()
    assert set(batch.slots) == {2}
    await batch.give_up()


@virtually
async def test_a_batch_takes_no_place_among_those_that_may_wait() -> None:
    at = dispatcher(QueueSettings(max_running=1, max_waiting=1), engines=1)
    first = at.submit(wanted())
    batch = Batch(at)
    await batch.ask_all(2000)
    assert len(at.batches.entries) == 2000 and at.waiting == 0
    at.submit(wanted())
    with pytest.raises(Overloaded):
        at.submit(wanted())
    await asyncio.sleep(100.0)
    assert not any(task.done() for task in batch.asked), "a batch waits as long as it must"
    first.close()  # type: ignore[union-attr]
    await batch.give_up()
    assert not at.batches.entries


@virtually
async def test_a_batch_runs_alone_without_limit_and_next_to_online_work_as_its_pace_allows() -> (
    None
):
    at = dispatcher(QueueSettings(), engines=1)
    batch = Batch(at)
    for number in range(8):
        await batch.ask(number)
    for running, token_s in ((1, 1.0), (10, 1.1)) * 5:
        at.tracked[0].pace.note(running, token_s)
    online = at.submit(wanted())
    assert batch.preempted == [7, 6, 5, 4]
    await soon()
    online.close()  # type: ignore[union-attr]


@virtually
async def test_a_batch_returns_to_an_engine_that_has_been_idle_for_a_second() -> None:
    at = dispatcher(QueueSettings(), engines=1)
    online = at.submit(wanted())
    batch = Batch(at)
    await batch.ask_all(3)
    assert not batch.slots, "an online prompt is there"
    await asyncio.sleep(5.0)
    online.close()  # type: ignore[union-attr]
    await soon()
    assert len(batch.slots) == 1, "no load was measured"
    await asyncio.sleep(2.0)
    assert len(batch.slots) == 3
    await batch.give_up()


@virtually
async def test_a_choice_for_online_requests_does_not_see_batches() -> None:
    at = dispatcher(QueueSettings(), SelectionSettings("least_running"))
    online = [at.submit(wanted())]
    batch = Batch(at)
    for number in range(5):
        await batch.ask(number)
    assert {slot.engine for slot in batch.slots.values()} == {"engine 1"}
    online += [at.submit(wanted()) for _ in range(3)]
    engines = [slot.engine for slot in online if isinstance(slot, EngineSlot)]
    assert engines == ["engine 0", "engine 1"] * 2


@virtually
async def test_a_server_prefills_a_batch_only_while_no_online_prompt_is_there() -> None:
    at = dispatcher(QueueSettings(), engines=1, decodes=False)
    batch = Batch(at)
    await batch.ask(0, 3000)
    waits = asyncio.create_task(batch.ask(1))
    await soon()
    assert set(batch.slots) == {0}, "its prompt would keep an online one waiting"
    online = at.submit(wanted())
    assert batch.preempted == [0]
    await soon()
    assert not waits.done()
    online.close()  # type: ignore[union-attr]
    await waits


@virtually
async def test_a_request_is_served_once_though_a_slot_closes_as_it_is_preempted() -> None:
    at = dispatcher(QueueSettings(max_running=2), engines=1)
    slots: list[EngineSlot[str]] = []
    for _ in range(2):
        request = wanted(tier="batch", on_preempt=lambda: slots.pop().close())
        slots.append(await take_slot(at, request))
    online = at.submit(wanted())
    assert isinstance(online, EngineSlot) and at.waiting == 0
    assert len(slots) == 1 and at.tracked[0].running == 2
    online.close()
    slots[0].close()
    assert at.tracked[0].running == 0


@virtually
async def test_an_engine_that_drains_preempts_batches() -> None:
    at = dispatcher(QueueSettings())
    batch = Batch(at)
    for number in range(4):
        await batch.ask(number)
    drained = at.drain(at.engines[0])
    assert len(batch.preempted) == 2
    await soon()
    assert drained.running == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "cancel", "prefilled", "write", "complete", "fail"]),
        st.integers(0, 9),
    ),
    max_size=60,
)


@pytest.mark.parametrize("order", ORDERS)
@given(steps=STEPS, bind=st.sampled_from(["arrival", "place"]))
def test_however_requests_end_nothing_is_in_flight_and_none_waits(
    order: str, steps: list[tuple[str, int]], bind: str
) -> None:
    async def live() -> None:
        queue = QueueSettings(order, bind, max_running=2, max_prefill_tokens=60, wait_s=1e6)
        at = dispatcher(queue)
        tasks: list[asyncio.Task[EngineSlot[str]]] = []
        for number, (what, which) in enumerate(steps):
            had = [task.result() for task in tasks if task.done() and not task.cancelled()]
            if what == "ask":
                one = PlacementRequest(
                    10 * (1 + which), update=which == 3, affinity="a" if which > 7 else None
                )
                hints = Hints(f"u{which}", f"p{number}")
                if which in (5, 6):
                    leave = partial(_leave, tasks, len(tasks))
                    hints = replace(hints, tier="batch", on_preempt=leave)
                tasks.append(asyncio.create_task(take_slot(at, replace(one, hints=hints))))
            elif what == "cancel" and tasks:
                tasks[which % len(tasks)].cancel()
            elif had:
                _step(had[which % len(had)], what)
            await soon()
            for candidate in at.tracked:
                assert candidate.running - candidate.load.updates <= 2
        while any(
            not task.done() for task in tasks
        ):  # requests with a slot leave: all others get theirs
            for task in tasks:
                if task.done() and not task.cancelled():
                    task.result().close()
            await soon()
        for task in tasks:
            if not task.cancelled():
                task.result().close()
        for candidate in at.tracked:
            assert nothing_on(candidate.load) and nothing_on(candidate.batch_load)
            assert not candidate.batches
        assert at.waiting == 0 and not at.batches.entries

    run_virtual(live())


def _leave(tasks: list[asyncio.Task[EngineSlot[str]]], number: int) -> None:
    if not tasks[number].cancel():
        tasks[number].result().close()


def _step(place: EngineSlot[str], what: str) -> None:
    if what == "prefilled":
        place.note_prefill()
    elif what == "write":
        place.note_tokens(7)
    else:
        if what == "complete":
            place.note_completion()
        place.close()
