from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.coserve.pool import Costs, ExecutorSettings
from benchmarks.coserve.pool.splitting import (
    chosen,
    decay_window,
    executor_counts,
    memory_split,
    refined,
    share_next_to_largest_batch,
)

pytestmark = pytest.mark.slow


def peak_at(best: float, up: float = 1.0, down: float = 3.0) -> Callable[[float], float]:
    """Throughput that rises to 100 at `best` percent, and falls from there."""
    return lambda position: (
        100 - (up * (best - position) if position < best else down * (position - best))
    )


def test_windows_are_the_papers_each_smaller_than_the_one_before() -> None:
    window = decay_window(peak_at(30))
    assert list(window.tried) == pytest.approx([15, 27.75, 38.5875])
    assert (window.lower, window.upper) == pytest.approx(
        (27.75, 38.5875)
    )  # 28 to 39: the paper's for task A


def test_a_window_that_misses_the_trend_ends_the_search_though_it_still_rises() -> None:
    flat_from_40 = decay_window(lambda position: 10 * min(position, 40.0))
    assert flat_from_40.lower < 40 < flat_from_40.upper + 1


def test_throughput_that_only_falls_ends_the_search_at_once() -> None:
    window = decay_window(lambda position: 100 - position)
    assert (window.lower, window.upper) == pytest.approx((15, 27.75))


def test_throughput_that_falls_slowly_ends_it_once_it_is_below_the_best_by_the_margin() -> None:
    window = decay_window(lambda position: 100 - position / 5)
    assert list(window.tried) == pytest.approx([15, 27.75, 38.5875, 47.799375])


def test_throughput_that_only_rises_ends_it_where_memory_ends() -> None:
    window = decay_window(lambda position: 50 + position, margin=0.2)
    assert window.upper > 90 and len(window.tried) < 20


def test_nothing_is_tried_where_no_expert_fits() -> None:
    assert min(decay_window(peak_at(60), least=30).tried) >= 30


@given(st.floats(5, 99), st.floats(0.1, 2), st.floats(0.1, 10))
def test_what_is_chosen_is_within_the_margin_of_the_best_that_was_tried(
    best: float, up: float, down: float
) -> None:
    throughput = peak_at(best, up, down)
    window = decay_window(throughput)
    tried = refined(window.tried, throughput, 0, 3)
    assert (
        throughput(chosen(tried, 0.05))
        >= 0.95 * max(tried.values())
        >= 0.95 * max(window.tried.values())
    )
    assert len(tried) <= len(window.tried) + 6


def test_of_what_is_as_good_as_a_sample_can_tell_the_nearest_to_the_casual_choice_is_taken() -> (
    None
):
    assert chosen({30.0: 97.0, 60.0: 96.0, 75.0: 90.0, 95.0: 100.0}, 0.05) == 60
    assert chosen({30.0: 97.0, 60.0: 96.0, 75.0: 90.0, 95.0: 100.0}, 0.0) == 95


def test_halving_the_steps_around_the_best_comes_near_the_peak() -> None:
    known = {20.0: peak_at(46)(20), 40.0: peak_at(46)(40), 80.0: peak_at(46)(80)}
    assert chosen(refined(known, peak_at(46), 0, 5), 0) == pytest.approx(46, abs=2)


def test_nothing_below_the_least_share_is_tried_around_the_best() -> None:
    assert min(refined({30.0: 2.0, 60.0: 1.0}, lambda position: 1 / position, 28, 4)) >= 28


def costs(largest_batch: int, activation_bytes: int) -> Costs:
    return Costs(0.01, 0.02, largest_batch, activation_bytes, 0.1, 0.5)


GPU, CPU = {"net": costs(8, 100)}, {"net": costs(5, 50), "small": costs(9, 10)}
EXECUTORS = [
    ExecutorSettings("gpu-0", 1000, GPU),
    ExecutorSettings("gpu-1", 1000, GPU),
    ExecutorSettings("cpu", 1000, CPU),
]
DEVICES = {"gpu-0": "cuda", "gpu-1": "cuda", "cpu": "cpu"}


def test_where_the_largest_batch_takes_little_experts_get_the_rest_untried() -> None:
    assert share_next_to_largest_batch(EXECUTORS[2]) == 0.75
    found, (split,) = memory_split([EXECUTORS[2]], DEVICES, {"cpu": 100}, pytest.fail)
    assert (found[0].component_share, split.share, split.window) == (0.75, 0.75, None)


def test_where_it_takes_much_shares_are_tried_on_all_executors_of_the_device() -> None:
    tried: list[tuple[float, ...]] = []

    def throughput(executors: Sequence[ExecutorSettings]) -> float:
        tried.append(tuple(one.component_share for one in executors))
        return peak_at(45)(100 * executors[0].component_share)

    found, splits = memory_split(EXECUTORS, DEVICES, {"cuda": 100, "cpu": 100}, throughput)
    assert {(first == second, cpu) for first, second, cpu in tried} == {(True, 0.75)}
    assert (
        found[0].component_share
        == found[1].component_share
        == splits[0].share
        == pytest.approx(0.45, abs=0.05)
    )
    assert len(tried) == len(splits[0].tried) < 15


def test_a_share_always_holds_the_largest_expert() -> None:
    seen: list[int] = []

    def throughput(executors: Sequence[ExecutorSettings]) -> float:
        seen.extend(one.shelf_bytes for one in executors[:2])
        return 1 / executors[0].component_share

    found, _ = memory_split(EXECUTORS, DEVICES, {"cuda": 333, "cpu": 100}, throughput)
    assert min(seen) >= 333 and found[0].shelf_bytes >= 333


def test_numbers_of_executors_are_tried_on_gpus_first_and_cpus_beside_the_best_of_these() -> None:
    beside_cpus: set[int] = set()

    def throughput(by_device: Mapping[str, Sequence[ExecutorSettings]]) -> float:
        gpus, cpus = len(by_device["cuda"]), len(by_device["cpu"])
        if cpus > 1:
            beside_cpus.add(gpus)
        assert sum(one.memory_bytes for one in by_device["cuda"]) <= 2000
        return 10 - abs(gpus - 4) - abs(cpus - 2)

    by_device = {"cpu": EXECUTORS[2:], "cuda": EXECUTORS[:2]}
    tried = executor_counts(by_device, {"cuda": 300, "cpu": 100}, throughput)
    assert beside_cpus == {4}
    assert tried["cuda"] == {1: 6, 2: 7, 3: 8, 4: 9, 5: 8}, "six would not hold the largest"
    assert max(tried["cpu"], key=tried["cpu"].__getitem__) == 2
