from itertools import product

from hypothesis import assume, given
from hypothesis import strategies as st

from shell_router.batch.plan import Expert
from shell_router.batch.requeue import shared_out

SECONDS = st.sampled_from((0.0, 0.5, 1.0, 7.0, 100.0)) | st.floats(1e-3, 1e3)
COSTS = st.builds(
    Expert,
    st.just("a"),
    st.integers(1, 6),
    load_s=SECONDS,
    per_prompt_s=SECONDS,
    fixed_s=SECONDS,
)


def ends_s(expert: Expert, busy_s: dict[int, float], shared: dict[int, int]) -> float:
    """When the last worker that got some is done."""
    return max(busy_s[worker] + expert.session_s(prompts) for worker, prompts in shared.items())


@given(COSTS, st.dictionaries(st.integers(0, 9), SECONDS, min_size=1, max_size=3))
def test_all_prompts_are_shared_out_and_no_other_way_ends_earlier(expert: Expert, busy_s: dict[int, float]) -> None:
    shared = shared_out(expert, busy_s)
    assert sum(shared.values()) == expert.prompts
    assert shared.keys() <= busy_s.keys()
    assert all(prompts > 0 for prompts in shared.values())
    ways = [
        {worker: count for worker, count in zip(busy_s, counts, strict=True) if count}
        for counts in product(range(expert.prompts + 1), repeat=len(busy_s))
        if sum(counts) == expert.prompts
    ]
    best_s = min(ends_s(expert, busy_s, way) for way in ways)
    assert ends_s(expert, busy_s, shared) <= best_s * (1 + 1e-6) + 1e-6


@given(st.integers(1, 100_000), st.dictionaries(st.integers(0, 99), SECONDS, min_size=1))
def test_many_prompts_are_shared_out_completely(prompts: int, busy_s: dict[int, float]) -> None:
    shared = shared_out(Expert("a", prompts, 10.0, 0.01, 1.0), busy_s)
    assert sum(shared.values()) == prompts


@given(COSTS, st.integers(2, 4))
def test_a_worker_that_is_busy_for_longer_than_all_would_take_gets_none(expert: Expert, workers: int) -> None:
    assume(expert.session_s(expert.prompts) < 1e5)
    busy_s = {0: 1e6} | dict.fromkeys(range(1, workers), 0.0)
    assert 0 not in shared_out(expert, busy_s)
