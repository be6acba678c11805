"""How much of an executor's memory holds components, and how much batches (CoServe, section 4.4);
and how many executors a device has.

More components mean fewer switches, and smaller batches. Where even the largest useful batch takes
little, it gets its memory and components the rest. Otherwise the decay-window search tries shares
on sample requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.coserve.pool.values import ExecutorSettings

PERCENT = 100.0
CASUAL_SHARE = 0.75
"""The paper's "CoServe Casual" (section 5.2), and the default of executors."""
NARROWEST = 1.0
"""In percent: smaller windows change nothing."""


INITIAL_WINDOW = 15.0
"""Each window is smaller than the one before by this percentage (equation 1): by that their sizes
sum to 100.

The paper counts components: 15, 27.75 and 38.6 are its windows' ends, and 28 to 39 components its
choice for task A.
"""
ERROR_MARGIN = 0.05
"""By how much throughput may miss the trend (equation 3), and as much as a sample can tell."""
SUBSTANTIAL = 1 - CASUAL_SHARE
"""A largest batch that would take more of the memory has its share searched. The paper has no
figure for it.
"""
REFINEMENTS = 3
"""How often the steps around the best are halved (ours)."""


@dataclass(frozen=True, slots=True)
class Window:
    """Where the search stopped, in percent, and all that was tried: what position gave how much
    throughput.
    """

    lower: float
    upper: float
    tried: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class Split:
    """The share of a device's executors, and the `least` that holds its largest component.

    `window` is None where nothing had to be searched; `tried` is what percentages gave how much
    throughput.
    """

    device: str
    share: float
    least: float
    window: Window | None = None
    tried: Mapping[float, float] = field(default_factory=dict)


def decay_window(
    throughput: Callable[[float], float], *, least: float = 0.0, margin: float = ERROR_MARGIN
) -> Window:
    """Slide a window up from 0, ever smaller, until throughput at its upper end misses the trend of
    those before.

    The trend is the line through all of them, by their number (equation 2), and no less than the
    best of them: so a decline ends the search as well. Nothing below `least` is tried, where no
    component would fit.
    """
    decay = 1 - INITIAL_WINDOW / PERCENT
    lower = 0.0
    size = INITIAL_WINDOW
    tried = dict[float, float]()
    while True:
        upper = lower + size
        if upper >= least:
            expected = _trend(list(tried.values()))
            tried[upper] = throughput(upper)
            if expected > 0 and (expected - tried[upper]) / expected > margin:
                return Window(lower, upper, tried)
        if size * decay < NARROWEST:
            return Window(lower, min(PERCENT, upper), tried)
        lower = upper
        size = size * decay


def _trend(values: Sequence[float]) -> float:
    """What the next of `values` would be on the line through them; 0 where there are none."""
    if not values:
        return 0.0
    if len(values) == 1:
        return values[0]
    middle = (len(values) - 1) / 2
    mean = sum(values) / len(values)
    spread = sum((place - middle) ** 2 for place in range(len(values)))
    slope = sum((place - middle) * (value - mean) for place, value in enumerate(values)) / spread
    return max(mean + slope * (len(values) - middle), *values)


def refined(
    tried: Mapping[float, float],
    throughput: Callable[[float], float],
    least: float,
    times: int = REFINEMENTS,
) -> Mapping[float, float]:
    """What was `tried`, and, repeated `times` times, the middles between the best and its neighbors
    (ours).
    """
    known = dict(tried)
    for _ in range(times):
        best = min(known, key=lambda position: (-known[position], position))
        below = max((one for one in known if one < best), default=min(least, best))
        above = min((one for one in known if one > best), default=PERCENT)
        for middle in ((below + best) / 2, (best + above) / 2):
            if middle not in known:
                known[middle] = throughput(middle)
    return known


def chosen(tried: Mapping[float, float], margin: float = ERROR_MARGIN) -> float:
    """Of the positions that come within `margin` of the best, the one nearest to the casual choice
    (ours).
    """
    enough = (1 - margin) * max(tried.values())
    near = [position for position, throughput in tried.items() if throughput >= enough]
    return min(near, key=lambda position: (abs(position - PERCENT * CASUAL_SHARE), position))


