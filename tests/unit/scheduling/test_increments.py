import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.scheduling import IncrementSettings, UpdateCost, tokens_per_event, tokens_per_increment

ADAPTIVE = IncrementSettings(min_tokens=8, max_tokens=512, busy_share=0.5)


def test_a_fixed_chunk_is_kept_whatever_is_measured() -> None:
    assert tokens_per_increment(IncrementSettings(32), cost=UpdateCost(9.0), arrival_tokens_per_s=1e6) == 32


def test_nothing_measured_yet_means_the_smallest_chunk() -> None:
    assert tokens_per_increment(ADAPTIVE, cost=None, arrival_tokens_per_s=100.0) == 8
    assert tokens_per_increment(ADAPTIVE, cost=UpdateCost(0.1), arrival_tokens_per_s=None) == 8


def test_updates_of_20_ms_at_1000_tokens_per_s_keep_the_engine_half_busy_with_40_tokens() -> None:
    assert tokens_per_increment(ADAPTIVE, cost=UpdateCost(0.020), arrival_tokens_per_s=1000.0) == 40


def test_prompts_that_grow_together_share_the_engines_time() -> None:
    assert tokens_per_increment(ADAPTIVE, cost=UpdateCost(0.020), arrival_tokens_per_s=1000.0, prompts=3) == 120


def test_an_update_waits_for_as_many_tokens_as_take_as_long_as_the_rest_of_it() -> None:
    cost = UpdateCost(0.020, fixed_tokens=70.0)
    assert tokens_per_increment(ADAPTIVE, cost=cost, arrival_tokens_per_s=1000.0) == 70
    assert tokens_per_increment(ADAPTIVE, cost=cost, arrival_tokens_per_s=1000.0, prompts=3) == 120
    assert tokens_per_increment(ADAPTIVE, cost=UpdateCost(0.020, 1e9), arrival_tokens_per_s=1000.0) == 512


@given(cost_s=st.floats(0, 1e3), rate=st.floats(0, 1e6))
def test_adaptive_chunks_stay_within_their_limits(cost_s: float, rate: float) -> None:
    assert 8 <= tokens_per_increment(ADAPTIVE, cost=UpdateCost(cost_s), arrival_tokens_per_s=rate) <= 512


@given(cost_s=st.floats(1e-4, 1), rate=st.floats(1, 1e5))
def test_unless_limited_the_engine_is_busy_for_at_most_its_share(cost_s: float, rate: float) -> None:
    tokens = tokens_per_increment(ADAPTIVE, cost=UpdateCost(cost_s), arrival_tokens_per_s=rate)
    if tokens < ADAPTIVE.max_tokens:
        assert cost_s / ((tokens + 1) / rate) <= ADAPTIVE.busy_share


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"min_tokens": 0}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "max_tokens"),
        ({"busy_share": 0.0}, "busy_share"),
        ({"busy_share": 1.5}, "busy_share"),
        ({"tail_share": -0.1}, "tail_share"),
    ],
)
def test_bad_settings_are_refused_by_name(fields: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        IncrementSettings(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "incremental", "tokens"),
    [
        (ADAPTIVE, True, 8),
        (IncrementSettings(4), True, 4),
        (IncrementSettings(512), True, 32),
        (ADAPTIVE, False, 32),
    ],
)
def test_an_event_holds_what_the_smallest_update_would_and_never_hides_a_stall(
    settings: IncrementSettings, incremental: bool, tokens: int
) -> None:
    assert tokens_per_event(settings, incremental, judged=False) == tokens
    assert tokens_per_event(settings, incremental, judged=True) == 4
