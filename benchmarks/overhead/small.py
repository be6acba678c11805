"""Small requests that are not streamed: how many per second, and what one waits when there is nobody else."""

import asyncio
import time
from dataclasses import dataclass

import orjson

from overhead.measured import Percentiles, Spent, Watched, percentiles
from overhead.targets import Poster, Target

SMALL_BODY = orjson.dumps({"input_ids": list(range(1, 17)), "sampling_params": {"max_new_tokens": 4}})


@dataclass(frozen=True, slots=True)
class SmallFigures:
    """Throughput under load, and latency of one request after the other."""

    requests: int
    spent: Spent
    latency: Percentiles


async def measure_small(
    target: Target, watched: Watched, *, connections: int, seconds: float, alone: int
) -> SmallFigures:
    """`connections` send for `seconds`; before, `alone` requests one after the other on one connection."""
    posters = await asyncio.gather(*(target.open() for _ in range(connections)))
    try:
        await asyncio.gather(*(poster.post(SMALL_BODY) for poster in posters))
        latency = percentiles([await _timed(posters[0]) for _ in range(alone)])
        counts: list[int] = []

        async def load() -> None:
            ends_s = time.monotonic() + seconds
            counts.extend(await asyncio.gather(*(_send_until(ends_s, poster) for poster in posters)))

        spent = await watched.spent(load)
    finally:
        for poster in posters:
            poster.close()
    return SmallFigures(sum(counts), spent, latency)


async def _timed(poster: Poster) -> float:
    started_s = time.monotonic()
    await poster.post(SMALL_BODY)
    return time.monotonic() - started_s


async def _send_until(ends_s: float, poster: Poster) -> int:
    count = 0
    while time.monotonic() < ends_s:
        await poster.post(SMALL_BODY)
        count += 1
    return count
