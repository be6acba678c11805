"""Whose turn it is among the programs of one tenant, in virtual time, on simulated engines.

    python benchmarks/programs.py [--table NAME ...] [--seeds N] [--json]

    loop         400 calls of one session, all at once or 32 at a time, beside chats
    trees        runs of nine proposers, three aggregators and a root, all by one model, beside
                 chats: by the arrival of requests or by the beginning of runs
    classes      a third each with `service_tier` priority, default and flex, on overloaded engines

An engine gets at most 16 requests at once. Latencies are seconds from the question to the last
token, of all seeds together. `by request` names neither sessions nor runs, so that only arrivals
count.
"""

import argparse
import asyncio
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import Row, report

from benchmarks.gimbal.requests import log_normal
from benchmarks.gimbal.serving import PATIENT_S, costs
from shell_router.core.engine import TIERS, Finish, Generation, Hints, Session
from shell_router.core.statistics import quantile
from shell_router.lab.simulation.run import SimulatedFleet
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.queue import QueueSettings
from shell_router.standins.simulated.pair import SimulatedPair
from shell_router.standins.simulated.processor import Processor
from shell_router.standins.simulated.text import Written

ENGINE = "A100s by roofline, each with all of Qwen3-30B-A3B"
AT_ONCE = 16
CALLS, FEW = 400, 32
CHATS, CHAT_PROMPT, CHAT_OUTPUT = 60, 400, 200
CALL_PROMPT, CALL_OUTPUT = 1500, 200
TREES, LAYERS, QUESTION, ANSWER = 40, (9, 3, 1), 200, 300
"""A tree's agents by layer; each reads a question and, from the second layer on, three answers."""
_FILLER = tuple(range(1 << 14))
_WORST = 1 << 13


@dataclass
class World:
    """Engines behind one queue, and the latencies of what was asked of them, by its name."""

    fleet: SimulatedFleet
    draws: Random
    outputs: dict[str, int]
    took_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def now_s(self) -> float:
        """Virtual seconds."""
        return asyncio.get_running_loop().time()

    async def ask(self, name: str, prompt: float, output: float, hints: Hints) -> None:
        """Send a request with lengths around these, and wait for its last token."""
        begun_s = self.now_s()
        await self.write(prompt, output, hints)
        self.took_s[name].append(self.now_s() - begun_s)

    async def write(self, prompt: float, output: float, hints: Hints) -> None:
        """Send a request that is part of something longer."""
        number = len(self.outputs)
        tokens = min(_WORST, 1 + round(log_normal(self.draws, prompt)))
        self.outputs[f"r{number}"] = min(_WORST, 1 + round(log_normal(self.draws, output)))
        own = (number + 1) << 40
        sampling = {"max_new_tokens": 1 << 14, "stream_interval": 16}
        ids = range(own, own + tokens)
        async for item in self.fleet.generate(Generation(f"r{number}", ids, sampling, hints=hints)):
            assert not isinstance(item, Finish) or item.reason == "stop"

    async def poisson(
        self, count: int, per_s: float, ask: Callable[[int], Awaitable[None]]
    ) -> None:
        """Ask so often, at random times."""
        gaps_s = [self.draws.expovariate(per_s) for _ in range(count)]

        async def later(number: int) -> None:
            await asyncio.sleep(sum(gaps_s[: number + 1]))
            await ask(number)

        await asyncio.gather(*map(later, range(count)))


Scene = Callable[[World], Awaitable[None]]


def lived(
    scene: Scene, order: str, *, seeds: int, engines: int = 1, age_s: float = 5.0
) -> Mapping[str, list[float]]:
    """Return the latencies of all seeds, by name."""
    queue = QueueSettings(
        order, max_running=AT_ONCE, wait_s=PATIENT_S, max_waiting=100_000, age_s=age_s
    )
    took_s = defaultdict[str, list[float]](list)

    async def live(seed: int) -> None:
        outputs: dict[str, int] = {}

        def write(request: Generation) -> Written:
            ids = _FILLER[: outputs[request.rid]]
            return Written(("",) * len(ids), ids, 0.0)

        pairs = []
        for _ in range(engines):
            gpu = Processor()
            pairs.append(
                SimulatedPair(
                    costs(cached=False),
                    write,
                    prefill_processor=gpu,
                    decode_processor=gpu,
                    one_engine=True,
                )
            )
        fleet = SimulatedFleet("qwen3-30b-a3b", pairs, SchedulingSettings(queue=queue))
        world = World(fleet, Random(seed), outputs)
        async with fleet.poll_pairs():
            await scene(world)
        for name, found_s in world.took_s.items():
            took_s[name] += found_s

    for seed in range(seeds):
        run_virtual(live(seed))
    return took_s


def percentiles(name: str, took_s: list[float]) -> Row:
    """The median and the 95th percentile."""
    shown = {share: quantile(took_s, share) if took_s else None for share in (0.5, 0.95)}
    return {f"{name} p50": shown[0.5], f"{name} p95": shown[0.95]}


# --- a loop beside chats


