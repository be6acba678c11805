"""A stream under one setting: what every request took, and what a round of it comes to."""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loading.stream import USERS, Asked
from shell_router.core.generation import Finish, Generation
from shell_router.core.hints import Hints
from shell_router.core.intervals import quantile
from shell_router.engines.pool import PairPool
from shell_router.errors import ShellRouterError

Pools = Mapping[str, PairPool]
Alone = Mapping[tuple[str, str], float]
"""Seconds of a request that has the engines for itself, by kind and model."""


@dataclass(slots=True)
class Round:
    """Requests of one run: seconds to the first token, per token after it, and in all; those by user over `alone`."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    slowdowns: dict[str, list[float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def figures(self) -> Mapping[str, float]:
        """By name; seconds."""
        return {
            "TTFT p50": quantile(self.ttft_s, 0.5),
            "TTFT p99": quantile(self.ttft_s, 0.99),
            "TPOT": statistics.fmean(self.tpot_s),
            "latency": statistics.fmean(self.total_s),
        }

    @property
    def fairness(self) -> float:
        """Jain's index of how much slower than alone each user's requests are, in the mean: 1 where all alike."""
        means = [statistics.fmean(found) for found in self.slowdowns.values()]
        return sum(means) ** 2 / (len(means) * sum(mean**2 for mean in means))


def merged(rounds: Sequence[Round]) -> Round:
    """All their requests as one round's."""
    found = Round()
    for one in rounds:
        found.ttft_s += one.ttft_s
        found.tpot_s += one.tpot_s
        found.total_s += one.total_s
        found.errors += one.errors
        for user, slower in one.slowdowns.items():
            found.slowdowns.setdefault(user, []).extend(slower)
    return found


async def alone_s(pools: Pools, asked: Sequence[Asked], rounds: int = 3) -> Alone:
    """What each request takes alone: the least of so many times."""
    found: dict[tuple[str, str], float] = {}
    for turn in range(rounds):
        for number, one in enumerate(asked):
            done, place = Round(), (USERS[one.user], one.model)
            await ask(pools, number, one, f"alone {turn}", {}, done)
            if done.total_s:
                found[place] = min(done.total_s[0], found.get(place, done.total_s[0]))
    return found


async def capacity_per_s(pools: Pools, asked: Sequence[Asked], clients: int, salt: str) -> float:
    """Requests a second that are answered while so many are asked at a time."""
    numbered, done = iter(enumerate(asked)), Round()

    async def client() -> None:
        for number, one in numbered:
            await ask(pools, number, one, salt, {}, done)

    begun_s = time.monotonic()
    await asyncio.gather(*(client() for _ in range(clients)))
    return len(done.total_s) / (time.monotonic() - begun_s)


async def run(pools: Pools, asked: Sequence[Asked], per_s: float, salt: str, alone: Alone) -> Round:
    """All of them, each at its time, `per_s` in the mean."""
    done, begun_s = Round(), time.monotonic()

    async def later(number: int, one: Asked) -> None:
        await asyncio.sleep(max(0.0, begun_s + one.at / per_s - time.monotonic()))
        await ask(pools, number, one, salt, alone, done)

    async with asyncio.TaskGroup() as group:
        for number, one in enumerate(asked):
            group.create_task(later(number, one))
    return done


async def ask(pools: Pools, number: int, one: Asked, salt: str, alone: Alone, done: Round) -> None:
    """One request; its output has the length that it is to have."""
    kind = USERS[one.user]
    sampling = {"max_new_tokens": one.output, "ignore_eos": True, "temperature": 0.0}
    rid = f"{salt} {number}".replace(" ", "-")
    request = Generation(rid, one.ids(number, salt), sampling, hints=Hints(one.user, rid, kind, kind))
    begun_s, first_s = time.monotonic(), 0.0
    try:
        async for item in pools[one.model].generate(request):
            if not isinstance(item, Finish):
                first_s = first_s or time.monotonic()
    except ShellRouterError as error:
        done.errors.append(str(error))
        return
    ended_s = time.monotonic()
    done.ttft_s.append(first_s - begun_s)
    done.tpot_s.append((ended_s - first_s) / (one.output - 1))
    done.total_s.append(ended_s - begun_s)
    if (kind, one.model) in alone:
        done.slowdowns.setdefault(one.user, []).append((ended_s - begun_s) / alone[kind, one.model])
