"""The room for batches on an engine, from the measured pace of its outputs."""

from dataclasses import dataclass
from math import floor
from statistics import linear_regression

LEAST_SAMPLES = 5
LEAST_WEIGHT = 0.02
"""Of the newest sample in a mean."""

Mark = tuple[float, float]
"""A time, and the seconds that all requests ran until then."""


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
        self._running = 0
        self._request_s = 0.0
        self._counted_s = 0.0

    def count(self, more: int, now_s: float) -> None:
        """Note that this number of outputs began, or ended if it is below 0."""
        self._request_s += self._running * (now_s - self._counted_s)
        self._counted_s = now_s
        self._running += more

    def mark(self, now_s: float) -> Mark:
        """Return now, as the beginning of a sample."""
        self.count(0, now_s)
        return now_s, self._request_s

    def measure(self, since: Mark, tokens: int, until: Mark) -> None:
        """Learn from an output's tokens between two marks."""
        seconds = until[0] - since[0]
        if tokens and seconds > 0:
            self.note((until[1] - since[1]) / seconds, seconds / tokens)

    def note(self, running: float, token_s: float) -> None:
        """Learn from one output's seconds per token while `running` requests ran in the mean."""
        mean = self._means.setdefault(round(running).bit_length(), Mean())
        mean.samples += 1
        weight = max(LEAST_WEIGHT, 1 / mean.samples)
        mean.running += weight * (running - mean.running)
        mean.token_s += weight * (token_s - mean.token_s)

    def count_room(self, online: int, slowdown: float) -> int:
        """Return how many more requests lengthen `online` ones' tokens by no more than this share.

        It is one before two loads were measured, one of them like that of `online` requests alone,
        and at most doubles the largest measured load.
        """
        means = [mean for mean in self._means.values() if mean.samples >= LEAST_SAMPLES]
        loads = [mean.running for mean in means]
        if len(means) < 2 or min(loads) > 2 * online:
            return int(slowdown > 0)
        times_s = [mean.token_s for mean in means]
        slope, base_s = linear_regression(loads, times_s)
        most = max(0, round(2 * max(loads)) - online)
        if slope <= 0:
            return most
        online_s = max(0.0, base_s + slope * online)
        return min(most, floor(slowdown * online_s / slope))
