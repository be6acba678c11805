"""What prefill-only updates cost, as far as it has been measured: so much each, and so much per new token."""

from dataclasses import dataclass

_WEIGHT = 0.05  # of the newest update: fits a line through about the last twenty
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class UpdateCost:
    """`mean_s` is an update's mean time, `fixed_tokens` the new tokens that take as long as the rest of an update.

    That rest is a pass over all weights and a request's way there and back. `fixed_tokens` is None where updates of
    different sizes did not tell: longer ones took no longer, or all held as much.
    """

    mean_s: float
    fixed_tokens: float | None = None


class MeasuredUpdates:
    """The updates of one model: a straight line, by least squares that forget."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._tokens_squared = self._products = 0.0
        self._weight = 0.0

    def add(self, new_tokens: int, seconds: float) -> None:
        """An update of so many tokens that were not cached took this long."""
        keep = 1 - _WEIGHT
        self._weight = keep * self._weight + 1
        self._tokens = keep * self._tokens + new_tokens
        self._seconds = keep * self._seconds + seconds
        self._tokens_squared = keep * self._tokens_squared + new_tokens**2
        self._products = keep * self._products + new_tokens * seconds

    @property
    def cost(self) -> UpdateCost | None:
        """None before the first."""
        if not self._weight:
            return None
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        variance = self._tokens_squared / self._weight - mean_tokens**2
        covariance = self._products / self._weight - mean_tokens * mean_s
        if variance <= _ROUNDING * mean_tokens**2 or covariance <= _ROUNDING * mean_tokens * mean_s:
            return UpdateCost(mean_s)
        token_s = covariance / variance
        return UpdateCost(mean_s, max(0.0, mean_s / token_s - mean_tokens))
