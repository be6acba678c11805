"""Statistics of several wings: 95 % intervals of shares, and costs fitted to timings."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

from shell_router.errors import require

Z95 = 1.959963984540054
METHOD_SHARE = (
    "Wilson's score interval; with several seeds for the effective number of answers, "
    "clustered by question"
)
METHOD_DIFFERENCE = "Agresti and Min's adjusted Wald interval for paired shares, over questions"


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with the ends of its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(share: float, answers: float) -> Interval:
    """Compute Wilson's score interval of a `share` observed over `answers`.

    `answers` is at least 1 and need not be whole.
    """
    spread = Z95**2 / answers
    middle = (share + spread / 2) / (1 + spread)
    reach = Z95 / (1 + spread) * sqrt(share * (1 - share) / answers + spread / (4 * answers))
    return Interval(share, max(0.0, middle - reach), min(1.0, middle + reach))


def estimate_clustered_share(rights: Sequence[Sequence[bool]]) -> Interval:
    """Compute the share of right answers; a question may be answered with several seeds.

    Answers to one question resemble each other. So the interval is that of as many independent
    answers as would vary as much, at least one per question and at most all.

    Args:
        rights: Per question, whether each answer is right.
    """
    answers = sum(map(len, rights))
    share = sum(map(sum, rights)) / answers
    return wilson(share, min(answers, max(len(rights), _effective_answers(rights, share, answers))))


def _effective_answers(rights: Sequence[Sequence[bool]], share: float, answers: int) -> float:
    questions = len(rights)
    if questions < 2:
        return questions
    deviations = sum((sum(right) - share * len(right)) ** 2 for right in rights)
    variance = questions / (questions - 1) * deviations / answers**2
    if variance > 0:
        return share * (1 - share) / variance
    return questions


def estimate_paired_difference(differences: Sequence[float]) -> Interval:
    """Compute the mean of the questions' differences in their share of right answers.

    Agresti and Min (2005): half a question is added to each cell of the paired table (won, lost,
    and both draws).

    Args:
        differences: One per question, each in [-1, 1].
    """
    questions = len(differences) + 2
    mean = sum(differences) / questions
    variance = (sum(value**2 for value in differences) + 1) / questions - mean**2
    reach = Z95 * sqrt(max(0.0, variance) / questions)
    value = sum(differences) / len(differences)
    return Interval(value, max(-1.0, mean - reach), min(1.0, mean + reach))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the `values` lie, interpolated linearly.

    There must be at least one value.
    """
    return float(np.quantile(values, share))


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timing:
    """A measured duration: `known_s` plus the sum of `terms`, each times its unknown cost.

    Timings of one `kind` are held out together.
    """

    kind: Hashable
    terms: tuple[float, ...]
    seconds: float
    known_s: float = 0.0

    def __post_init__(self) -> None:
        require(
            0 < self.seconds < inf, f"A timing must be positive and finite, not {self.seconds} s."
        )


def fit_costs(timings: Sequence[Timing]) -> list[float]:
    """Fit the cost of each term, none negative, by least squares of relative errors."""
    seconds = np.array([timing.seconds for timing in timings])
    terms = np.array([timing.terms for timing in timings], dtype=float)
    rows: Floats = terms / seconds[:, None]
    # terms differ by many powers of ten: attended pairs are millions where passes are few
    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(float).tiny)
    targets = 1 - np.array([timing.known_s for timing in timings]) / seconds
    return [float(cost) for cost in fit_non_negative(rows / scale, targets) / scale]


def measure_held_out_error(timings: Sequence[Timing], least: int = 2) -> float | None:
    """Return the mean relative error on each kind, of costs fitted to the other kinds.

    It is None for at most `least` kinds.
    """
    kinds = {timing.kind for timing in timings}
    if len(kinds) <= least:
        return None
    errors = []
    for left_out in kinds:
        costs = fit_costs([timing for timing in timings if timing.kind != left_out])
        for timing in timings:
            if timing.kind == left_out:
                expected_s = timing.known_s + np.dot(timing.terms, costs)
                errors.append(abs(expected_s / timing.seconds - 1))
    return float(np.mean(errors))


def fit_non_negative(terms: Floats, targets: Floats) -> Floats:
    """Find the factors >= 0 of `terms` whose sums come closest to `targets` in squares.

    If two sets of terms explain the rows equally well, the set with fewer terms is taken; the rest
    are 0.

    Args:
        terms: [rows, terms].
        targets: [rows].
    """
    count = terms.shape[1]
    fits = [
        fitted
        for size in range(1, count + 1)
        for subset in combinations(range(count), size)
        if (fitted := _fit_without(terms, targets, subset)) is not None
    ]
    nothing = (_measure_error(terms, targets, np.zeros(count)), np.zeros(count))
    _, best = min((*fits, nothing), key=lambda fitted: fitted[0])
    return best


def _fit_without(
    terms: Floats, targets: Floats, subset: tuple[int, ...]
) -> tuple[float, Floats] | None:
    """Fit with all terms but `subset` at 0; None if a factor would be negative.

    Returns:
        The squared error and the factors.
    """
    fitted, *_ = np.linalg.lstsq(terms[:, subset], targets, rcond=None)
    if (fitted < 0).any():
        return None
    factors = np.zeros(terms.shape[1])
    factors[list(subset)] = fitted
    return _measure_error(terms, targets, factors), factors


def _measure_error(terms: Floats, targets: Floats, factors: Floats) -> float:
    # rounded so that equal fits are equal, and the simpler comes first
    return round(float(((terms @ factors - targets) ** 2).sum()), 12)
