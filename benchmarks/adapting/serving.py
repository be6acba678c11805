"""A stream served under one setting, and what came of it."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from benchmarks.adapting.stream import Asked
from shell_router.core.generation import Generation, Tokens
from shell_router.engines.pool import PairPool, random_rid


@dataclass(frozen=True)
class Served:
    """Outputs and latencies (seconds) in the stream's order, loads per server, and the mean time of a load."""

    outputs: Sequence[tuple[int, ...]]
    latencies_s: Sequence[float]
    elapsed_s: float
    loads: Sequence[int]
    load_s: float


async def served(pool: PairPool, asked: Sequence[Asked], clients: int) -> Served:
    """The stream in its order: each client asks for the next as soon as it has been answered."""
    waiting = iter(range(len(asked)))
    outputs: dict[int, tuple[int, ...]] = {}
    latencies_s: dict[int, float] = {}

    async def client() -> None:
        for place in waiting:
            begun_s = time.perf_counter()
            outputs[place] = await _answer(pool, asked[place])
            latencies_s[place] = time.perf_counter() - begun_s

    begun_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    elapsed_s = time.perf_counter() - begun_s
    counts = [leases.counts for leases in pool.adapters.leases.values()]
    loads = [one.loads for one in counts]
    order = range(len(asked))
    load_s = sum(one.load_s for one in counts) / max(1, sum(loads))
    return Served([outputs[at] for at in order], [latencies_s[at] for at in order], elapsed_s, loads, load_s)


def by_adapter(asked: Sequence[Asked]) -> Sequence[int]:
    """The places of the stream's requests, adapter after adapter."""
    first = {adapter: place for place, adapter in enumerate(dict.fromkeys(one.adapter for one in asked))}
    return sorted(range(len(asked)), key=lambda place: first[asked[place].adapter])


async def each_alone(pool: PairPool, asked: Sequence[Asked], clients: int) -> Served:
    """The same requests adapter after adapter: no more than two are in use at a time."""
    places = by_adapter(asked)
    run = await served(pool, [asked[place] for place in places], clients)
    back = {place: at for at, place in enumerate(places)}
    order = [back[place] for place in range(len(asked))]
    outputs, latencies_s = [run.outputs[at] for at in order], [run.latencies_s[at] for at in order]
    return Served(outputs, latencies_s, run.elapsed_s, run.loads, run.load_s)


async def _answer(pool: PairPool, asked: Asked) -> tuple[int, ...]:
    sampling = {"temperature": 0, "max_new_tokens": asked.tokens, "ignore_eos": True, "stream_interval": 8}
    request = Generation(random_rid(), asked.prompt, sampling, adapter=asked.adapter)
    async with aclosing(pool.generate(request)) as events:
        return tuple([token async for event in events if isinstance(event, Tokens) for token in event.ids])
