"""How alike two outputs are (Faster-MoA, Algorithm 1, lines 5 to 8).

The paper compares Corr(T^t T), an [h, h] matrix per output. With Z the columns of T scaled to unit norm,
Corr(T^t T) = Z^t Z, and

    <Z1^t Z1, Z2^t Z2>_F = |Z1 Z2^t|_F^2,

so an output with fewer tokens than features is kept as Z [n, h] and never becomes an [h, h] matrix; one with
more is kept as its correlation matrix, then the smaller of the two. A pair so costs at most
min(n1, h) * min(n2, h) * h multiplications, and two correlation matrices only h * h.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Entries = Literal["full", "off_diagonal"]

_NO_SIGNAL = float(np.finfo(np.float32).eps)
_NO_ENERGY = 1e-8


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """One output, ready to be compared with others of the same embedding model.

    `matrix` is Z [tokens, features] or Z^t Z [features, features], as `correlated` says. `present` [features]
    marks the columns with signal; the others are zero in `matrix`. `energy` is |Z^t Z|_F^2.
    """

    matrix: Matrix
    correlated: bool
    present: NDArray[np.bool_]
    energy: float


def features(states: NDArray[np.floating]) -> Features:
    """Prepare one output's token states T [tokens >= 1, features >= 1], any float type; computed in float64.

    A column whose norm is float32 rounding beside the strongest one's has no signal: its correlation is 0/0
    (MiniLM's dimensions 127, 223, 319 hold about 1e-32), and it is left out. ValueError on a wrong shape or
    on values that are not finite.
    """
    unit, present = _unit_columns(states)
    tokens, width = unit.shape
    correlated = tokens >= width
    matrix = unit.T @ unit if correlated else unit
    self_product = matrix if correlated else unit @ unit.T
    return Features(matrix, correlated, present, float(np.vdot(self_product, self_product)))


def similarity(first: Features, second: Features, entries: Entries = "full") -> float:
    """FrobCosSim of the correlation matrices (line 7): in [0, 1] with `full` entries.

    `off_diagonal` compares the matrices without their diagonals of ones; it lies in [-1, 1]. An output
    without signal in the compared entries is like nothing: 0. ValueError when the numbers of features differ.
    """
    if first.present.shape != second.present.shape:
        raise ValueError(
            f"outputs of {first.present.size} and {second.present.size} features come from different models"
        )
    product, energies = _product(first, second), (first.energy, second.energy)
    if entries == "off_diagonal":
        product -= int(np.count_nonzero(first.present & second.present))
        energies = (_off_diagonal_energy(first), _off_diagonal_energy(second))
    norms = math.sqrt(energies[0]) * math.sqrt(energies[1])
    return min(max(product / norms, -1.0), 1.0) if norms > 0 else 0.0


def _unit_columns(states: NDArray[np.floating]) -> tuple[Matrix, NDArray[np.bool_]]:
    if states.ndim != 2 or 0 in states.shape:
        raise ValueError(f"token states must have the shape [tokens >= 1, features >= 1], not {states.shape}")
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


def _off_diagonal_energy(one: Features) -> float:
    """|Corr|_F^2 less its diagonal of ones; what lies within rounding of nothing is 0."""
    energy = one.energy - int(np.count_nonzero(one.present))
    return energy if energy > _NO_ENERGY * one.energy else 0.0
