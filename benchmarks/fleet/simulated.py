"""A fleet of routers, one Redis and many pairs, in virtual time.

Routers and Redis are servers of one core that work first come, first served. The pairs are those of
`shell-router simulate`, chosen by the router's own dispatchers: each router has its own, which see
what this router sent, or with `shared_view` all routers have the same.
"""

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from random import Random

from shell_router.core.engine import Finish, Generation, Hints
from shell_router.lab.simulation.run import SimulatedFleet
from shell_router.lab.simulation.settings import Length
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.standins.simulated.costs import PairCosts
from shell_router.standins.simulated.pair import SimulatedPair
from shell_router.standins.simulated.text import Written

LEAVES, CLUSTERS, AGENTS = 9, 3, 13
POLLS_PER_S = 10
"""How often a second the polls of all pairs take a part of a router's time."""


@dataclass(frozen=True, slots=True)
class RouterCosts:
    """CPU seconds of a router's one core.

    Attributes:
        agent_s: Of an agent, without its tokens and choices: a thirteenth of a tree's.
        token_s: Of a token that an agent writes.
        choice_s: Of choosing a pair, both servers, apart from what grows with their number.
        engine_s: Of each pair that is chosen from.
        poll_s: Of asking a pair for its load, each second.
    """

    agent_s: float = 0.0
    token_s: float = 0.0
    choice_s: float = 0.0
    engine_s: float = 0.0
    poll_s: float = 0.0

    def tree_s(self, tokens: float, pairs: Sequence[int]) -> float:
        """Return the cost of a 9-3-1 tree whose agents write `tokens` each.

        Each model of a layer has this many `pairs`.
        """
        agents = (LEAVES, CLUSTERS, 1)
        choices = sum(
            number * (self.choice_s + self.engine_s * at)
            for number, at in zip(agents, pairs, strict=True)
            if at > 1
        )
        return AGENTS * (self.agent_s + tokens * self.token_s) + choices

    def polls_share(self, pairs: Sequence[int]) -> float:
        """Return the share of the core that polls take."""
        return self.poll_s * sum(at for at in pairs if at > 1)


@dataclass(frozen=True, slots=True)
class RedisCosts:
    """CPU seconds of Redis, for an agent and for a token that it writes."""

    agent_s: float = 0.0
    token_s: float = 0.0

    def tree_s(self, tokens: float) -> float:
        """Return the cost of a 9-3-1 tree whose agents write `tokens` each."""
        return AGENTS * (self.agent_s + tokens * self.token_s)


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated.

    Attributes:
        routers: Their number. A load balancer gives trees to them in turn.
        pairs: Of each layer's model: proposers, aggregators, root.
        engines: The costs of a pair of each layer's model.
        router: The costs of a router.
        redis: The costs of Redis.
        output: Tokens of an agent's output.
        question_tokens: Tokens of a question.
        shared_view: Whether every router sees the requests of all.
        one_order: Whether all routers have the pairs in one order, by which equals are chosen.
        core_share: The share of a core that each router has.
    """

    routers: int
    pairs: tuple[int, int, int]
    engines: tuple[PairCosts, PairCosts, PairCosts]
    router: RouterCosts
    redis: RedisCosts
    output: Length
    question_tokens: int = 512
    shared_view: bool = False
    one_order: bool = False
    core_share: float = 1.0
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)


@dataclass(frozen=True, slots=True)
class Load:
    """Trees at random times, `per_s` a second, or by `clients` that ask without a pause.

    Clients begin one by one, so that their trees are not all in the same layer. What ends in
    `warm_s` is not counted; the simulation ends `counted_s` later.
    """

    per_s: float = 0.0
    clients: int = 0
    warm_s: float = 5.0
    counted_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures of the counted time: shares of busy time, and seconds from question to answer."""

    per_s: float
    p50_s: float
    p95_s: float
    router_busy: float
    redis_busy: float


def simulate_fleet(fleet: Fleet, load: Load, seed: int = 0) -> Outcome:
    """Simulate; equal arguments give equal results."""
    return run_virtual(_Run(fleet, load, seed).measure())


class _Core:
    """A core that does one piece of work after the other, in the order in which they come."""

    def __init__(self, share: float = 1.0) -> None:
        self._share = share
        self._free_s = 0.0
        self.busy_s = 0.0
        self._clock = asyncio.get_running_loop().time

    def begin(self, seconds: float) -> float:
        """Take the work on; return the seconds until it is done."""
        now_s = self._clock()
        seconds /= self._share
        self.busy_s += seconds
        self._free_s = max(now_s, self._free_s) + seconds
        return self._free_s - now_s

    async def work(self, seconds: float) -> None:
        if seconds > 0:
            await asyncio.sleep(self.begin(seconds))


