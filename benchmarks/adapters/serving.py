"""Requests to adapters: drawn, served by a pool and, in virtual time, by windows."""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

import numpy as np

from benchmarks.coserve.runs import fewest_switches_in_this_order
from benchmarks.report import Row
from shell_router.core.engine import Generation, Tokens
from shell_router.engines.adapter_leases import AdapterLeases
from shell_router.engines.sglang import SglangPair, random_rid
from shell_router.http.tasks import TaskOwner
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.routing.adapter_cache import AdapterSettings

OUTPUT_TOKENS = (8, 40)
PROMPT_TOKENS = (20, 120)
FIRST_ID = 4
"""Below it lie the tokens that models use for themselves."""


@dataclass(frozen=True)
class Amount:
    """How many requests come from how many clients at a time, for how many adapters, `room` of them
    loaded.
    """

    requests: int
    clients: int
    adapters: int
    room: int


@dataclass(frozen=True)
class Asked:
    """One request: its adapter, its prompt and the length of its output."""

    adapter: str
    prompt: Sequence[int]
    tokens: int


def stream(amount: Amount, vocabulary: int, seed: int) -> list[Asked]:
    """Adapter k of n is wanted as often as 1 / k says (Zipf); hardly two prompts begin alike."""
    draw = random.Random(seed)
    weights = list(accumulate(1 / (place + 1) for place in range(amount.adapters)))
    found = []
    for _ in range(amount.requests):
        (number,) = draw.choices(range(amount.adapters), cum_weights=weights)
        prompt = [draw.randrange(FIRST_ID, vocabulary) for _ in range(draw.randint(*PROMPT_TOKENS))]
        found.append(Asked(f"adapter-{number}", prompt, draw.randint(*OUTPUT_TOKENS)))
    return found


@dataclass(frozen=True)
class Served:
    """Outputs and latencies (seconds) in the stream's order, loads per server, and the mean time of
    a load.
    """

    outputs: Sequence[tuple[int, ...]]
    latencies_s: Sequence[float]
    elapsed_s: float
    loads: Sequence[int]
    load_s: float


async def served(pool: SglangPair, asked: Sequence[Asked], clients: int) -> Served:
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
    loads = [one.loads.count for one in counts]
    order = range(len(asked))
    load_s = sum(one.loads.sum_s for one in counts) / max(1, sum(loads))
    return Served(
        [outputs[at] for at in order], [latencies_s[at] for at in order], elapsed_s, loads, load_s
    )


def by_adapter(asked: Sequence[Asked]) -> Sequence[int]:
    """The places of the stream's requests, adapter after adapter."""
    first = {
        adapter: place for place, adapter in enumerate(dict.fromkeys(one.adapter for one in asked))
    }
    return sorted(range(len(asked)), key=lambda place: first[asked[place].adapter])


async def each_alone(pool: SglangPair, asked: Sequence[Asked], clients: int) -> Served:
    """The same requests adapter after adapter: no more than two are in use at a time."""
    places = by_adapter(asked)
    run = await served(pool, [asked[place] for place in places], clients)
    back = {place: at for at, place in enumerate(places)}
    order = [back[place] for place in range(len(asked))]
    outputs, latencies_s = [run.outputs[at] for at in order], [run.latencies_s[at] for at in order]
    return Served(outputs, latencies_s, run.elapsed_s, run.loads, run.load_s)


async def _answer(pool: SglangPair, asked: Asked) -> tuple[int, ...]:
    sampling = {
        "temperature": 0,
        "max_new_tokens": asked.tokens,
        "ignore_eos": True,
        "stream_interval": 8,
    }
    request = Generation(random_rid(), asked.prompt, sampling, adapter=asked.adapter)
    async with aclosing(pool.generate(request)) as events:
        return tuple(
            [token async for event in events if isinstance(event, Tokens) for token in event.ids]
        )


STEP_S, REQUEST_S, UNLOAD_S = 0.010, 0.002, 0.005
LOADS_S = (0.05, 0.5)
WINDOWS_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
SEEDS = 3


class VirtualServer:
    """Loads take `load_s`. `at_work` requests are in its batch."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s
        self.at_work = 0

    async def load(self, adapter: str) -> None:
        """See `Loader`."""
        await asyncio.sleep(self._load_s)

    async def unload(self, adapter: str) -> None:
        """See `Loader`."""
        await asyncio.sleep(UNLOAD_S)

    async def decode(self, tokens: int) -> None:
        """Return when that many are written."""
        self.at_work += 1
        for _ in range(tokens):
            await asyncio.sleep(STEP_S + REQUEST_S * self.at_work)
        self.at_work -= 1


def windows(amount: Amount) -> list[Row]:
    """One row per load time and window: means over the seeds."""
    rows = []
    for load_s in LOADS_S:
        for window_s in WINDOWS_S:
            settings = AdapterSettings(
                max_loaded_adapters=amount.room, window_s=window_s, wait_s=1e6
            )
            runs = [_run(amount, settings, load_s, seed) for seed in range(SEEDS)]
            means = {key: fmean(run[key] for run in runs) for key in runs[0]}
            rows.append({"load_s": load_s, "window_s": window_s, **means})
    return rows


def _run(amount: Amount, settings: AdapterSettings, load_s: float, seed: int) -> Row:
    asked = stream(amount, 1000, seed)

    async def whole() -> Row:
        now = asyncio.get_running_loop().time
        server = VirtualServer(load_s)
        leases = AdapterLeases("the server", server, settings, TaskOwner(), now)
        latencies_s: list[float] = []
        waiting = iter(asked)
        begun_s = now()
        await asyncio.gather(
            *(_client(leases, server, waiting, latencies_s) for _ in range(amount.clients))
        )
        return _row(asked, amount, leases.counts.loads.count, latencies_s, now() - begun_s)

    return run_virtual(whole())


async def _client(
    leases: AdapterLeases, server: VirtualServer, waiting: Iterator[Asked], latencies_s: list[float]
) -> None:
    now = asyncio.get_running_loop().time
    for one in waiting:
        asked_s = now()
        lease = await leases.lease(one.adapter)
        await server.decode(one.tokens)
        lease.close()
        latencies_s.append(now() - asked_s)


def _row(
    asked: Sequence[Asked],
    amount: Amount,
    loads: int,
    latencies_s: Sequence[float],
    elapsed_s: float,
) -> Row:
    order = [one.adapter for one in asked]
    return {
        "per_s": len(asked) / elapsed_s,
        **{f"p{share}_s": float(np.percentile(latencies_s, share)) for share in (50, 95, 99)},
        "loads": loads,
        "fewest_in_order": fewest_switches_in_this_order(
            order, (), dict.fromkeys(order, 1), amount.room
        ),
    }