def share_next_to_largest_batch(executor: ExecutorSettings) -> float:
    """What the largest useful batch of any architecture leaves for components; 0 or less where it
    takes all.
    """
    taken = max(costs.largest_batch * costs.activation_bytes for costs in executor.costs.values())
    return 1 - taken / executor.memory_bytes


def memory_split(
    executors: Sequence[ExecutorSettings],
    device_of: Mapping[str, str],
    largest_bytes: Mapping[str, int],
    throughput: Callable[[Sequence[ExecutorSettings]], float],
) -> tuple[list[ExecutorSettings], list[Split]]:
    """The executors with their shares, and how each device's was found; executors of one device get
    the same.

    `throughput` tries executors, whose shelves always hold the device's largest component, of
    `largest_bytes`. Devices are searched one after the other, with what is known of the others,
    those that need no search first.
    """
    found = list(executors)

    def with_share(device: str, share: float) -> list[ExecutorSettings]:
        return [
            replace(one, component_share=share) if device_of[one.name] == device else one
            for one in found
        ]

    def tried(device: str, position: float) -> float:
        return throughput(with_share(device, position / PERCENT))

    splits: dict[str, Split] = {}
    for device in dict.fromkeys(device_of[one.name] for one in executors):
        alike = [one for one in executors if device_of[one.name] == device]
        least = (largest_bytes[device] + 1) / min(one.memory_bytes for one in alike)
        share = min(1.0, max(least, min(map(share_next_to_largest_batch, alike))))
        splits[device] = Split(device, share, least)
        if 1 - share <= SUBSTANTIAL:
            found = with_share(device, share)
    for device, split in splits.items():
        if 1 - split.share > SUBSTANTIAL:
            splits[device] = _searched(split, partial(tried, device))
            found = with_share(device, splits[device].share)
    return found, list(splits.values())


def _searched(split: Split, throughput: Callable[[float], float]) -> Split:
    least = PERCENT * split.least
    window = decay_window(throughput, least=least)
    others = [PERCENT * share for share in (CASUAL_SHARE, split.share) if share >= split.least]
    known = {**window.tried, **{position: throughput(position) for position in others}}
    tried = refined(known, throughput, least)
    return replace(split, share=chosen(tried) / PERCENT, window=window, tried=tried)


MOST_EXECUTORS = 6
"""Of a device; the paper tries up to 5 (figure 17)."""


def divided(device: str, alike: Sequence[ExecutorSettings], count: int) -> list[ExecutorSettings]:
    """`count` executors with equal shares of the memory of a device's executors, and the first
    one's costs.
    """
    each_bytes = sum(one.memory_bytes for one in alike) // count
    return [
        replace(alike[0], name=f"{device}-{number}", memory_bytes=each_bytes)
        for number in range(count)
    ]


def executor_counts(
    by_device: Mapping[str, Sequence[ExecutorSettings]],
    largest_bytes: Mapping[str, int],
    throughput: Callable[[Mapping[str, Sequence[ExecutorSettings]]], float],
) -> Mapping[str, Mapping[int, float]]:
    """By device, how much throughput each number of executors gives (CoServe, section 5.3).

    Devices are searched one after the other, CPUs last, with the best number of each before them.
    Numbers end where the device's largest component, of `largest_bytes`, does not fit any more.
    """
    found = dict(by_device)
    tried: dict[str, dict[int, float]] = {}
    for device in sorted(by_device, key=lambda name: name.startswith("cpu")):
        tried[device] = {}
        for count in range(1, MOST_EXECUTORS + 1):
            some = divided(device, by_device[device], count)
            if some[0].shelf_bytes < largest_bytes[device]:
                break
            tried[device][count] = throughput({**found, device: some})
        if tried[device]:
            best = max(tried[device], key=lambda count: (tried[device][count], -count))
            found[device] = divided(device, by_device[device], best)
    return tried
