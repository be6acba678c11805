"""Rounds in which every setup has its turn, and the table's rows made of them."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.router_overhead.setups import Percentiles, Setups, Spent, Watched
from benchmarks.router_overhead.streams import StreamLoad, measure_small, measure_streams
from benchmarks.router_overhead.trees import (
    Ask,
    aiohttp_trees,
    barrier_trees,
    measure_trees,
    routed_trees,
)

Row = dict[str, Any]
LIMIT_S = 600.0
"""No run takes longer, whatever hangs."""
DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is measured in one round."""

    rounds: int
    small_s: float
    alone: int
    streams: StreamLoad
    trees_at_a_time: int
    trees_each: int
    tree_tokens: int = 32
    tree_token_s: float = 0.01


FULL = Amount(
    rounds=3, small_s=3.0, alone=1000, streams=StreamLoad(each=4), trees_at_a_time=32, trees_each=5
)
QUICK = Amount(
    rounds=1, small_s=1.0, alone=300, streams=StreamLoad(each=2), trees_at_a_time=16, trees_each=3
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One setup's figures of one measure in one round."""

    units: int
    spent: Spent
    latency: Percentiles


Samples = dict[tuple[str, str], list[Sample]]


async def measured_rows(setups: Setups, amount: Amount, rounds: int) -> list[Row]:
    """One row for each measure and setup."""
    samples: Samples = defaultdict(list)
    for _ in range(rounds):
        await _small_round(setups, amount, samples)
        await _stream_round(setups, amount, samples)
        await _tree_round(setups, amount, samples)
    return [_row(measure, setup, samples) for measure, setup in samples]


async def _small_round(setups: Setups, amount: Amount, samples: Samples) -> None:
    await setups.script(token_s=0.0)
    for setup in setups.all:
        found = await measure_small(
            setup.target, setup.watched, connections=32, seconds=amount.small_s, alone=amount.alone
        )
        samples["request", setup.name].append(Sample(found.requests, found.spent, found.latency))


async def _stream_round(setups: Setups, amount: Amount, samples: Samples) -> None:
    await setups.script(token_s=amount.streams.token_s)
    for setup in setups.all:
        found = await measure_streams(setup.target, setup.watched, amount.streams)
        streams = found.chunks // amount.streams.chunks
        samples["first token", setup.name].append(Sample(streams, found.spent, found.first_token))
        samples["chunk", setup.name].append(Sample(found.chunks, found.spent, found.chunk))


async def _tree_round(setups: Setups, amount: Amount, samples: Samples) -> None:
    await setups.script(token_s=amount.tree_token_s)
    for name, watched, clients in _tree_clients(setups, amount):
        async with clients() as asks:
            found = await measure_trees(asks, watched, amount.trees_each)
        samples["tree", name].append(Sample(found.trees, found.spent, found.latency))


Clients = Callable[[], AbstractAsyncContextManager[list[Ask]]]


def _tree_clients(setups: Setups, amount: Amount) -> Iterator[tuple[str, Watched, Clients]]:
    count, tokens = amount.trees_at_a_time, amount.tree_tokens
    ours = setups.watched_ours
    yield "shell-router", ours, lambda: routed_trees(setups.ours, "plain", count)
    yield (
        "shell-router, incremental prefill",
        ours,
        lambda: routed_trees(setups.ours, "incremental", count),
    )
    for name, peer in setups.peers.items():
        ask = partial(barrier_trees, peer.url, tokens, count)
        yield f"{name} + lean client, whole answers", peer.watched, partial(ask, stream=False)
        yield f"{name} + lean client, streamed", peer.watched, partial(ask, stream=True)
        asked_by_aiohttp = partial(aiohttp_trees, peer.url, tokens, count)
        yield f"{name} + aiohttp client", peer.watched, asked_by_aiohttp


def _row(measure: str, setup: str, samples: Samples) -> Row:
    mine, direct = samples[measure, setup], samples.get((measure, DIRECT))
    return {
        "measure": measure,
        "setup": setup,
        "per_s": median(one.units / one.spent.wall_s for one in mine),
        "router_us": _median(_router_us(one) for one in mine),
        "client_us": median(1e6 * one.spent.client_s / one.units for one in mine),
        "per_core_s": median(_per_core_s(one) for one in mine),
        "p50_ms": median(one.latency.p50_ms for one in mine),
        "p99_ms": median(one.latency.p99_ms for one in mine),
        "added_p50_ms": _added(mine, direct, lambda one: one.latency.p50_ms),
        "added_p99_ms": _added(mine, direct, lambda one: one.latency.p99_ms),
        "router_busy": _median(
            None if s.router_s is None else s.router_s / s.wall_s for s in _spent(mine)
        ),
        "load_busy": median((s.engine_s + s.client_s) / s.wall_s for s in _spent(mine)),
    }


def _spent(samples: list[Sample]) -> list[Spent]:
    return [one.spent for one in samples]


def _router_us(one: Sample) -> float | None:
    return None if one.spent.router_s is None else 1e6 * one.spent.router_s / one.units


def _per_core_s(one: Sample) -> float:
    return one.units / max((one.spent.router_s or 0.0) + one.spent.client_s, 1e-9)


def _added(
    mine: list[Sample], direct: list[Sample] | None, figure: Callable[[Sample], float]
) -> float | None:
    """The median of each round's distance to `direct`; None where there is no such setup, or this
    is it.
    """
    if direct is None or direct is mine:
        return None
    return median(figure(one) - figure(other) for one, other in zip(mine, direct, strict=True))


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
