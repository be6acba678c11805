"""Scores of complete outputs (Faster-MoA, section 4.2, Algorithm 1).

Lines 5 to 8: the paper compares Corr(T^t T), an [h, h] matrix per output. With Z the columns of T
scaled to unit norm, Corr(T^t T) = Z^t Z, and

    <Z1^t Z1, Z2^t Z2>_F = |Z1 Z2^t|_F^2,

so an output with fewer tokens than features is kept as Z [n, h] and never becomes an [h, h] matrix.
An output with more tokens is kept as its correlation matrix, the smaller of the two. A pair then
costs at most min(n1, h) * min(n2, h) * h multiplications, and two correlation matrices only h * h.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

_NO_SIGNAL = float(np.finfo(np.float32).eps)


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """An output prepared for comparison with others of the same embedding model.

    Attributes:
        matrix: Z [tokens, features], or Z^t Z [features, features] if `correlated`.
        present: [features], True for columns with signal; the others are 0 in `matrix`.
        energy: |Z^t Z|_F^2.
    """

    matrix: Matrix
    correlated: bool
    present: NDArray[np.bool_]
    energy: float


def features(states: NDArray[np.floating]) -> Features:
    """Prepare an output for comparison.

    A column has no signal if its norm is below float32's rounding error of the largest norm: its
    correlation would be 0/0 (MiniLM's dimensions 127, 223, 319 hold about 1e-32). It is left out.

    Args:
        states: T [tokens >= 1, features >= 1] of any float type; computed in float64.

    Raises:
        ValueError: The shape is wrong, or a value is not finite.
    """
    unit, present = _unit_columns(states)
    tokens, width = unit.shape
    correlated = tokens >= width
    matrix = unit.T @ unit if correlated else unit
    self_product = matrix if correlated else unit @ unit.T
    return Features(matrix, correlated, present, float(np.vdot(self_product, self_product)))


def similarity(first: Features, second: Features) -> float:
    """Return the FrobCosSim of the correlation matrices (line 7), in [0, 1].

    An output without signal is like no other: 0.

    Raises:
        ValueError: The numbers of features differ.
    """
    if first.present.shape != second.present.shape:
        raise ValueError(
            f"outputs of {first.present.size} and {second.present.size} features come from "
            "different models"
        )
    norms = math.sqrt(first.energy) * math.sqrt(second.energy)
    if norms > 0:
        return min(max(_product(first, second) / norms, 0.0), 1.0)
    return 0.0


def _unit_columns(states: NDArray[np.floating]) -> tuple[Matrix, NDArray[np.bool_]]:
    if states.ndim != 2 or 0 in states.shape:
        raise ValueError(
            f"token states must have the shape [tokens >= 1, features >= 1], not {states.shape}"
        )
    wide = states.astype(np.float64)
    norms = np.sqrt(np.einsum("nh,nh->h", wide, wide))
    if not np.isfinite(norms).all():
        raise ValueError("token states must be finite")
    present = norms > _NO_SIGNAL * norms.max()
    wide *= np.divide(1.0, norms, out=np.zeros_like(norms), where=present)
    return wide, present


def _product(first: Features, second: Features) -> float:
    """Compute <Corr(U), Corr(V)>_F in the cheapest way that both matrices allow."""
    if first.correlated and second.correlated:
        return float(np.vdot(first.matrix, second.matrix))
    if first.correlated:
        first, second = second, first
    if second.correlated:
        return float(np.vdot(first.matrix @ second.matrix, first.matrix))
    gram = first.matrix @ second.matrix.T
    return float(np.vdot(gram, gram))


class Confidence:
    """C, the geometric mean token probability of one output (line 2), updated while it streams."""

    __slots__ = ("_sum", "_tokens")

    def __init__(self) -> None:
        self._sum = 0.0
        self._tokens = 0

    def add(self, logprobs: Sequence[float]) -> None:
        """Add tokens' natural-log probabilities; `-inf` is allowed.

        Raises:
            ValueError: A log-probability is NaN.
        """
        added = sum(logprobs)
        if math.isnan(added):
            raise ValueError("a log-probability is not a number")
        self._sum += added
        self._tokens += len(logprobs)

    @property
    def value(self) -> float | None:
        """exp(mean log p) in [0, 1]; None without tokens."""
        if self._tokens == 0:
            return None
        # by rounding, engines report log-probabilities slightly above 0 for certain tokens
        return min(math.exp(min(self._sum / self._tokens, 0.0)), 1.0)


def rms_confidence(confidences: Sequence[float]) -> float:
    """Compute C-bar = sqrt(1/l * sum(C_i^2)) over the completed outputs (line 3).

    Raises:
        ValueError: There is no output.
    """
    if not confidences:
        raise ValueError("no completed output, so no mean confidence")
    return math.sqrt(sum(value * value for value in confidences) / len(confidences))


@dataclass(frozen=True, slots=True)
class Score:
    """The scores of the completed outputs: the paper's C-bar, P, B and Q."""

    confidence: float
    agreement: float
    balance: float
    probability: float


def score(confidences: Sequence[float], similarities: Matrix, tau: float | None) -> Score:
    """Score the l completed outputs.

    P is the mean of Sim[i, j] over i >= j, weighted by C_i C_j (lines 10, 11); it is 0 if all
    weights are 0. B = 1 - |P - tau| / tau, but at least 0 (line 12). Q = sqrt(C-bar * B) as in
    line 13; the prose of section 4.2 differs: it writes sqrt(C-bar) * B.

    Args:
        confidences: C [l].
        similarities: Sim [l, l]; the upper triangle is ignored.
        tau: The preferred agreement. None prefers as much as there is: P is the mean over i > j,
            and B is P.
    """
    confidence = rms_confidence(confidences)
    weights = np.tril(np.outer(confidences, confidences), -int(tau is None))
    total = float(weights.sum())
    agreement = 0.0
    if total > 0:
        agreement = float(np.vdot(weights, similarities)) / total
    balance = agreement if tau is None else max(1.0 - abs(agreement - tau) / tau, 0.0)
    return Score(confidence, agreement, balance, math.sqrt(confidence * balance))
