from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shell_router.early_exit.evidence import ExitEvidence, Judged, fit_falling
from shell_router.early_exit.settings import EarlyExit

KEY = Judged("tree", ("small", "large"), EarlyExit("in_flight", max_changed_percent=2), 0)


def learned(evidence: ExitEvidence, level: int, leader: str, times: int = 1) -> float:
    for _ in range(times):
        evidence.observe(KEY, [leader] * (level + 1), ["4"], allowed=0.02)
    return evidence.find_threshold(KEY)


def test_a_cluster_exits_once_enough_complete_runs_bound_the_changed_answers() -> None:
    evidence = ExitEvidence()
    assert evidence.find_threshold(KEY) == float("inf")
    assert learned(evidence, level=80, leader="4", times=48) == float("inf")
    assert learned(evidence, level=80, leader="4") == 0.01


def test_the_threshold_lies_above_the_scores_at_which_answers_change() -> None:
    evidence = ExitEvidence()
    learned(evidence, level=90, leader="4", times=400)
    assert 0.6 < learned(evidence, level=60, leader="5", times=40) <= 0.62


def test_no_score_is_enough_if_answers_change_at_the_highest() -> None:
    evidence = ExitEvidence()
    learned(evidence, level=100, leader="4", times=100)
    assert learned(evidence, level=100, leader="5", times=20) == float("inf")


def test_an_exit_without_a_leading_answer_counts_as_a_change() -> None:
    evidence = ExitEvidence()
    for _ in range(100):
        evidence.observe(KEY, [None] * 101, [""], allowed=0.02)
    assert evidence.find_threshold(KEY) == float("inf")


def test_newer_runs_outweigh_those_of_long_ago() -> None:
    evidence = ExitEvidence()
    learned(evidence, level=90, leader="5", times=500)
    assert learned(evidence, level=90, leader="4", times=14_000) < 0.9


def test_the_topology_seen_longest_ago_is_forgotten_first() -> None:
    evidence = ExitEvidence()
    learned(evidence, level=80, leader="4", times=49)
    younger = KEY._replace(topology="younger")
    for _ in range(49):
        evidence.observe(younger, ["4"] * 81, ["4"], allowed=0.02)
    for number in range(999):
        evidence.observe(KEY._replace(topology=str(number)), [], ["4"], allowed=0.02)
    assert evidence.find_threshold(KEY) == float("inf")
    assert evidence.find_threshold(younger) == 0.01


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_fitted_rates_never_rise_and_keep_the_sum(levels: list[tuple[int, int]]) -> None:
    counts, weights = zip(*levels, strict=True)
    rates = fit_falling(counts, weights)
    assert all(low <= high + 1e-9 for high, low in pairwise(rates))
    fitted = sum(rate * weight for rate, weight in zip(rates, weights, strict=True))
    assert abs(fitted - sum(counts)) < 1e-6


def test_rates_that_rise_are_pooled_by_their_weights() -> None:
    assert fit_falling([3, 0, 2, 0], [4, 4, 4, 0]) == [0.75, 0.25, 0.25, 0.25]
