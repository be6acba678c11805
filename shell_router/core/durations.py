"""Durations counted in the buckets of metrics' histograms."""

from bisect import bisect_left
from itertools import accumulate

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
    300,
    600,
)
"""Upper ends of the buckets."""


class Durations:
    """A histogram of durations."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self._counts = [0] * (len(SECONDS) + 1)

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.count += 1
        self.sum_s += seconds
        self._counts[bisect_left(SECONDS, seconds)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bucket's upper end, as Prometheus writes it, with the cumulative count."""
        return list(
            zip(
                (*map(str, map(float, SECONDS)), "+Inf"),
                map(float, accumulate(self._counts)),
                strict=True,
            )
        )
