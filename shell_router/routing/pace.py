"""The room for batches on an engine, from the measured pace of its outputs."""

from dataclasses import dataclass
from math import floor
from statistics import linear_regression

SLOWDOWN = 0.05
"""The most by which batches may lengthen the time of an online request's token."""

LEAST_WEIGHT = 0.02
"""Of the newest sample in a mean."""


@dataclass(slots=True)
class Mean:
    """The mean load, and the mean seconds per token, of the samples."""

    samples: int = 0
    running: float = 0.0
    token_s: float = 0.0


class Pace:
    """Seconds per token on an engine, by the number of requests that run there.

    Means are kept per power of two. A line through them, base + running * slope, says how much
    slower one more request makes all others.
    """

    def __init__(self) -> None:
        self._means: dict[int, Mean] = {}

    def note(self, running: int, token_s: float) -> None:
        """Learn from one output's seconds per token while `running` requests ran."""
        mean = self._means.setdefault(running.bit_length(), Mean())
        mean.samples += 1
        weight = max(LEAST_WEIGHT, 1 / mean.samples)
        mean.running += weight * (running - mean.running)
        mean.token_s += weight * (token_s - mean.token_s)

    def count_room(self, online: int) -> int:
        """Return how many more requests slow `online` ones by no more than SLOWDOWN.

        It is one before two loads were measured, and at most doubles the largest measured load.
        """
        if len(self._means) < 2:
            return 1
        loads = [mean.running for mean in self._means.values()]
        times_s = [mean.token_s for mean in self._means.values()]
        slope, base_s = linear_regression(loads, times_s)
        most = max(0, round(2 * max(loads)) - online)
        if slope <= 0:
            return most
        online_s = max(0.0, base_s + slope * online)
        return min(most, floor(SLOWDOWN * online_s / slope))
