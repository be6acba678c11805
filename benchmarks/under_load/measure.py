"""Streams of requests, the settings that are compared, and what clients see."""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from shell_router.core.engine import Finish, Generation, Hints
from shell_router.core.statistics import quantile
from shell_router.engines.sglang import SglangPair
from shell_router.errors import ShellRouterError
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.engine_selection import SelectionSettings
from shell_router.routing.queue import QueueSettings

IDS = 256
"""Token ids are below it, which every vocabulary here exceeds."""
FREQUENT = 4
"""How many times as often as any other user the first one asks."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kind of users asks: tokens that all prompts of one user begin with, others in the
    mean, and of outputs.
    """

    shared: int
    own: int
    output: int


KINDS: Mapping[str, Kind] = {
    "question": Kind(40, 60, 48),
    "chat": Kind(600, 60, 64),
    "document": Kind(0, 1200, 32),
}
USERS: Mapping[str, str] = {
    **{f"asks {number}": "question" for number in range(5)},
    **{f"talks {number}": "chat" for number in range(3)},
    **{f"reads {number}": "document" for number in range(2)},
}
"""By user the kind."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: at a number of mean gaps after the first, by a user, of a model, with tokens as
    in Kind.
    """

    at: float
    user: str
    model: str
    shared: int
    own: int
    output: int

    def ids(self, number: int, salt: str) -> list[int]:
        """Its prompt as the `number`-th of a run; runs of another `salt` share nothing with it."""
        begins, goes_on = Random(f"{salt}/{self.user}"), Random(f"{salt}/{number}")
        return begins.choices(range(IDS), k=self.shared) + goes_on.choices(range(IDS), k=self.own)


def stream(count: int, models: Mapping[str, float], scale: float, seed: int) -> list[Asked]:
    """`count` requests, Poisson, of models by their shares; lengths are `scale` times those of
    KINDS.
    """
    draws, at, found = Random(f"stream/{seed}"), 0.0, list[Asked]()
    users = list(USERS)
    often = [float(FREQUENT)] + [1.0] * (len(users) - 1)
    for _ in range(count):
        at += draws.expovariate(1.0)
        (user,) = draws.choices(users, often)
        (model,) = draws.choices(list(models), list(models.values()))
        found.append(_asked(at, user, model, scale, draws))
    return found


def alone(models: Sequence[str], scale: float) -> list[Asked]:
    """One request of every kind and model, of the mean lengths."""
    by_kind = {kind: user for user, kind in USERS.items()}
    return [
        Asked(
            0.0,
            user,
            model,
            round(scale * one.shared),
            round(scale * one.own),
            round(scale * one.output),
        )
        for kind, user in by_kind.items()
        for model in models
        for one in (KINDS[kind],)
    ]


def _asked(at: float, user: str, model: str, scale: float, draws: Random) -> Asked:
    kind = KINDS[USERS[user]]
    own = max(1, round(scale * kind.own * draws.uniform(0.5, 1.5)))
    return Asked(
        at,
        user,
        model,
        round(scale * kind.shared),
        own,
        max(2, round(scale * kind.output * draws.uniform(0.5, 1.5))),
    )


BASELINE = "least_running, no queue"
POLICIES = ("least_running", "round_robin", "gimbal", "scored")
ORDERS = ("no queue", "shortest_prefill")
AT_ONCE = 8
"""Requests that an engine gets at once where the others wait in the router: about what it needs to
be busy.
"""
PATIENT_S = 600.0


def settings(policies: Sequence[str], orders: Sequence[str]) -> Mapping[str, SchedulingSettings]:
    """By name, the baseline first, with which all others are compared."""
    found = {BASELINE: SchedulingSettings(SelectionSettings("least_running"))}
    for order in orders:
        for policy in policies:
            found[f"{policy}, {order}"] = scheduling(policy, order)
    return found


def scheduling(policy: str, order: str) -> SchedulingSettings:
    """One of them."""
    if order == "no queue":
        return SchedulingSettings(SelectionSettings(policy))
    return SchedulingSettings(
        SelectionSettings(policy), QueueSettings(order, max_running=AT_ONCE, wait_s=PATIENT_S)
    )


Pools = Mapping[str, SglangPair]
Alone = Mapping[tuple[str, str], float]
"""Seconds of a request that has the engines for itself, by kind and model."""


@dataclass(slots=True)
class Round:
    """Requests of one run: seconds to the first token, per token after it, and in all; those by
    user over `alone`.
    """

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
        """Jain's index of how much slower than alone each user's requests are, in the mean: 1 where
        all alike.
        """
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
    """What each request takes alone: the least of several times."""
    found: dict[tuple[str, str], float] = {}
    for turn in range(rounds):
        for number, one in enumerate(asked):
            done, place = Round(), (USERS[one.user], one.model)
            await ask(pools, number, one, f"alone {turn}", {}, done)
            if done.total_s:
                found[place] = min(done.total_s[0], found.get(place, done.total_s[0]))
    return found


async def capacity_per_s(pools: Pools, asked: Sequence[Asked], clients: int, salt: str) -> float:
    """Requests a second that are answered while `clients` are asked at a time."""
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
    request = Generation(
        rid, one.ids(number, salt), sampling, hints=Hints(one.user, rid, kind, kind)
    )
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
