"""Small requests, and many streams at the same time."""

import asyncio
import re
import time
from dataclasses import dataclass

import orjson

from benchmarks.router_overhead.setups import (
    SMALL_BODY,
    Percentiles,
    Poster,
    Spent,
    Target,
    Watched,
    percentiles,
)


@dataclass(frozen=True, slots=True)
class SmallFigures:
    """Throughput under load, and latency of one request after the other."""

    requests: int
    spent: Spent
    latency: Percentiles


async def measure_small(
    target: Target, watched: Watched, *, connections: int, seconds: float, alone: int
) -> SmallFigures:
    """`connections` send for `seconds`; before, `alone` requests one after the other on one
    connection.
    """
    posters = await asyncio.gather(*(target.open() for _ in range(connections)))
    try:
        await asyncio.gather(*(poster.post(SMALL_BODY) for poster in posters))
        latency = percentiles([await _timed(posters[0]) for _ in range(alone)])
        counts: list[int] = []

        async def load() -> None:
            ends_s = time.monotonic() + seconds
            counts.extend(
                await asyncio.gather(*(_send_until(ends_s, poster) for poster in posters))
            )

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


_GOLDEN = 0.618034  # its multiples fill the unit interval evenly
_SENT_S = re.compile(rb'"sent_s":([0-9.]+)')


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """`streams` at a time, each of `chunks`, one token in each, `token_s` apart; every stream
    follows `each` times.
    """

    streams: int = 64
    chunks: int = 64
    token_s: float = 0.02
    each: int = 3

    def wait_s(self, at: int) -> float:
        """When stream `at` begins: spread over a stream's length, and their tokens over the time
        between two tokens.
        """
        return at / self.streams * self.chunks * self.token_s + at * _GOLDEN % 1 * self.token_s


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Delays of first tokens count from the request, those of chunks from the engine's writing
    them.
    """

    chunks: int
    spent: Spent
    first_token: Percentiles
    chunk: Percentiles


class Arrivals:
    """Reads the times at which the engine wrote its events, as they arrive."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.delays_s: list[float] = []
        self._rest = b""

    def arrived(self, piece: bytes) -> None:
        """Take in bytes that came now."""
        now_s = time.monotonic()
        seen = self._rest + piece
        end = 0
        for found in _SENT_S.finditer(seen, 0, seen.rfind(b"\n") + 1):
            self.first_s = self.first_s or now_s
            self.delays_s.append(now_s - float(found.group(1)))
            end = found.end()
        self._rest = seen[end:]


async def measure_streams(target: Target, watched: Watched, load: StreamLoad) -> StreamFigures:
    """The engine must stamp its events. Streams are spread, so that neither they nor their chunks
    come in bursts.
    """
    posters = await asyncio.gather(*(target.open() for _ in range(load.streams)))
    firsts_s: list[float] = []
    delays_s: list[float] = []

    async def one(poster: Poster, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        for _ in range(load.each):
            arrivals, started_s = Arrivals(), time.monotonic()
            await poster.post(_body(load.chunks), arrivals.arrived)
            assert arrivals.first_s is not None
            firsts_s.append(arrivals.first_s - started_s)
            delays_s.extend(arrivals.delays_s)

    async def all_streams() -> None:
        await asyncio.gather(*(one(poster, load.wait_s(at)) for at, poster in enumerate(posters)))

    try:
        await asyncio.gather(*(poster.post(_body(1)) for poster in posters))
        spent = await watched.spent(all_streams)
    finally:
        for poster in posters:
            poster.close()
    _require_all(len(delays_s), load)
    return StreamFigures(len(delays_s), spent, percentiles(firsts_s), percentiles(delays_s))


def _body(chunks: int) -> bytes:
    return orjson.dumps(
        {
            "input_ids": list(range(1, 17)),
            "sampling_params": {"max_new_tokens": chunks},
            "stream": True,
        }
    )


def _require_all(found: int, load: StreamLoad) -> None:
    wanted = load.streams * load.each * load.chunks
    if found != wanted:
        raise RuntimeError(f"{found} chunks arrived of {wanted}")
