"""The orders of waiting requests, none of which starves a request."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.core.engine import Hints, Session
from shell_router.files.read import check
from shell_router.routing.placement import RoutingFeatures
from shell_router.routing.queue import (
    IDLE_S,
    KEPT_PROGRAMS,
    ORDERS,
    QueueEntry,
    QueueSettings,
    RequestQueue,
    sort_key,
)

NEVER_AGE = 1e9


def asked(tokens: int = 10, **hints: object) -> RoutingFeatures:
    return RoutingFeatures(tokens, tokens, tokens, Hints(**hints))  # type: ignore[arg-type]


def first(
    order: str, *waiting: QueueEntry, queue: RequestQueue | None = None, now_s: float = 1.0
) -> int:
    """The index of the one that is next."""
    known = queue or RequestQueue(QueueSettings(order))
    return min(range(len(waiting)), key=lambda at: sort_key(waiting[at], known, now_s))


def joined(queue: RequestQueue, at_s: float = 0.0, **hints: object) -> QueueEntry:
    """A request of 10 tokens that waits there; `session` is the name of its session."""
    if session := hints.pop("session", None):
        hints["session"] = Session(str(session))
    entry = QueueEntry(asked(**hints), at_s)
    queue.join(entry)
    return entry


def serve(queue: RequestQueue, entry: QueueEntry, output_tokens: int = 0) -> None:
    queue.take(entry, 10)
    queue.count_tokens(entry.program, 0, output_tokens)
    queue.end(entry.program)


def test_first_come_first_served() -> None:
    assert first("fcfs", QueueEntry(asked(1), 0.9), QueueEntry(asked(99), 0.1)) == 1


def test_the_root_of_a_running_graph_goes_before_proposers_of_later_runs_aged_ones_too() -> None:
    proposers = [QueueEntry(asked(began_s=2.0), 2.0), QueueEntry(asked(began_s=3.0), 3.0)]
    root = QueueEntry(asked(began_s=1.0), 9.0)
    assert first("fcfs", *proposers, root, now_s=9.0) == 2
    assert first("shortest_total", *proposers, root, now_s=9.0) == 0, "it has not waited"


def test_the_shortest_prefill_first_by_what_is_new() -> None:
    long_but_known = replace(asked(900), new_tokens=5)
    assert (
        first("shortest_prefill", QueueEntry(asked(30), 0.0), QueueEntry(long_but_known, 0.5)) == 1
    )


def test_aged_requests_go_first_the_longest_waiting_before_all() -> None:
    waiting = [QueueEntry(asked(1), 5.9), QueueEntry(asked(900), 0.9), QueueEntry(asked(800), 0.8)]
    assert first("shortest_prefill", *waiting, now_s=5.7) == 0
    assert first("shortest_prefill", *waiting, now_s=6.0) == 2


def test_the_program_with_least_to_come_goes_first() -> None:
    nearly_done, begun = asked(50, total_tokens=60.0), asked(20, total_tokens=900.0)
    assert first("shortest_total", QueueEntry(begun, 0.0), QueueEntry(nearly_done, 0.5)) == 1


def test_missing_s_turns_raises_a_request_above_all_that_missed_fewer() -> None:
    long, short = asked(900, total_tokens=900.0), asked(5, total_tokens=5.0)
    misses = QueueSettings().starvation_misses
    assert first("shortest_total", QueueEntry(long, 0.0, misses - 1), QueueEntry(short, 0.5)) == 1
    assert (
        first("shortest_total", QueueEntry(long, 0.0, misses), QueueEntry(short, 0.5, misses - 1))
        == 0
    )


def test_a_promoted_programs_next_q_requests_start_as_high() -> None:
    queue = RequestQueue(QueueSettings("shortest_total", quantum=2))
    for missed, level in ((queue.settings.starvation_misses, -1), (0, -1), (0, 0)):
        entry = QueueEntry(asked(900, user="ann", program="slow", total_tokens=900.0), 0.0, missed)
        queue.join(entry)
        queue.take(entry, 900)
        assert entry.program.level == level
        bobs = joined(queue, user="bob", program="slow")
        assert bobs.program.level == 0, "another tenant's program of that name has not risen"


def test_a_session_counts_what_it_was_served_as_what_it_has_left() -> None:
    queue = RequestQueue(QueueSettings("shortest_total"))
    call = joined(queue, session="loop", total_tokens=5.0)
    chat = joined(queue, 0.1, session="chat", total_tokens=900.0)
    assert first("shortest_total", call, chat, queue=queue) == 0
    for _ in range(40):
        serve(queue, joined(queue, session="loop"), 10)
    assert first("shortest_total", call, chat, queue=queue) == 1
    graph = joined(queue, program="run", total_tokens=5.0)
    serve(queue, joined(queue, program="run"), 1000)
    assert first("shortest_total", graph, chat, queue=queue) == 0, "what a run has left is known"


def test_the_user_who_was_served_least_goes_first() -> None:
    queue = RequestQueue(QueueSettings("least_attained"))
    busy, quiet = joined(queue, user="busy"), joined(queue, user="quiet")
    queue.count_tokens(quiet.program, 20, 20)
    queue.count_tokens(busy.program, 20, 500)
    assert first(
        "least_attained",
        QueueEntry(asked(user="busy"), 0.0),
        QueueEntry(asked(user="quiet"), 0.5),
        queue=queue,
    )


def test_a_users_weight_is_its_share() -> None:
    queue = RequestQueue(QueueSettings("least_attained", weights={"paying": 4.0}))
    free, paying = waiting = [joined(queue, user=user) for user in ("free", "paying")]
    queue.count_tokens(paying.program, 100, 100)
    queue.count_tokens(free.program, 30, 30)
    assert first("least_attained", *waiting, queue=queue) == 1
    queue.count_tokens(paying.program, 0, 100)
    assert first("least_attained", *waiting, queue=queue) == 0


def test_a_flood_of_one_users_old_requests_does_not_go_before_anothers() -> None:
    """Were they to age, the fair order would become first come, first served just when it is
    needed.
    """
    queue = RequestQueue(QueueSettings("least_attained"))
    flood = [QueueEntry(asked(user="flood"), float(number)) for number in range(100)]
    for entry in flood:
        queue.join(entry)
    queue.count_tokens(flood[0].program, 1000)
    quiet = joined(queue, 200.0, user="quiet")
    assert queue.count_attained("quiet") == 1000
    queue.count_tokens(flood[0].program, 1)
    assert first("least_attained", *flood, quiet, queue=queue, now_s=200.1) == 100
    assert first("shortest_prefill", *flood, quiet, now_s=200.1) == 0


def test_a_user_who_was_away_gets_no_credit_for_it() -> None:
    queue = RequestQueue(QueueSettings("least_attained"))
    queue.count_tokens(joined(queue, user="busy").program, 5000)
    joined(queue, 1.0, user="new")
    assert queue.count_attained("new") == queue.count_attained("busy") == 5000


@pytest.mark.parametrize("chat", [{}, {"session": "chat"}, {"program": "run"}])
def test_a_chat_goes_before_the_calls_of_a_loop_of_its_tenant(chat: dict[str, object]) -> None:
    queue = RequestQueue(QueueSettings("least_attained"))
    running = joined(queue, user="ann", session="loop")
    queue.take(running, 10)
    loop = [joined(queue, float(at), user="ann", session="loop") for at in range(400)]
    last = joined(queue, 500.0, user="ann", **chat)
    assert first("least_attained", *loop, last, queue=queue) == 400, "the loop has a place"
    serve(queue, last, 30)
    assert first("least_attained", *loop, joined(queue, 501.0, user="ann"), queue=queue) == 400
    queue.end(running.program)
    following = [joined(queue, 502.0 + at, user="ann") for at in range(9)]
    assert first("least_attained", *loop, *following, queue=queue) == 0, "nor is it starved"


def test_of_a_tenants_programs_running_graphs_go_on_first_in_the_order_of_their_beginning() -> None:
    queue = RequestQueue(QueueSettings("least_attained"))
    for run in ("first", "second"):
        serve(queue, joined(queue, user="ann", program=run), 900)
    proposer = joined(queue, 3.0, user="ann", program="third", began_s=3.0)
    goes_on = {"user": "ann", "goes_on": True}
    second = joined(queue, 4.0, program="second", began_s=2.0, **goes_on)
    root = joined(queue, 5.0, program="first", began_s=1.0, **goes_on)
    assert first("least_attained", proposer, second, root, queue=queue) == 2
    assert first("least_attained", proposer, second, queue=queue) == 1
    other = joined(queue, 6.0, user="bob")
    queue.count_tokens(root.program, 1)
    assert first("least_attained", root, other, queue=queue) == 1, "tenants come before programs"


def test_a_tenants_share_does_not_grow_with_its_programs() -> None:
    queue = RequestQueue(QueueSettings("least_attained"))
    served = {"many": 0, "one": 0}
    for number in range(60):
        crowd = [joined(queue, user="many", session=f"{number}/{at}") for at in range(3)]
        waiting = [*crowd, joined(queue, user="one", session="only")]
        entry = waiting[first("least_attained", *waiting, queue=queue)]
        served[entry.program.user or ""] += 1
        queue.take(entry, 10)
    assert abs(served["many"] - served["one"]) <= 1


def test_a_session_that_pauses_keeps_what_it_was_served_until_it_is_long_idle() -> None:
    queue = RequestQueue(QueueSettings("least_attained"))
    serve(queue, joined(queue, user="ann", session="loop"), 100)
    back = joined(queue, IDLE_S, user="ann", session="loop")
    assert back.program.tokens == 10 + 2 * 100
    serve(queue, back)
    joined(queue, 2 * IDLE_S + 1, user="ann", session="other")
    assert joined(queue, 2 * IDLE_S + 1, user="ann", session="loop").program.tokens == 0


def test_only_so_many_programs_are_remembered_the_latest_ones() -> None:
    queue = RequestQueue(QueueSettings())
    for number in range(KEPT_PROGRAMS + 1):
        serve(queue, joined(queue, session=f"{number}"))
    assert joined(queue, session=f"{KEPT_PROGRAMS}").program.tokens == 10
    assert joined(queue, session="0").program.tokens == 0


def test_updates_wait_behind_real_requests_however_long_they_have_waited() -> None:
    update, real = QueueEntry(replace(asked(1), update=True), 0.0), QueueEntry(asked(900), 4.0)
    for order in ORDERS:
        assert first(order, update, real, now_s=4.5) == 1
        assert first(order, update, real, now_s=500.0) == 1


@pytest.mark.parametrize("order", ORDERS)
def test_tiers_go_before_any_order_and_flex_waits_for_all_others(order: str) -> None:
    flex = QueueEntry(asked(1, tier="flex"), 0.0)
    default = QueueEntry(asked(5), 0.5)
    priority = QueueEntry(asked(900, tier="priority"), 1.0)
    update = QueueEntry(replace(asked(1, tier="priority"), update=True), 0.0)
    assert first(order, flex, default, priority, update, now_s=1.0) == 2
    assert first(order, flex, default, update, now_s=500.0) == 1
    assert first(order, update, flex, now_s=500.0) == 1
    aged = first(order, default, priority, now_s=QueueSettings().age_s + 0.7)
    assert aged == (0 if ORDERS[order].ages else 1)


ARRIVALS = st.lists(
    st.tuples(
        st.floats(0, 20),
        st.integers(1, 3000),
        st.sampled_from(["alice", "bob", "carol"]),
        st.sampled_from([None, "p", "q"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("order", [name for name, order in ORDERS.items() if order.ages])
@given(arrivals=ARRIVALS, service_s=st.floats(0.05, 3.0))
def test_no_real_request_waits_longer_than_to_age_and_for_those_before_it(
    order: str, arrivals: list[tuple[float, int, str, str | None, bool]], service_s: float
) -> None:
    """One engine that serves one request at a time, each in the same time."""
    queue = RequestQueue(QueueSettings(order, age_s=5.0))
    coming = [
        QueueEntry(
            replace(asked(tokens, user=user, program=program, total_tokens=tokens), update=update),
            at_s,
        )
        for at_s, tokens, user, program, update in sorted(arrivals, key=lambda one: one[0])
    ]
    before = {id(one): number for number, one in enumerate(coming)}
    waiting, now_s = list[QueueEntry](), 0.0
    while coming or waiting:
        now_s = max(now_s, coming[0].arrived_s) if not waiting else now_s
        while coming and coming[0].arrived_s <= now_s:
            waiting.append(coming.pop(0))
            queue.join(waiting[-1])
        one = min(waiting, key=lambda each: sort_key(each, queue, now_s))
        waiting.remove(one)
        queue.take(one, one.features.new_tokens)
        queue.end(one.program)
        assert (
            one.features.update
            or now_s - one.arrived_s
            <= queue.settings.age_s + service_s * (1 + before[id(one)]) + 1e-6
        )
        now_s += service_s


@given(
    arrivals=st.lists(
        st.lists(st.integers(1, 3000), min_size=1, max_size=3), min_size=1, max_size=30
    )
)
def test_without_aging_promotion_alone_keeps_the_shortest_total_from_starving_requests(
    arrivals: list[list[int]],
) -> None:
    """One is served after each turn's arrivals. Only who came before, or while S others were
    served, can go before.
    """
    queue = RequestQueue(QueueSettings("shortest_total", age_s=NEVER_AGE, starvation_misses=3))
    waiting: list[tuple[int, int]] = []  # turn of arrival, tokens
    arrived_by: list[int] = []  # how many had arrived when each turn was given
    served = 0
    while served < len(arrivals) or waiting:
        waiting += [
            (served, tokens) for tokens in (arrivals[served] if served < len(arrivals) else ())
        ]
        arrived_by.append(served + len(waiting))

        def key(one: tuple[int, int], given: int = served) -> tuple[float, ...]:
            at = QueueEntry(asked(total_tokens=float(one[1])), one[0], given - one[0])
            return sort_key(at, queue, 0.0)

        entered, tokens = min(waiting, key=key)
        waiting.remove((entered, tokens))
        assert served < arrived_by[min(served, entered + queue.settings.starvation_misses)]
        served += 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"order": "luck"}, " or ".join(f"'{name}'" for name in ORDERS)),
        ({"bind": "later"}, "bind"),
        ({"max_running": 0}, "max_running"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"quantum": 0}, "quantum"),
        ({"wait_s": 0.0}, "wait_s"),
        ({"age_s": -1.0}, "age_s"),
        ({"order": "least_attained", "weights": {"alice": 0.0}}, "weights.alice"),
        (
            {"weights": {"alice": 2.0}},
            "weights count under order: least_attained, and order is fcfs",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(fields: dict[str, object], named: str) -> None:
    _, (problem,) = check(QueueSettings, fields)
    assert named in problem.message
