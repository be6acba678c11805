"""Least squares in which no term may be negative: times are sums of costs, and a cost is never below nothing."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def non_negative(terms: Floats, wanted: Floats) -> Floats:
    """The factors >= 0 of `terms`, [rows, terms], whose sums come closest to `wanted`, [rows], in squares.

    Where two sets of terms explain the rows equally well, the one with fewer terms is taken; the rest are 0.
    """
    count = terms.shape[1]
    fits = [
        fitted
        for size in range(1, count + 1)
        for subset in combinations(range(count), size)
        if (fitted := _fitted(terms, wanted, subset)) is not None
    ]
    nothing = (_error(terms, wanted, np.zeros(count)), np.zeros(count))
    _, best = min((*fits, nothing), key=lambda fitted: fitted[0])
    return best


def _fitted(terms: Floats, wanted: Floats, subset: tuple[int, ...]) -> tuple[float, Floats] | None:
    """Squared error and factors with all terms but `subset` at 0; None where one would be negative."""
    found, *_ = np.linalg.lstsq(terms[:, subset], wanted, rcond=None)
    if (found < 0).any():
        return None
    factors = np.zeros(terms.shape[1])
    factors[list(subset)] = found
    return _error(terms, wanted, factors), factors


def _error(terms: Floats, wanted: Floats, factors: Floats) -> float:
    # rounded so that equal fits are equal, and the simpler comes first
    return round(float(((terms @ factors - wanted) ** 2).sum()), 12)
