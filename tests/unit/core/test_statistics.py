"""Intervals against published values and against their own limits."""

import pytest

from shell_router.core.statistics import (
    Interval,
    estimate_clustered_share,
    estimate_paired_difference,
    quantile,
    wilson,
)


@pytest.mark.parametrize(
    ("right", "answers", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_agrees_with_newcombe_1998(
    right: int, answers: int, low: float, high: float
) -> None:
    found = wilson(right / answers, answers)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


def test_one_seed_per_question_gives_wilsons_interval() -> None:
    rights = [[number < 6] for number in range(10)]
    assert estimate_clustered_share(rights) == wilson(0.6, 10)


def test_seeds_that_always_agree_count_as_one_answer_per_question() -> None:
    rights = [[number < 6] * 5 for number in range(10)]
    assert estimate_clustered_share(rights) == wilson(0.6, 10)
    assert estimate_clustered_share([[True] * 5] * 10) == wilson(1.0, 10)


def test_seeds_that_differ_make_the_interval_smaller_but_never_below_that_of_independent_answers() -> (
    None
):
    alike = [[True, False]] * 10
    assert estimate_clustered_share(alike) == wilson(
        0.5, 10
    )  # no variance between questions tells nothing
    mixed = [[True, False], [False, True], [True, True], [False, False]] * 10
    assert wilson(0.5, 80).low >= estimate_clustered_share(mixed).low > wilson(0.5, 40).low


def test_one_question_counts_once() -> None:
    assert estimate_clustered_share([[True, False]]) == wilson(0.5, 1)


def test_a_paired_difference_of_many_agrees_with_walds_interval() -> None:
    # Agresti, Categorical Data Analysis: of 1144 pairs 132 and 107 differ, and Wald's interval is
    # (-0.004, 0.048)
    found = estimate_paired_difference([1.0] * 132 + [-1.0] * 107 + [0.0] * (1144 - 239))
    assert found.value == pytest.approx(25 / 1144)
    assert (found.low, found.high) == (
        pytest.approx(-0.004, abs=0.001),
        pytest.approx(0.048, abs=0.001),
    )


def test_settings_that_never_differ_still_have_an_interval_and_it_shrinks() -> None:
    few, many = estimate_paired_difference([0.0] * 5), estimate_paired_difference([0.0] * 500)
    assert few.value == many.value == 0.0
    assert few.low < many.low < 0 < many.high < few.high


def test_a_difference_stays_between_minus_one_and_one() -> None:
    assert estimate_paired_difference([1.0]).high <= 1.0
    assert estimate_paired_difference([-1.0]) == Interval(
        -1.0, pytest.approx(-0.95, abs=0.3), pytest.approx(0.4, abs=0.3)
    )


def test_quantiles_interpolate() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([7.0], 0.95) == 7.0
    assert quantile([0.0, 1.0], 0.95) == pytest.approx(0.95)
