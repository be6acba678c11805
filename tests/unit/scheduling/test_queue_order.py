"""The orders of waiting requests, and that none of them lets anybody starve."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shell_router.core.hints import Hints
from shell_router.errors import ConfigError
from shell_router.scheduling.engine_state import Asked
from shell_router.scheduling.queue_memory import QueueMemory
from shell_router.scheduling.queue_order import ORDERS, QueueSettings, Waiting, priority, turn

NEVER_AGE = 1e9


def asked(tokens: int = 10, **hints: object) -> Asked:
    return Asked(tokens, tokens, tokens, Hints(**hints))  # type: ignore[arg-type]


def first(order: str, *waiting: Waiting, memory: QueueMemory | None = None, now_s: float = 1.0) -> int:
    """The index of the one that is next."""
    known, chosen = memory or QueueMemory(), QueueSettings(order)
    return min(range(len(waiting)), key=lambda at: turn(waiting[at], known, chosen, now_s))


def test_first_come_first_served() -> None:
    assert first("fcfs", Waiting(asked(1), 0.9), Waiting(asked(99), 0.1)) == 1


def test_the_shortest_prefill_first_by_what_is_new() -> None:
    long_but_known = replace(asked(900), new_tokens=5)
    assert first("shortest_prefill", Waiting(asked(30), 0.0), Waiting(long_but_known, 0.5)) == 1


def test_whoever_has_waited_long_goes_first_the_longest_waiting_before_all() -> None:
    waiting = [Waiting(asked(1), 5.9), Waiting(asked(900), 0.9), Waiting(asked(800), 0.8)]
    assert first("shortest_prefill", *waiting, now_s=5.7) == 0
    assert first("shortest_prefill", *waiting, now_s=6.0) == 2


def test_the_program_with_least_to_come_goes_first() -> None:
    nearly_done, begun = asked(50, total_tokens=60.0), asked(20, total_tokens=900.0)
    assert first("shortest_total", Waiting(begun, 0.0), Waiting(nearly_done, 0.5)) == 1


def test_missing_s_turns_raises_a_request_above_all_that_missed_fewer() -> None:
    long, short = asked(900, total_tokens=900.0), asked(5, total_tokens=5.0)
    misses = QueueSettings().starvation_misses
    assert first("shortest_total", Waiting(long, 0.0, misses - 1), Waiting(short, 0.5)) == 1
    assert first("shortest_total", Waiting(long, 0.0, misses), Waiting(short, 0.5, misses - 1)) == 0


def test_a_promoted_programs_next_q_requests_start_as_high() -> None:
    memory, quantum = QueueMemory(), 2
    one = asked(900, program="slow", total_tokens=900.0)
    memory.chosen(one, 1, quantum)
    for level in (-1, -1, 0):
        assert memory.level("slow") == level
        memory.chosen(one, 0, quantum)


def test_the_oldest_program_goes_first_and_its_slowest_sibling_before_the_others() -> None:
    memory = QueueMemory()
    old = [asked(10, program="old", path_tokens=path) for path in (100.0, 400.0)]
    young = asked(10, program="young", path_tokens=9999.0)
    for at_s, one in ((0.0, old[0]), (0.1, young), (0.2, old[1])):
        memory.arrived(one, at_s)
    waiting = [Waiting(old[0], 0.0), Waiting(young, 0.1), Waiting(old[1], 0.2)]
    assert first("critical_path", *waiting, memory=memory) == 2
    assert first("critical_path", *waiting[:2], memory=memory) == 0


def test_the_user_who_was_served_least_goes_first() -> None:
    memory = QueueMemory()
    for user in ("busy", "quiet"):
        memory.arrived(asked(user=user), 0.0)
    memory.served("quiet", 20, 20)
    memory.served("busy", 20, 500)
    assert first("least_attained", Waiting(asked(user="busy"), 0.0), Waiting(asked(user="quiet"), 0.5), memory=memory)


def test_a_user_who_was_away_gets_no_credit_for_it() -> None:
    memory = QueueMemory()
    memory.arrived(asked(user="busy"), 0.0)
    memory.served("busy", 5000)
    memory.arrived(asked(user="new"), 1.0)
    assert memory.attained("new") == memory.attained("busy") == 5000


def test_updates_wait_behind_all_that_somebody_waits_for_but_not_for_ever() -> None:
    update, real = Waiting(replace(asked(1), update=True), 0.0), Waiting(asked(900), 4.0)
    for order in ORDERS:
        assert first(order, update, real, now_s=4.5) == 1
        assert first(order, update, real, now_s=5.5) == 0


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


@pytest.mark.parametrize("order", ORDERS)
@given(arrivals=ARRIVALS, service_s=st.floats(0.05, 3.0))
@settings(max_examples=60, deadline=None)
def test_nobody_waits_longer_than_to_age_and_for_those_who_came_before(
    order: str, arrivals: list[tuple[float, int, str, str | None, bool]], service_s: float
) -> None:
    """One engine that serves one request at a time, each in the same time."""
    chosen, memory = QueueSettings(order, age_s=5.0), QueueMemory()
    coming = [
        Waiting(
            replace(asked(tokens, user=user, program=program, total_tokens=tokens, path_tokens=tokens), update=update),
            at_s,
        )
        for at_s, tokens, user, program, update in sorted(arrivals, key=lambda one: one[0])
    ]
    before = {id(one): number for number, one in enumerate(coming)}
    waiting, now_s = list[Waiting](), 0.0
    while coming or waiting:
        now_s = max(now_s, coming[0].arrived_s) if not waiting else now_s
        while coming and coming[0].arrived_s <= now_s:
            waiting.append(coming.pop(0))
            memory.arrived(waiting[-1].asked, waiting[-1].arrived_s)
        one = min(waiting, key=lambda each: turn(each, memory, chosen, now_s))
        waiting.remove(one)
        memory.chosen(one.asked, 0, chosen.quantum)
        memory.left(one.asked)
        assert now_s - one.arrived_s <= chosen.age_s + service_s * (1 + before[id(one)]) + 1e-6
        now_s += service_s


@given(arrivals=st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=3), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_without_aging_promotion_alone_keeps_the_shortest_total_from_starving_anybody(
    arrivals: list[list[int]],
) -> None:
    """One is served after each turn's arrivals. Only who came before, or while S others were served, can go before."""
    chosen, memory = QueueSettings("shortest_total", age_s=NEVER_AGE, starvation_misses=3), QueueMemory()
    waiting: list[tuple[int, int]] = []  # turn of arrival, tokens
    arrived_by: list[int] = []  # how many had arrived when each turn was given
    served = 0
    while served < len(arrivals) or waiting:
        waiting += [(served, tokens) for tokens in (arrivals[served] if served < len(arrivals) else ())]
        arrived_by.append(served + len(waiting))

        def key(one: tuple[int, int], given: int = served) -> tuple[float, ...]:
            at = Waiting(asked(total_tokens=float(one[1])), one[0], given - one[0])
            return turn(at, memory, chosen, 0.0)

        entered, tokens = min(waiting, key=key)
        waiting.remove((entered, tokens))
        assert served < arrived_by[min(served, entered + chosen.starvation_misses)]
        served += 1


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"order": "luck"}, "fcfs, shortest_prefill, shortest_total, critical_path, least_attained"),
        ({"bind": "later"}, "bind"),
        ({"max_running": 0}, "max_running"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"starvation_misses": 0}, "starvation_misses"),
        ({"quantum": 0}, "quantum"),
        ({"wait_s": 0.0}, "wait_s"),
        ({"age_s": -1.0}, "age_s"),
    ],
)
def test_bad_settings_are_refused_by_name(fields: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        QueueSettings(**fields)  # type: ignore[arg-type]


def test_an_engines_own_queue_gets_the_same_order_as_a_number() -> None:
    memory = QueueMemory()
    short, long = Waiting(asked(30, total_tokens=40.0), 0.0), Waiting(asked(900, total_tokens=1900.0), 0.0)
    for order in ("shortest_prefill", "shortest_total"):
        assert priority(short, memory, QueueSettings(order)) < priority(long, memory, QueueSettings(order))
    promoted = replace(long, missed=QueueSettings().starvation_misses)
    chosen = QueueSettings("shortest_total")
    assert priority(promoted, memory, chosen) < priority(short, memory, chosen)
