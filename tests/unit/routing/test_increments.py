import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.core.engine import PrefillCost
from shell_router.routing.increments import (
    UNMEASURED,
    MeasuredCost,
    PrefillLoad,
    Remainder,
    fewest_tokens,
    tokens_per_event,
    tokens_until_due,
)

COST = PrefillCost(fixed_s=0.01, token_s=0.001)  # an update of 30 tokens is worth three fixed parts
FAR = Remainder(tokens=1000)


def due_at(load: PrefillLoad, rest: Remainder = FAR) -> int:
    """The fewest unsent tokens at which an update is due."""
    return next(
        unsent for unsent in range(1, 100_000) if tokens_until_due(load, 0.0, unsent, rest) == 0
    )


# --- when an update is due


def test_an_update_is_never_due_while_it_holds_less_than_three_fixed_parts() -> None:
    assert fewest_tokens(COST) == pytest.approx(30)
    assert due_at(PrefillLoad(COST), Remainder(tokens=1)) == 31


def test_on_an_idle_server_it_is_due_at_the_economic_order_quantity() -> None:
    for left in (200, 1000, 5000):
        assert due_at(PrefillLoad(COST), Remainder(tokens=left)) == pytest.approx(
            math.sqrt(2 * 3 * 10 * left), rel=0.01
        )


def test_the_nearer_the_end_the_smaller_the_update() -> None:
    sizes = [due_at(PrefillLoad(COST), Remainder(tokens=left)) for left in (2000, 500, 100, 10)]
    assert sizes == sorted(sizes, reverse=True)


def test_the_dearer_the_fixed_part_the_larger_the_update() -> None:
    sizes = [
        due_at(PrefillLoad(PrefillCost(fixed_s, 0.001))) for fixed_s in (0.001, 0.01, 0.1, 1.0)
    ]
    assert sizes == sorted(set(sizes))


def test_prompts_that_come_often_make_updates_rarer() -> None:
    load = PrefillLoad(COST)
    idle = due_at(load)
    for _ in range(30):
        load.end(load.begin(0.0, 50, update=False), 0.0)
    assert due_at(load) > idle


def test_updates_do_not_count_as_prompts_that_others_would_wait_for() -> None:
    load = PrefillLoad(COST)
    idle = due_at(load)
    for _ in range(30):
        load.end(load.begin(0.0, 50, update=True), 0.0)
    assert due_at(load) == idle


def test_nothing_is_sent_that_the_server_would_begin_only_after_the_precursors_have_ended() -> None:
    load = PrefillLoad(COST)
    rest = Remainder(tokens=50, token_s=0.01)
    assert tokens_until_due(load, 0.0, 200, rest) == 0
    load.begin(0.0, 500, update=False)
    assert tokens_until_due(load, 0.0, 200, rest) > 0


def test_several_servers_share_the_work() -> None:
    rest = Remainder(tokens=50, token_s=0.01)
    for servers, is_due in ((1, False), (8, True)):
        load = PrefillLoad(COST, servers)
        load.begin(0.0, 500, update=False)
        assert (tokens_until_due(load, 0.0, 200, rest) == 0) is is_due


def test_a_prompt_that_will_hardly_be_decoded_is_not_prefilled() -> None:
    load = PrefillLoad(COST)
    assert tokens_until_due(load, 0.0, 5000, Remainder(100, survives=1.0)) == 0
    assert tokens_until_due(load, 0.0, 5000, Remainder(100, survives=0.3)) > 0


@given(
    unsent=st.integers(1, 50_000),
    left=st.floats(0, 50_000),
    token_s=st.none() | st.floats(1e-4, 1),
    survives=st.floats(0, 1),
    fixed_s=st.floats(1e-6, 10),
    per_token_s=st.floats(1e-9, 1),
)
def test_it_says_wait_for_at_least_one_token_or_send(
    unsent: int,
    left: float,
    token_s: float | None,
    survives: float,
    fixed_s: float,
    per_token_s: float,
) -> None:
    cost = PrefillCost(fixed_s, per_token_s)
    wait = tokens_until_due(PrefillLoad(cost), 0.0, unsent, Remainder(left, token_s, survives))
    assert wait >= 0
    if wait == 0:
        assert cost.token_s * unsent >= 2.99 * cost.fixed_s


# --- costs


def test_without_a_measurement_an_update_costs_neither_nothing_nor_everything() -> None:
    assert PrefillLoad().cost == UNMEASURED
    assert due_at(PrefillLoad()) < 10_000


def test_the_cost_of_an_engine_that_slows_down_follows_it() -> None:
    measured = MeasuredCost(COST)
    for _ in range(100):
        measured.add(200, 10 * COST.seconds(200))
    assert measured.cost.seconds(200) == pytest.approx(10 * COST.seconds(200), rel=0.05)
    assert measured.cost.fixed_s / measured.cost.token_s == pytest.approx(10, rel=0.5)


@given(fixed_s=st.floats(1e-4, 1), token_s=st.floats(1e-6, 0.01))
def test_samples_of_several_sizes_tell_the_two_terms_apart(fixed_s: float, token_s: float) -> None:
    measured, real = MeasuredCost(UNMEASURED), PrefillCost(fixed_s, token_s)
    for _ in range(40):
        for tokens in (10, 100, 1000, 3000):
            measured.add(tokens, real.seconds(tokens))
    assert measured.cost.seconds(3000) == pytest.approx(real.seconds(3000), rel=0.3)
    assert measured.cost.seconds(10) == pytest.approx(
        real.seconds(10), rel=0.5, abs=0.1 * real.seconds(1000)
    )


@given(samples=st.lists(st.tuples(st.integers(0, 5000), st.floats(1e-6, 100)), max_size=50))
def test_costs_stay_above_0_whatever_is_measured(samples: list[tuple[int, float]]) -> None:
    measured = MeasuredCost(COST)
    for tokens, seconds in samples:
        measured.add(tokens, seconds)
        assert measured.cost.fixed_s > 0
        assert measured.cost.token_s > 0


def test_one_stall_does_not_end_all_updates() -> None:
    load = PrefillLoad(COST)
    due = due_at(load)
    load.end(load.begin(0.0, 200, update=True), 60.0, 200)
    assert due_at(load) < 2 * due


def test_only_an_update_that_was_alone_on_the_engine_is_a_sample() -> None:
    load = PrefillLoad(COST)
    alone = load.begin(0.0, 100, update=True)
    load.end(alone, 1.1, 100)
    slower = load.cost
    assert slower.seconds(100) > COST.seconds(100)
    first, second = load.begin(2.0, 100, update=True), load.begin(2.0, 100, update=False)
    load.end(first, 9.0, 100)
    load.end(second, 9.0)
    assert load.cost == slower


def test_outstanding_work_is_what_began_and_has_not_ended() -> None:
    load = PrefillLoad(COST)
    works = [load.begin(0.0, tokens, update=False) for tokens in (100, 300)]
    assert load.outstanding_s == pytest.approx(COST.seconds(100) + COST.seconds(300))
    for work in works:
        load.end(work, 1.0)
    assert load.outstanding_s == 0


# --- what precursors send


@pytest.mark.parametrize(("fewest", "tokens"), [(None, 32), (0.1, 8), (20.0, 20), (1000.0, 32)])
def test_precursors_write_in_pieces_no_smaller_than_their_readers_use(
    fewest: float | None, tokens: int
) -> None:
    assert tokens_per_event(fewest, judged=False) == tokens
    assert tokens_per_event(fewest, judged=True) == 4
