"""How sure the agents are (Faster-MoA, Algorithm 1, lines 2 and 3)."""

import math
from collections.abc import Sequence


class Confidence:
    """Geometric mean token probability of one output, kept up while it streams: only a sum and a count."""

    __slots__ = ("_sum", "_tokens")

    def __init__(self) -> None:
        self._sum = 0.0
        self._tokens = 0

    def add(self, logprobs: Sequence[float]) -> None:
        """Take in further tokens' natural-log probabilities. `-inf` is allowed; ValueError on a NaN."""
        added = sum(logprobs)
        if math.isnan(added):
            raise ValueError("a log-probability is not a number")
        self._sum += added
        self._tokens += len(logprobs)

    @property
    def value(self) -> float | None:
        """exp(mean log p) in [0, 1]; None while there is no token, for then nothing has been measured."""
        if self._tokens == 0:
            return None
        # rounding makes engines report a certain token's log-probability as slightly above 0
        return min(math.exp(min(self._sum / self._tokens, 0.0)), 1.0)


def token_confidence(logprobs: Sequence[float]) -> float:
    """C = exp(1/n * sum(log p)) in [0, 1] (line 2). ValueError without tokens or with a NaN."""
    confidence = Confidence()
    confidence.add(logprobs)
    if confidence.value is None:
        raise ValueError("an output without tokens has no confidence")
    return confidence.value


def rms_confidence(confidences: Sequence[float]) -> float:
    """C-bar = sqrt(1/l * sum(C_i^2)) over the completed outputs (line 3). ValueError without any."""
    if not confidences:
        raise ValueError("no completed output, so no mean confidence")
    return math.sqrt(sum(value * value for value in confidences) / len(confidences))
