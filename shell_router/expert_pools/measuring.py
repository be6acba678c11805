"""What experts of one architecture cost on one executor, measured on real ones (CoServe, section 4.5).

As the paper says, an architecture is measured once: its experts differ in their weights, and not in their work.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

from shell_router.errors import ConfigError, ExpertTooLarge
from shell_router.expert_pools.experts import Experts
from shell_router.expert_pools.fitting import LEAST_TIMINGS, BatchTiming, Line, fit_line, largest_useful
from shell_router.expert_pools.values import Costs, Expert, Tier

MORE = "Raise the executor's memory_bytes."
FITTED = 4
Weigh = Callable[[Expert, str, Sequence[Any]], Awaitable[int]]
"""Runs a batch at a place, and tells how many bytes it held at most beside the weights."""


@dataclass(frozen=True, slots=True)
class Amount:
    """What is timed: `batches` of so many samples, a load from each tier, and `rounds` of all that.

    Of each the median counts; a round before them warms up.
    """

    batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    rounds: int = 5

    def __post_init__(self) -> None:
        if len(set(self.batches)) < LEAST_TIMINGS or min(self.batches) < 1:
            raise ConfigError(
                f"batches must be {LEAST_TIMINGS} different numbers or more, from 1 on, not {self.batches}.",
                remedy="Name them as in --batches 1,2,4,8.",
            )
        if self.rounds < 1:
            raise ConfigError(f"rounds must be at least 1, not {self.rounds}.", remedy="Raise it.")


@dataclass(frozen=True, slots=True)
class Measured:
    """The costs, the batches that they were fitted to and those beyond the largest useful one, and how well they fit.

    `error` is as in `Line`.
    """

    costs: Costs
    timings: tuple[BatchTiming, ...]
    error: float | None


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured, and by what.

    `experts` holds `some` of one architecture and may run them at `place`, in `memory_bytes`. A batch is of `sample`s.
    `weigh` tells a batch's bytes, `clock` seconds. Before a load from disk `forget` has the system forget the file, so
    that it is really read. Without a `host_tier` all comes from disk, and no disk is known that loads share.
    """

    experts: Experts
    some: Sequence[Expert]
    place: str
    memory_bytes: int
    sample: Any
    weigh: Weigh
    clock: Callable[[], float]
    forget: Callable[[Expert], None] = lambda _: None
    host_tier: bool = True


async def measured(bench: Bench, amount: Amount) -> Measured:
    """The costs of an executor that nobody else uses meanwhile.

    Raises ExpertTooLarge where none of the batches fits into the memory, and what the experts raise.
    """
    first, room_bytes = bench.some[0], bench.memory_bytes - max(expert.memory_bytes for expert in bench.some)
    if room_bytes <= 0:
        raise ExpertTooLarge(f"It takes {-room_bytes} bytes more than {bench.place} has.", remedy=MORE)
    await bench.experts.load(first, bench.place)
    try:
        batches, activation_bytes = await _fitting(bench, amount, room_bytes)
    finally:
        await bench.experts.unload(first, bench.place)
    read_s, load_s, batch_s = await _timed_rounds(bench, amount.rounds, batches)
    timings = tuple(BatchTiming(samples, median(batch_s[samples])) for samples in batches)
    largest = largest_useful(timings)
    line = _line(timings, largest)
    host_load_s = median(load_s)
    costs = Costs(
        line.sample_s, line.batch_s, largest, activation_bytes, host_load_s, host_load_s + median(read_s or [0.0])
    )
    return Measured(costs, timings, line.error)


def _line(timings: Sequence[BatchTiming], largest: int) -> Line:
    """Fitted to batches that will run, and to the `FITTED` smallest at least: of fewer, noise would decide."""
    running = sum(one.samples <= largest for one in timings)
    return fit_line(timings[: max(running, FITTED)])


async def _fitting(bench: Bench, amount: Amount, room_bytes: int) -> tuple[list[int], int]:
    """The batches that fit beside the weights, and the most bytes that one sample takes in any of them."""
    first = bench.some[0]
    alone_bytes = await bench.weigh(first, bench.place, [bench.sample])
    fitting = [samples for samples in sorted(set(amount.batches)) if samples * alone_bytes <= room_bytes]
    if not fitting:
        raise ExpertTooLarge(
            f"Its smallest batch takes {alone_bytes * min(amount.batches)} bytes, and {bench.place} has {room_bytes}"
            " beside the weights.",
            remedy=MORE,
        )
    largest_bytes = await bench.weigh(first, bench.place, [bench.sample] * fitting[-1])
    return fitting, max(alone_bytes, ceil(largest_bytes / fitting[-1]))


async def _timed_rounds(
    bench: Bench, rounds: int, batches: Sequence[int]
) -> tuple[list[float], list[float], dict[int, list[float]]]:
    """Seconds of reads into host memory, of loads from there (from disk without a host tier), and per size of batch.

    Each round times all of them, so that a machine whose speed drifts slows all alike.
    """
    reads: list[float] = []
    loads: list[float] = []
    runs: dict[int, list[float]] = {samples: [] for samples in batches}
    for number in range(1 + rounds):
        expert = bench.some[number % len(bench.some)]
        bench.forget(expert)
        if bench.host_tier:
            reads.append(await _seconds(bench, bench.experts.load(expert, Tier.HOST)))
        loads.append(await _seconds(bench, bench.experts.load(expert, bench.place)))
        for samples in batches:
            work = bench.experts.run(expert, bench.place, [bench.sample] * samples)
            runs[samples].append(await _seconds(bench, work))
        await bench.experts.unload(expert, bench.place)
        if bench.host_tier:
            await bench.experts.unload(expert, Tier.HOST)
    return reads[1:], loads[1:], {samples: seconds[1:] for samples, seconds in runs.items()}


async def _seconds(bench: Bench, work: Awaitable[Any]) -> float:
    begun_s = bench.clock()
    await work
    return bench.clock() - begun_s
