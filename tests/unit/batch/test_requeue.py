from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from shell_router.batch.planner import ModelWork, split_prompts

SECONDS = st.sampled_from((0.0, 0.5, 1.0, 7.0, 100.0)) | st.floats(1e-3, 1e3)
COSTS = st.builds(
    ModelWork,
    st.just("a"),
    st.integers(1, 6),
    load_s=SECONDS,
    per_prompt_s=SECONDS,
    fixed_s=SECONDS,
)


def ends_s(model: ModelWork, busy_s: dict[int, float], shared: dict[int, int]) -> float:
    """When the last worker that got some is done."""
    return max(busy_s[worker] + model.session_s(prompts) for worker, prompts in shared.items())


@given(COSTS, st.dictionaries(st.integers(0, 9), SECONDS, min_size=1, max_size=3))
def test_all_prompts_are_shared_out_and_no_other_way_ends_earlier(
    model: ModelWork, busy_s: dict[int, float]
) -> None:
    shared = split_prompts(model, busy_s)
    assert sum(shared.values()) == model.prompts
    assert shared.keys() <= busy_s.keys()
    assert all(prompts > 0 for prompts in shared.values())
    ways = [
        {worker: count for worker, count in zip(busy_s, counts, strict=True) if count}
        for counts in product(range(model.prompts + 1), repeat=len(busy_s))
        if sum(counts) == model.prompts
    ]
    best_s = min(ends_s(model, busy_s, way) for way in ways)
    assert ends_s(model, busy_s, shared) <= best_s * (1 + 1e-6) + 1e-6


@given(st.integers(1, 100_000), st.dictionaries(st.integers(0, 99), SECONDS, min_size=1))
def test_many_prompts_are_shared_out_completely(prompts: int, busy_s: dict[int, float]) -> None:
    shared = split_prompts(ModelWork("a", prompts, 10.0, 0.01, 1.0), busy_s)
    assert sum(shared.values()) == prompts
