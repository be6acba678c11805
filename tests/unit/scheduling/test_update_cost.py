import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.scheduling import MeasuredUpdates, UpdateCost

SIZES = (200, 8, 16, 40, 9, 120, 8)


def measured(*updates: tuple[int, float]) -> UpdateCost | None:
    found = MeasuredUpdates()
    for new_tokens, seconds in updates:
        found.add(new_tokens, seconds)
    return found.cost


def test_nothing_is_known_before_the_first_update() -> None:
    assert measured() is None


@given(fixed_s=st.floats(0, 10), token_s=st.floats(1e-6, 1))
def test_updates_of_several_sizes_tell_what_each_costs_beside_its_tokens(fixed_s: float, token_s: float) -> None:
    cost = measured(*((tokens, fixed_s + tokens * token_s) for tokens in SIZES))
    assert cost is not None
    assert cost.fixed_tokens == pytest.approx(fixed_s / token_s, rel=1e-3, abs=1e-2)


@pytest.mark.parametrize(
    "updates",
    [
        pytest.param([(16, 0.01), (16, 0.03), (16, 0.02)], id="all as large"),
        pytest.param([(16, 0.02), (200, 0.02), (64, 0.02)], id="larger ones as fast"),
        pytest.param([(16, 0.03), (200, 0.01)], id="larger ones faster"),
    ],
)
def test_updates_that_do_not_tell_them_apart_give_their_mean_time_alone(updates: list[tuple[int, float]]) -> None:
    cost = measured(*updates)
    assert cost is not None
    assert cost.fixed_tokens is None
    assert 0.01 <= cost.mean_s <= 0.03


def test_a_change_of_speed_shows_after_some_twenty_updates() -> None:
    slow = [(tokens, 0.5 + tokens * 0.001) for tokens in SIZES * 4]
    fast = [(tokens, 0.1 + tokens * 0.01) for tokens in SIZES * 20]
    cost = measured(*slow, *fast)
    assert cost is not None
    assert cost.fixed_tokens == pytest.approx(10, rel=0.1)
