"""Whether to cut off a cluster's unfinished agents (Faster-MoA, Algorithm 1, lines 3 and 10 to 14)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shell_router.early_exit.agreement import Features, Matrix, similarity
from shell_router.early_exit.confidence import rms_confidence
from shell_router.early_exit.settings import EarlyExit


@dataclass(frozen=True, slots=True)
class Score:
    """What the gate thinks of the completed outputs: the paper's C-bar, P, B and Q."""

    confidence: float
    agreement: float
    balance: float
    probability: float


def score(confidences: Sequence[float], similarities: Matrix, tau: float) -> Score:
    """Score the l completed outputs from their confidences C and similarities Sim [l, l].

    P is the mean of Sim[i, j] over i >= j, weighted by C_i C_j, the diagonal of ones included (lines 10, 11);
    without any confidence it is 0. B = 1 - |P - tau| / tau, not below 0 (line 12). Q = sqrt(C-bar * B) as in
    line 13; the prose of section 4.2 writes sqrt(C-bar) * B, and the algorithm was followed.
    """
    confidence = rms_confidence(confidences)
    weights = np.tril(np.outer(confidences, confidences))
    total = float(weights.sum())
    agreement = float(np.vdot(weights, similarities)) / total if total > 0 else 0.0
    balance = max(1.0 - abs(agreement - tau) / tau, 0.0)
    return Score(confidence, agreement, balance, math.sqrt(confidence * balance))


def decide(scored: Score, settings: EarlyExit, draw: float) -> bool:
    """Whether to exit now (line 14). `draw` is uniform on [0, 1), fresh for every completion."""
    if not 0 <= draw < 1:
        raise ValueError(f"a draw must lie in [0, 1), not {draw}")
    if settings.policy == "threshold":
        return scored.probability >= settings.threshold
    return draw < scored.probability


class ClusterGate:
    """Scores one cluster's outputs as they complete; each completion computes only its own row of Sim."""

    def __init__(self, settings: EarlyExit) -> None:
        self._settings = settings
        self._confidences: list[float] = []
        self._features: list[Features] = []
        self._rows: list[list[float]] = []

    def complete(self, confidence: float, output: Features) -> Score | None:
        """Take in one completed output (lines 4 to 9); None while fewer than `min_completed` are there."""
        row = [similarity(earlier, output, self._settings.similarity) for earlier in self._features]
        self._rows.append([*row, 1.0])
        self._confidences.append(confidence)
        self._features.append(output)
        if len(self._rows) < self._settings.min_completed:
            return None
        return score(self._confidences, self._lower_triangle(), self._settings.tau)

    def _lower_triangle(self) -> Matrix:
        size = len(self._rows)
        return np.array([row + [0.0] * (size - len(row)) for row in self._rows], dtype=np.float64)
