"""Early exit judged on complete outputs (Faster-MoA, section 4.2, Algorithm 1).

Lines 5 to 8: the paper compares Corr(T^t T), an [h, h] matrix per output. With Z the columns of T
scaled to unit norm, Corr(T^t T) = Z^t Z, and

    <Z1^t Z1, Z2^t Z2>_F = |Z1 Z2^t|_F^2,

so an output with fewer tokens than features is kept as Z [n, h] and never becomes an [h, h] matrix;
one with more is kept as its correlation matrix, then the smaller of the two. A pair so costs at
most min(n1, h) * min(n2, h) * h multiplications, and two correlation matrices only h * h.
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
    """One output, ready to be compared with others of the same embedding model.

    `matrix` is Z [tokens, features] or Z^t Z [features, features], as `correlated` says. `present`
    [features] marks the columns with signal; the others are zero in `matrix`. `energy` is |Z^t
    Z|_F^2.
    """

    matrix: Matrix
    correlated: bool
    present: NDArray[np.bool_]
    energy: float


def features(states: NDArray[np.floating]) -> Features:
    """Prepare one output's token states T [tokens >= 1, features >= 1], any float type; computed in
    float64.

    A column whose norm is float32 rounding compared with the strongest one's has no signal: its
    correlation is 0/0 (MiniLM's dimensions 127, 223, 319 hold about 1e-32), and it is left out.
    ValueError on a wrong shape or on values that are not finite.
    """
    unit, present = _unit_columns(states)
    tokens, width = unit.shape
    correlated = tokens >= width
    matrix = unit.T @ unit if correlated else unit
    self_product = matrix if correlated else unit @ unit.T
    return Features(matrix, correlated, present, float(np.vdot(self_product, self_product)))


def similarity(first: Features, second: Features) -> float:
    """FrobCosSim of the correlation matrices (line 7), in [0, 1].

    An output without signal is like nothing: 0. ValueError when the numbers of features differ.
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
    """<Corr(U), Corr(V)>_F, by the cheapest form for what the two are kept as."""
    if first.correlated and second.correlated:
        return float(np.vdot(first.matrix, second.matrix))
    if first.correlated:
        first, second = second, first
    if second.correlated:
        return float(np.vdot(first.matrix @ second.matrix, first.matrix))
    gram = first.matrix @ second.matrix.T
    return float(np.vdot(gram, gram))


class Confidence:
    """C, the geometric mean token probability of one output (line 2), kept up while it streams."""

    __slots__ = ("_sum", "_tokens")

    def __init__(self) -> None:
        self._sum = 0.0
        self._tokens = 0

    def add(self, logprobs: Sequence[float]) -> None:
        """Take in further tokens' natural-log probabilities. `-inf` is allowed; ValueError on a
        NaN.
        """
        added = sum(logprobs)
        if math.isnan(added):
            raise ValueError("a log-probability is not a number")
        self._sum += added
        self._tokens += len(logprobs)

    @property
    def value(self) -> float | None:
        """exp(mean log p) in [0, 1]; None while there is no token, for then nothing has been
        measured.
        """
        if self._tokens == 0:
            return None
        # rounding makes engines report a certain token's log-probability as slightly above 0
        return min(math.exp(min(self._sum / self._tokens, 0.0)), 1.0)


def rms_confidence(confidences: Sequence[float]) -> float:
    """C-bar = sqrt(1/l * sum(C_i^2)) over the completed outputs (line 3). ValueError without
    any."""
    if not confidences:
        raise ValueError("no completed output, so no mean confidence")
    return math.sqrt(sum(value * value for value in confidences) / len(confidences))


@dataclass(frozen=True, slots=True)
class Score:
    """What the gate thinks of the completed outputs: the paper's C-bar, P, B and Q."""

    confidence: float
    agreement: float
    balance: float
    probability: float


def score(
    confidences: Sequence[float], similarities: Matrix, tau: float, *, self_similarity: bool = True
) -> Score:
    """Score the l completed outputs from their confidences C and similarities Sim [l, l].

    P is the mean of Sim[i, j] over i >= j, weighted by C_i C_j, the diagonal of ones included
    (lines 10, 11), or left out without `self_similarity`; where there is nothing to weigh it is 0.
    B = 1 - |P - tau| / tau, not below 0 (line 12). Q = sqrt(C-bar * B) as in line 13; the prose of
    section 4.2 writes sqrt(C-bar) * B, and the algorithm was followed.
    """
    confidence = rms_confidence(confidences)
    weights = np.tril(np.outer(confidences, confidences), 0 if self_similarity else -1)
    total = float(weights.sum())
    if total > 0:
        agreement = float(np.vdot(weights, similarities)) / total
    else:
        agreement = 0.0
    balance = max(1.0 - abs(agreement - tau) / tau, 0.0)
    return Score(confidence, agreement, balance, math.sqrt(confidence * balance))