class _Router:
    """One router: its core, and its view of each layer's pairs."""

    def __init__(self, fleet: Fleet, redis: _Core, views: Sequence[SimulatedFleet]) -> None:
        self.core = _Core(fleet.core_share)
        self._fleet = fleet
        self._redis = redis
        self._views = views

    async def answer(self, tree: int) -> None:
        """Run a tree of 9, 3 and 1 agents; each cluster's reader waits for its three."""
        question = [tree] * self._fleet.question_tokens
        clusters = await asyncio.gather(
            *(self._answer_cluster(tree, question, number) for number in range(CLUSTERS))
        )
        await self._run_agent(2, tree, CLUSTERS + LEAVES, question, sum(clusters))

    async def _answer_cluster(self, tree: int, question: list[int], number: int) -> int:
        size = LEAVES // CLUSTERS
        written = await asyncio.gather(
            *(self._run_agent(0, tree, number * size + leaf, question, 0) for leaf in range(size))
        )
        return await self._run_agent(1, tree, LEAVES + number, question, sum(written))

    async def _run_agent(
        self, layer: int, tree: int, agent: int, question: list[int], read: int
    ) -> int:
        """Run an agent that reads the question and `read` tokens of others; return its tokens."""
        fleet = self._fleet
        costs = fleet.router
        before_s = costs.agent_s
        if fleet.pairs[layer] > 1:
            before_s += costs.choice_s + fleet.pairs[layer] * costs.engine_s
        await self.core.work(before_s)
        await self._redis.work(fleet.redis.agent_s)
        ids = question + [-(tree * AGENTS + agent)] * read
        request = Generation(
            f"{tree}.{agent}",
            ids,
            {"stream_interval": 1 << 20},
            hints=Hints(user="fleet", topology="tree", agent=str(agent)),
        )
        tokens = 0
        async for item in self._views[layer].generate(request):
            if isinstance(item, Finish):
                tokens = item.completion_tokens
        self._redis.begin(tokens * fleet.redis.token_s)  # which no agent waits for
        await self.core.work(tokens * costs.token_s)
        return tokens

    async def poll(self) -> None:
        """Spend what polls of all pairs cost, evenly spread; without end."""
        share = self._fleet.router.polls_share(self._fleet.pairs)
        while share:
            self.core.begin(share / POLLS_PER_S)
            await asyncio.sleep(1 / POLLS_PER_S)


class _Run:
    def __init__(self, fleet: Fleet, load: Load, seed: int) -> None:
        self._fleet = fleet
        self._load = load
        self._draws = Random(seed)
        self._orders = Random(f"orders/{seed}")
        self._numbers = count()
        self._answered: list[tuple[float, float]] = []

    async def measure(self) -> Outcome:
        fleet = self._fleet
        redis = _Core()
        pairs = [
            [SimulatedPair(costs, self._write) for _ in range(number)]
            for number, costs in zip(fleet.pairs, fleet.engines, strict=True)
        ]
        names = ("proposers", "aggregators", "root")
        views = [
            [
                SimulatedFleet(name, self._order(own), fleet.scheduling)
                for name, own in zip(names, pairs, strict=True)
            ]
            for _ in range(1 if fleet.shared_view else fleet.routers)
        ]
        self._routers = [
            _Router(fleet, redis, views[number % len(views)]) for number in range(fleet.routers)
        ]
        async with AsyncExitStack() as stack:
            for view in views:
                for layer in view:
                    await stack.enter_async_context(layer.poll_pairs())
            tasks = [asyncio.create_task(router.poll()) for router in self._routers]
            if self._load.clients:
                between_s = self._load.warm_s / 2 / self._load.clients
                tasks += [
                    asyncio.create_task(self._ask_on(number * between_s))
                    for number in range(self._load.clients)
                ]
            else:
                tasks.append(asyncio.create_task(self._ask_at_random()))
            await asyncio.sleep(self._load.warm_s)
            before = self._read_busy(redis)
            await asyncio.sleep(self._load.counted_s)
            after = self._read_busy(redis)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._outcome([then - now for now, then in zip(before, after, strict=True)])

    def _order(self, pairs: Sequence[SimulatedPair]) -> Sequence[SimulatedPair]:
        """Return the pairs in an order of a router's own, as its start does."""
        if self._fleet.one_order:
            return pairs
        return self._orders.sample(pairs, len(pairs))

    def _outcome(self, busy_s: Sequence[float]) -> Outcome:
        counted_s = self._load.counted_s
        until_s = self._load.warm_s + counted_s
        times_s = [took for at, took in self._answered if self._load.warm_s <= at < until_s]
        if len(times_s) < 2:
            raise ValueError(f"{len(times_s)} trees were answered: count for longer")
        cuts = statistics.quantiles(times_s, n=20, method="inclusive")
        router, in_redis = (seconds / counted_s for seconds in busy_s)
        return Outcome(len(times_s) / counted_s, cuts[9], cuts[18], router, in_redis)

    def _read_busy(self, redis: _Core) -> list[float]:
        """Return the busy seconds so far: of a router, in the mean, and of Redis."""
        return [statistics.fmean(router.core.busy_s for router in self._routers), redis.busy_s]

    def _write(self, request: Generation) -> Written:
        draws = Random(request.rid)
        tokens = self._fleet.output.at(draws.random(), draws.gauss())
        return Written((), (), 0.0, filled=tokens)

    async def _ask_on(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while True:
            await self._ask_once()

    async def _ask_at_random(self) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._draws.expovariate(self._load.per_s))
                group.create_task(self._ask_once())

    async def _ask_once(self) -> None:
        clock = asyncio.get_running_loop().time
        started_s = clock()
        number = next(self._numbers)
        await self._routers[number % len(self._routers)].answer(number)
        self._answered.append((clock(), clock() - started_s))