def loop_scene(at_once: int, *, named: bool) -> Scene:
    """Chats of a session each; with `at_once` also the loop, so many of its calls at a time."""

    def hints(session: str) -> Hints:
        return Hints("tenant", session=Session(session) if named else None)

    async def chats(world: World) -> None:
        await world.poisson(
            CHATS,
            1.0,
            lambda number: world.ask("chat", CHAT_PROMPT, CHAT_OUTPUT, hints(f"chat {number}")),
        )

    async def loop(world: World) -> None:
        turns = asyncio.Semaphore(at_once)

        async def call() -> None:
            async with turns:
                await world.write(CALL_PROMPT, CALL_OUTPUT, hints("loop"))

        await asyncio.gather(*(call() for _ in range(CALLS)))
        world.took_s["loop"].append(world.now_s())

    async def scene(world: World) -> None:
        await asyncio.gather(chats(world), *([loop(world)] if at_once else []))

    return scene


def loops(seeds: int) -> list[Row]:
    """By the calls that the loop has under way, and the order."""
    rows: list[Row] = []
    for calls in (0, CALLS, FEW):
        for setting, order, named in (
            ("fcfs", "fcfs", True),
            ("least_attained by request", "least_attained", False),
            ("least_attained by program", "least_attained", True),
            ("shortest_total by request, 600 s to age", "shortest_total", False),
            ("shortest_total by program, 600 s to age", "shortest_total", True),
        ):
            if not calls and rows:
                continue
            age_s = 600.0 if "600" in setting else 5.0
            found = lived(loop_scene(calls, named=named), order, seeds=seeds, age_s=age_s)
            loop_s = found["loop"]
            row: Row = {"loop": f"{calls} at once" if calls else "none", "order": setting}
            row |= percentiles("chat", found["chat"])
            rows.append({**row, "loop ends": sum(loop_s) / max(1, len(loop_s))})
    return rows


# --- trees


def tree_scene(per_s: float, *, by_run: bool) -> Scene:
    """Trees and as many chats, each at this rate."""

    async def tree(world: World, number: int) -> None:
        begun_s = world.now_s()
        hints = Hints("tenant")
        if by_run:
            hints = Hints("tenant", f"run {number}", "tree", began_s=begun_s)
        for at, agents in enumerate(LAYERS):
            prompt = QUESTION + (3 * ANSWER if at else 0)
            layer = replace(hints, goes_on=by_run and at > 0)
            await asyncio.gather(*(world.write(prompt, ANSWER, layer) for _ in range(agents)))
        world.took_s["tree"].append(world.now_s() - begun_s)

    async def scene(world: World) -> None:
        await asyncio.gather(
            world.poisson(TREES, per_s, lambda number: tree(world, number)),
            world.poisson(
                TREES,
                per_s,
                lambda _: world.ask("chat", CHAT_PROMPT, CHAT_OUTPUT, Hints("tenant")),
            ),
        )

    return scene


def trees(seeds: int) -> list[Row]:
    """By the rate of trees and of chats, and the order."""
    rows: list[Row] = []
    for per_s in (0.3, 0.4, 0.5):
        for setting, order, by_run in (
            ("fcfs by request", "fcfs", False),
            ("fcfs by run", "fcfs", True),
            ("least_attained by request", "least_attained", False),
            ("least_attained by program", "least_attained", True),
        ):
            found = lived(tree_scene(per_s, by_run=by_run), order, seeds=seeds, engines=2)
            row: Row = {"trees/s": per_s, "order": setting}
            row |= percentiles("tree", found["tree"])
            rows.append({**row, **percentiles("chat", found["chat"])})
    return rows


# --- classes


def class_scene(per_s: float, *, classed: bool) -> Scene:
    """Chats of the three classes in turn."""

    async def scene(world: World) -> None:
        def ask(number: int) -> Awaitable[None]:
            tier = TIERS[number % len(TIERS)]
            hints = Hints("tenant", tier=tier if classed else "default")
            return world.ask(tier, CHAT_PROMPT, CHAT_OUTPUT, hints)

        await world.poisson(CALLS, per_s, ask)

    return scene


def classes(seeds: int) -> list[Row]:
    """By the rate, with classes and without."""
    rows: list[Row] = []
    for per_s in (3.0, 4.0, 5.0):
        for setting, classed, age_s in (
            ("none", False, 5.0),
            ("5 s to age", True, 5.0),
            ("60 s to age", True, 60.0),
        ):
            scene = class_scene(per_s, classed=classed)
            found = lived(scene, "fcfs", seeds=seeds, age_s=age_s)
            row: Row = {"requests/s": per_s, "classes": setting}
            for tier in TIERS:
                row |= percentiles(tier, found[tier])
            rows.append(row)
    return rows


TABLES: Mapping[str, tuple[str, Callable[[int], list[Row]]]] = {
    "loop": ("A loop of 400 calls beside its tenant's chats, one engine", loops),
    "trees": ("Trees and chats of one tenant, two engines", trees),
    "classes": ("Chats by class, one engine", classes),
}


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=TABLES, nargs="+", default=list(TABLES), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (default 3)")
    parser.add_argument("--json", action="store_true", help="end each table with one JSON object")
    options = parser.parse_args()
    for name in options.table:
        title, rows = TABLES[name]
        report(title, rows(options.seeds), engine=ENGINE, simulated=True, as_json=options.json)


if __name__ == "__main__":
    main()
