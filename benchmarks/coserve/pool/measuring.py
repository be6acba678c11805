"""What components of one architecture cost on one executor, measured on real ones (CoServe,
sections 4.2 and 4.5).

As the paper says, an architecture is measured once: its components differ in their weights, and not
in their work.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

from benchmarks.coserve.pool.errors import ComponentTooLarge
from benchmarks.coserve.pool.values import Component, Components, Costs, Tier
from shell_router.core.statistics import Timing, fit_costs, measure_held_out_error
from shell_router.errors import require

GAIN = 0.05
"""A smaller mean latency that is no gain: the paper says "plateaus", and not when."""
LEAST_TIMINGS = 2
FITTED = 4
MORE = "Raise the executor's memory_bytes."
Weigh = Callable[[Component, str, Sequence[Any]], Awaitable[int]]
"""Runs a batch at a place; gives the bytes that it held at most besides the weights."""


def batch_timing(samples: int, seconds: float) -> Timing:
    """A batch of `samples` took so long: K * n + B."""
    return Timing(samples, (samples, 1), seconds)


def largest_useful(timings: Sequence[Timing]) -> int:
    """The smallest batch than which none has a mean latency per sample that is smaller by more than
    GAIN of it.
    """
    mean_s = {int(one.terms[0]): one.seconds / one.terms[0] for one in timings}
    return min(
        samples
        for samples, seconds in mean_s.items()
        if seconds * (1 - GAIN) <= min(mean_s.values())
    )


@dataclass(frozen=True, slots=True)
class Amount:
    """What is timed: `batches` of these numbers of samples and a load from each tier, in `rounds`
    after a warm-up.

    The medians count.
    """

    batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    rounds: int = 5

    def __post_init__(self) -> None:
        require(
            len(set(self.batches)) >= LEAST_TIMINGS and min(self.batches) >= 1,
            (
                f"batches must be {LEAST_TIMINGS} different numbers or more, from 1 on, not "
                f"{self.batches}."
            ),
            "Name them as in --batches 1,2,4,8.",
        )
        require(self.rounds >= 1, f"rounds must be at least 1, not {self.rounds}.", "Raise it.")


@dataclass(frozen=True, slots=True)
class Measured:
    """The costs, the timed batches, and the mean relative error on batches that K and B were not
    fitted to.
    """

    costs: Costs
    timings: tuple[Timing, ...]
    error: float | None


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured, and by what.

    `components` holds `some` of one architecture and may run them at `place`, in `memory_bytes`. A
    batch is of `sample`s. `clock` is seconds. Before a load from disk `forget` drops the system's
    copy of the file, so that it is really read.
    """

    components: Components
    some: Sequence[Component]
    place: str
    memory_bytes: int
    sample: Any
    weigh: Weigh
    clock: Callable[[], float]
    forget: Callable[[Component], None] = lambda _: None


async def measured(bench: Bench, amount: Amount) -> Measured:
    """The costs of an executor that runs nothing else meanwhile.

    Raises ComponentTooLarge where none of the batches fits into the memory, and what the components
    raise.
    """
    first = bench.some[0]
    free_bytes = bench.memory_bytes - max(component.memory_bytes for component in bench.some)
    if free_bytes <= 0:
        raise ComponentTooLarge(
            f"It takes {-free_bytes} bytes more than {bench.place} has.", remedy=MORE
        )
    await bench.components.load(first, bench.place)
    try:
        batches, activation_bytes = await _fitting(bench, amount, free_bytes)
    finally:
        await bench.components.unload(first, bench.place)
    read_s, load_s, timed_s = await _timed_rounds(bench, amount.rounds, batches)
    timings = tuple(batch_timing(samples, median(timed_s[samples])) for samples in batches)
    largest = largest_useful(timings)
    host_load_s = median(load_s)
    # fitted to batches that will run, and to the smallest at least: of fewer, noise would decide
    fitted = timings[: max(sum(samples <= largest for samples in batches), FITTED)]
    disk_load_s = host_load_s + median(read_s)
    sample_s, batch_s = fit_costs(fitted)
    costs = Costs(sample_s, batch_s, largest, activation_bytes, host_load_s, disk_load_s)
    return Measured(costs, timings, measure_held_out_error(fitted))


async def _fitting(bench: Bench, amount: Amount, free_bytes: int) -> tuple[list[int], int]:
    """The batches that fit into memory, and the most bytes that one sample takes in any of them."""
    first = bench.some[0]
    alone_bytes = await bench.weigh(first, bench.place, [bench.sample])
    fitting = [
        samples for samples in sorted(set(amount.batches)) if samples * alone_bytes <= free_bytes
    ]
    if not fitting:
        raise ComponentTooLarge(
            f"Its smallest batch takes {alone_bytes * min(amount.batches)} bytes, and "
            f"{bench.place} has {free_bytes}"
            " besides the weights.",
            remedy=MORE,
        )
    largest_bytes = await bench.weigh(first, bench.place, [bench.sample] * fitting[-1])
    return fitting, max(alone_bytes, ceil(largest_bytes / fitting[-1]))


async def _timed_rounds(
    bench: Bench, rounds: int, batches: Sequence[int]
) -> tuple[list[float], list[float], dict[int, list[float]]]:
    """Seconds of reads into host memory, of loads from there, and per size of batch.

    Each round times all of them, so that a machine whose speed drifts slows all alike.
    """
    reads: list[float] = []
    loads: list[float] = []
    runs: dict[int, list[float]] = {samples: [] for samples in batches}

    async def seconds(work: Awaitable[Any]) -> float:
        begun_s = bench.clock()
        await work
        return bench.clock() - begun_s

    for number in range(1 + rounds):
        component = bench.some[number % len(bench.some)]
        bench.forget(component)
        reads.append(await seconds(bench.components.load(component, Tier.HOST)))
        loads.append(await seconds(bench.components.load(component, bench.place)))
        for samples in batches:
            work = bench.components.run(component, bench.place, [bench.sample] * samples)
            runs[samples].append(await seconds(work))
        await bench.components.unload(component, bench.place)
        await bench.components.unload(component, Tier.HOST)
    return reads[1:], loads[1:], {samples: timed[1:] for samples, timed in runs.items()}
