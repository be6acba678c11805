"""How many tokens a tenant used lately, and how long it waits to be below a limit."""

from hypothesis import given
from hypothesis import strategies as st

from shell_router.telemetry import TokenRates

used = st.lists(st.tuples(st.floats(0, 50), st.integers(0, 2000)), max_size=20)


@given(used, st.integers(1, 3000), st.floats(0, 200))
def test_who_waits_as_long_as_it_was_asked_to_is_below_its_limit_and_not_much_sooner(
    spent: list[tuple[float, int]], limit: int, more_s: float
) -> None:
    rates, now_s = TokenRates(), 1e6
    for after_s, tokens in spent:
        now_s += after_s
        rates.add("alice", tokens, now_s)
    now_s += more_s
    wait_s = rates.wait_s("alice", limit, now_s)
    assert 0 <= wait_s <= 120
    assert rates.wait_s("alice", limit, now_s + wait_s + 1e-3) == 0
    if wait_s > 0.01:
        assert rates.wait_s("alice", limit, now_s + wait_s - 0.01) > 0
    assert rates.wait_s("bob", limit, now_s) == 0


def test_what_was_used_two_minutes_ago_counts_no_more() -> None:
    rates = TokenRates()
    rates.add("alice", 1000, 0.0)
    assert rates.wait_s("alice", 1000, 59.0) > 0
    assert rates.wait_s("alice", 1000, 120.0) == 0
