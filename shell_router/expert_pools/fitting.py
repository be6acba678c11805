"""K, B and the largest useful batch, from timed batches (CoServe, sections 4.2 and 4.5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from shell_router.core.least_squares import non_negative
from shell_router.errors import ConfigError

GAIN = 0.05
"""A smaller mean latency that is no gain: the paper says "plateaus", and not when."""
LEAST_TIMINGS = 2


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """A batch of so many samples took so long."""

    samples: int
    seconds: float

    def __post_init__(self) -> None:
        if self.samples < 1 or not 0 < self.seconds < inf:
            raise ConfigError(f"A batch of {self.samples} cannot take {self.seconds} s.", remedy="Correct the clock.")

    @property
    def mean_s(self) -> float:
        """Seconds per sample."""
        return self.seconds / self.samples


@dataclass(frozen=True, slots=True)
class Line:
    """A batch of n takes `sample_s` * n + `batch_s`: the paper's K and B.

    `error` is the mean relative error on batches that the line was not fitted to; None where they are too few.
    """

    sample_s: float
    batch_s: float
    error: float | None

    def seconds(self, samples: int) -> float:
        """K * n + B."""
        return self.sample_s * samples + self.batch_s


def largest_useful(timings: Sequence[BatchTiming], gain: float = GAIN) -> int:
    """The smallest batch than which none has a mean latency per sample that is smaller by more than `gain` of it."""
    least_s = min(one.mean_s for one in timings)
    return min(one.samples for one in timings if one.mean_s * (1 - gain) <= least_s)


def fit_line(timings: Sequence[BatchTiming]) -> Line:
    """The line with the least squared relative errors, neither K nor B below 0. Of one size of batches all is K."""
    sizes = {one.samples for one in timings}
    errors = []
    for left_out in sizes if len(sizes) > LEAST_TIMINGS else ():
        line = Line(*_fitted([one for one in timings if one.samples != left_out]), None)
        errors += [abs(line.seconds(one.samples) / one.seconds - 1) for one in timings if one.samples == left_out]
    return Line(*_fitted(timings), sum(errors) / len(errors) if errors else None)


def _fitted(timings: Sequence[BatchTiming]) -> tuple[float, float]:
    rows = np.array([(one.samples / one.seconds, 1 / one.seconds) for one in timings])
    scale = rows.max(axis=0)
    sample_s, batch_s = non_negative(rows / scale, np.ones(len(rows))) / scale
    return float(sample_s), float(batch_s)
