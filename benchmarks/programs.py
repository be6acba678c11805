"""Whose turn it is among the programs of one tenant, and which engine has their prefixes.

    python benchmarks/programs.py [--engine simulated|embedded] [--table NAME ...] [--seeds N]
    [--json]
    python benchmarks/programs.py --config FILE --model ALIAS [--seeds N] [--json]

    loop         many calls of one session, all at once or some at a time, beside chats
    trees        runs of nine proposers, three aggregators and a root, all by one model, beside
                 chats: by the arrival of requests or by the beginning of runs
    classes      a third each with `service_tier` priority, default and flex, on overloaded engines
    batches      chats beside a batch, on pairs that share it or on fewer; the last row of a load is
                 a batch that has a pair of its own (simulated: three pairs on six H200s)
    sessions     chats of several turns, whose prompts grow, on two engines (embedded)
    children     children of a session, whose prompts begin alike, on two engines (embedded)

Simulated engines run in virtual time. Embedded ones serve the small model of models/, for prefixes
the large one, each pair on one core. Their rates are shares of the chats a second that one of them
answers, which is measured first. In every round all rows get the same stream in turn, another one
first each time. Latencies are seconds from the question to the last token, of all seeds together;
`ratio` is to the first row of the same load, of the means of a round: the median, with its 95 %
interval. `by request` names neither sessions nor runs, so that only arrivals count.

`--config` takes the first pair of a deployment's model for the table `batches`. Its engines are
started, if the file has `launch`.
"""

import argparse
import asyncio
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import Row, report

from benchmarks.gimbal.requests import log_normal
from benchmarks.gimbal.serving import PATIENT_S, costs
from benchmarks.overlap.engines import running_deployment
from benchmarks.overlap.measure import interval
from benchmarks.under_load.engines import MODELS
from shell_router.app import load_config
from shell_router.app.pairs import address_of
from shell_router.core.engine import (
    TIERS,
    Finish,
    Generation,
    Hints,
    RequestClass,
    ServedModel,
    Session,
    Tokenizer,
    Tokens,
)
from shell_router.core.statistics import quantile
from shell_router.engines.address import PairAddress
from shell_router.engines.sglang import SglangPair
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.lab.simulation.run import SimulatedFleet
from shell_router.lab.simulation.settings import load_profiles
from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.moa.preemption import generate_preemptibly
from shell_router.routing.dispatcher import SchedulingSettings
from shell_router.routing.engine_selection import SelectionSettings
from shell_router.routing.queue import QueueSettings
from shell_router.standins.embedded.fleet import EmbeddedFleet
from shell_router.standins.embedded.settings import EmbeddedSettings
from shell_router.standins.simulated.costs import PairCosts
from shell_router.standins.simulated.pair import SimulatedPair
from shell_router.standins.simulated.processor import Processor
from shell_router.standins.simulated.text import SimulatedTokenizer, Written

LAYERS = (9, 3, 1)
"""A tree's agents; each reads a question and, from the second layer on, three answers."""
CHILDREN = 8
MOST = 1 << 14
"""The limit of outputs whose length the router does not know."""
BATCH: RequestClass = "batch"
_IDS = 256


@dataclass(frozen=True, slots=True)
class Size:
    """The amounts for a kind of engine. Lengths are mean tokens of prompt and output.

    Attributes:
        at_once: Requests that an engine gets at once.
        few: Calls of the loop at a time, beside all at once.
        ages_s: Settings of aging, for classes.
        longest: The most tokens of a prompt, and of an output.
        batch_pairs: Pairs that chats and a batch share.
        batch_s: The length of a run, over the unit of rates.
        batch_per_s: Rates of chats.
        lines: Lines of the batch that run or wait at a time.
        line: As `chat`.
    """

    engine: str
    at_once: int
    calls: int
    few: int | None
    chats: int
    chat: tuple[int, int]
    chat_per_s: float
    call: tuple[int, int]
    trees: int
    tree_per_s: tuple[float, ...]
    question: int
    answer: int
    classed: int
    class_per_s: tuple[float, ...]
    ages_s: tuple[float, ...]
    longest: int
    batch_pairs: int
    batch_s: float
    batch_per_s: tuple[float, ...]
    lines: int
    line: tuple[int, int]


SIMULATED = Size(
    "A100s by roofline, each with all of Qwen3-30B-A3B",
    at_once=16,
    calls=400,
    few=32,
    chats=60,
    chat=(400, 200),
    chat_per_s=1.0,
    call=(1500, 200),
    trees=40,
    tree_per_s=(0.3, 0.4, 0.5),
    question=200,
    answer=300,
    classed=400,
    class_per_s=(3.0, 4.0, 5.0),
    ages_s=(5.0, 60.0),
    longest=1 << 13,
    batch_pairs=3,
    batch_s=30.0,
    batch_per_s=(6.0, 30.0, 90.0),
    lines=256,
    line=(600, 300),
)
EMBEDDED = Size(
    "embedded pairs, each on one core",
    at_once=8,
    calls=150,
    few=None,
    chats=30,
    chat=(40, 16),
    chat_per_s=0.33,
    call=(150, 16),
    trees=16,
    tree_per_s=(0.12,),
    question=30,
    answer=16,
    classed=240,
    class_per_s=(3.0,),
    ages_s=(5.0, 60.0),
    longest=600,
    batch_pairs=2,
    batch_s=60.0,
    batch_per_s=(0.3, 0.8),
    lines=16,
    line=(60, 24),
)


DEPLOYED = replace(
    EMBEDDED,
    engine="one pair of a deployment",
    longest=1 << 12,
    batch_pairs=1,
    batch_s=10.0,
    batch_per_s=(4.0,),
    lines=16,
    chat=(400, 128),
    line=(600, 200),
)


@dataclass
class World:
    """Engines behind one queue, and figures of what was asked of them, by its name.

    Attributes:
        unit_per_s: What rates are multiples of.
    """

    fleet: SimulatedFleet | SglangPair
    draws: Random
    size: Size
    outputs: dict[str, int]
    tokenizer: Tokenizer
    name: str = "r"
    unit_per_s: float = 1.0
    line_draws: Random = field(default_factory=partial(Random, BATCH))
    took: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def now_s(self) -> float:
        """The loop's seconds, virtual on simulated engines."""
        return asyncio.get_running_loop().time()

    async def ask(self, name: str, lengths: tuple[int, int], hints: Hints) -> None:
        """Send a request with lengths around these, and wait for its last token."""
        begun_s = self.now_s()
        took_s = self.took[name]
        await self.write(lengths, hints)
        took_s.append(self.now_s() - begun_s)

    async def write(
        self, lengths: tuple[int, int], hints: Hints, beginning: Sequence[int] = ()
    ) -> tuple[list[int], float, int]:
        """Send a request that is part of something longer.

        Returns:
            The ids of prompt and output, when the first came, and the tokens that were prefilled.
        """
        rid = f"{self.name}{len(self.outputs):06}"
        # chats have the same lengths whatever a batch draws
        draws = self.line_draws if hints.user == BATCH else self.draws
        prompt, output = (
            min(self.size.longest, 1 + round(log_normal(draws, mean))) for mean in lengths
        )
        self.outputs[rid] = output
        ids = [*beginning, *Random(rid).choices(range(_IDS), k=prompt)]
        # simulated engines end an output by themselves, so that the router does not know its length
        most = output if isinstance(self.fleet, SglangPair) else MOST
        sampling = {"max_new_tokens": most, "ignore_eos": True, "stream_interval": 16}
        first_s = 0.0
        prefilled = 0
        async for item in self.generate(Generation(rid, tuple(ids), sampling, hints=hints)):
            if isinstance(item, Finish):
                assert item.reason != "abort"
                prefilled = item.prompt_tokens - item.cached_tokens
            else:
                first_s = first_s or self.now_s()
                ids += item.ids
        return ids, first_s, prefilled

    def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """Send a request, in a way that can be preempted if it is a batch's."""
        if request.hints.tier != "batch":
            return self.fleet.generate(request)
        model = ServedModel("model", self.fleet, self.tokenizer, 1 << 17)
        return generate_preemptibly(model, request, self.took["lost tokens"].append)

    async def poisson(
        self, count: int, per_s: float, ask: Callable[[int], Awaitable[None]]
    ) -> None:
        """Ask so often, at random times."""
        gaps_s = [self.draws.expovariate(per_s * self.unit_per_s) for _ in range(count)]

        async def later(number: int) -> None:
            await asyncio.sleep(sum(gaps_s[: number + 1]))
            await ask(number)

        await asyncio.gather(*map(later, range(count)))


Scene = Callable[[World], Awaitable[None]]
Took = Mapping[str, list[float]]


@dataclass(frozen=True, slots=True)
class Case:
    """A row of a table: its load, what is compared there, and how that is asked."""

    load: Row
    compared: Row
    scene: Scene
    scheduling: SchedulingSettings
    engines: int = 1
    model: str = "small"
    costs: PairCosts | None = None


def queued(size: Size, order: str, age_s: float = 5.0) -> SchedulingSettings:
    """Requests that wait in the router, in this order."""
    return SchedulingSettings(
        queue=QueueSettings(
            order, max_running=size.at_once, wait_s=PATIENT_S, max_waiting=100_000, age_s=age_s
        )
    )


def simulate(case: Case, size: Size, seed: int) -> Took:
    """Live through the case in virtual time."""

    async def live() -> Took:
        outputs: dict[str, int] = {}

        def write(request: Generation) -> Written:
            name = request.rid.rpartition(".")[2]
            left = outputs[name] - (MOST - request.sampling["max_new_tokens"])
            return Written.after_filler(left, name, "", 0.0)

        pairs = []
        for _ in range(case.engines):
            if case.costs is not None:
                pairs.append(SimulatedPair(case.costs, write))
                continue
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
        fleet = SimulatedFleet("qwen3-30b-a3b", pairs, case.scheduling)
        world = World(fleet, Random(seed), size, outputs, SimulatedTokenizer())
        async with fleet.poll_pairs():
            await case.scene(world)
        return world.took

    return run_virtual(live())


@dataclass(frozen=True, slots=True)
class Pairs:
    """Embedded pairs that run, and the chats a second that one of them answers."""

    addresses: Sequence[PairAddress]
    tokenizer: Tokenizer
    chats_per_s: float = 1.0

    async def live(self, case: Case, size: Size, seed: int, name: str) -> Took:
        """Live through the case, with names of requests that begin so."""
        pool = SglangPair(*self.addresses[: case.engines], scheduling=case.scheduling)
        try:
            async with pool.fleet.follow():
                world = World(pool, Random(seed), size, {}, self.tokenizer, name, self.chats_per_s)
                await case.scene(world)
        finally:
            await pool.aclose()
        return world.took


@asynccontextmanager
async def embedded_pairs(size: Size) -> AsyncIterator[Mapping[str, Pairs]]:
    """Start two pairs of each model and measure what one of them answers."""
    settings = {
        f"{model}-{core}": EmbeddedSettings(
            str(MODELS / model),
            cores=(core % (os.cpu_count() or 1),),
            incremental_streaming_output=True,
        )
        for model in ("small", "large")
        for core in range(2)
    }
    calibration = replace(size, calls=10 * size.at_once, call=size.chat, chats=0)
    case = Case({}, {}, loop_scene(size.at_once, named=False), queued(size, "fcfs"))
    measured = {}
    async with EmbeddedFleet(settings) as fleet:
        for model in ("small", "large"):
            addresses = [fleet[f"{model}-{core}"].address for core in range(2)]
            pairs = Pairs(addresses, HfTokenizer.from_folder(MODELS / model))
            for name in ("warm-", "capacity-"):
                took = await pairs.live(case, calibration, 0, name)
            measured[model] = replace(pairs, chats_per_s=calibration.calls / took["loop"][0])
        yield measured


def percentiles(name: str, took: list[float]) -> Row:
    """The median and the 95th percentile."""
    shown = {share: quantile(took, share) if took else None for share in (0.5, 0.95)}
    return {f"{name} p50": shown[0.5], f"{name} p95": shown[0.95]}


def build_rows(cases: Sequence[Case], rounds: Sequence[Sequence[Took]], ratios: bool) -> list[Row]:
    """One row per case, of all `rounds`, which hold a result per case."""
    rows: list[Row] = []
    names = list(dict.fromkeys(name for took in rounds[0] for name in took))
    for at, case in enumerate(cases):
        first = next(other for other in range(at + 1) if cases[other].load == case.load)
        row = {**case.load, **case.compared}
        for name in names:
            row |= percentiles(name, [value for took in rounds for value in took[at].get(name, ())])
            if ratios and all(took[at].get(name) and took[first].get(name) for took in rounds):
                found = [
                    statistics.fmean(took[at][name]) / statistics.fmean(took[first][name])
                    for took in rounds
                ]
                row[f"{name} ratio"] = f"{statistics.median(found):.2f} [{interval(found)}]"
            elif ratios:
                row[f"{name} ratio"] = None
        rows.append(row)
    return rows


# --- a loop beside chats


def loop_scene(at_once: int, *, named: bool) -> Scene:
    """Chats of a session each; with `at_once` also the loop, so many of its calls at a time."""

    def hints(session: str) -> Hints:
        return Hints("tenant", session=Session(session) if named else None)

    async def chats(world: World) -> None:
        size = world.size
        await world.poisson(
            size.chats,
            size.chat_per_s,
            lambda number: world.ask("chat", size.chat, hints(f"chat {number}")),
        )

    async def loop(world: World) -> None:
        begun_s = world.now_s()
        turns = asyncio.Semaphore(at_once)

        async def call() -> None:
            async with turns:
                await world.write(world.size.call, hints("loop"))

        await asyncio.gather(*(call() for _ in range(world.size.calls)))
        world.took["loop"].append(world.now_s() - begun_s)

    async def scene(world: World) -> None:
        await asyncio.gather(chats(world), *([loop(world)] if at_once else []))

    return scene


def loops(size: Size) -> list[Case]:
    """By the calls that the loop has under way, and the order."""
    cases: list[Case] = []
    for calls in (0, size.calls, *([size.few] if size.few else [])):
        for setting, order, named in (
            ("fcfs", "fcfs", True),
            ("least_attained by request", "least_attained", False),
            ("least_attained by program", "least_attained", True),
            ("shortest_total by request, 600 s to age", "shortest_total", False),
            ("shortest_total by program, 600 s to age", "shortest_total", True),
        ):
            if not calls and cases:
                continue
            age_s = 600.0 if "600" in setting else 5.0
            load: Row = {"loop": f"{calls} at once" if calls else "none"}
            scene = loop_scene(calls, named=named)
            cases.append(Case(load, {"order": setting}, scene, queued(size, order, age_s)))
    return cases


# --- trees


def tree_scene(per_s: float, *, by_run: bool) -> Scene:
    """Trees and as many chats, each at this rate."""

    async def tree(world: World, number: int) -> None:
        size = world.size
        begun_s = world.now_s()
        hints = Hints("tenant")
        if by_run:
            hints = Hints("tenant", f"run {number}", "tree", began_s=begun_s)
        for at, agents in enumerate(LAYERS):
            prompt = size.question + (3 * size.answer if at else 0)
            layer = replace(hints, goes_on=by_run and at > 0)
            asked = (world.write((prompt, size.answer), layer) for _ in range(agents))
            await asyncio.gather(*asked)
        world.took["tree"].append(world.now_s() - begun_s)

    async def scene(world: World) -> None:
        size = world.size
        await asyncio.gather(
            world.poisson(size.trees, per_s, lambda number: tree(world, number)),
            world.poisson(
                size.trees, per_s, lambda _: world.ask("chat", size.chat, Hints("tenant"))
            ),
        )

    return scene


def trees(size: Size) -> list[Case]:
    """By the rate of trees and of chats, and the order."""
    return [
        Case(
            {"trees/s": per_s},
            {"order": setting},
            tree_scene(per_s, by_run="request" not in setting),
            queued(size, setting.split()[0]),
            engines=2,
        )
        for per_s in size.tree_per_s
        for setting in (
            "fcfs by request",
            "fcfs by run",
            "least_attained by request",
            "least_attained by program",
        )
    ]


# --- classes


def class_scene(per_s: float, *, classed: bool) -> Scene:
    """Chats of the three classes in turn."""

    async def scene(world: World) -> None:
        def ask(number: int) -> Awaitable[None]:
            tier = TIERS[number % len(TIERS)]
            hints = Hints("tenant", tier=tier if classed else "default")
            return world.ask(tier, world.size.chat, hints)

        await world.poisson(world.size.classed, per_s, ask)

    return scene


def classes(size: Size) -> list[Case]:
    """By the rate, with classes and without."""
    return [
        Case(
            {"requests/s": per_s},
            {"classes": f"{age_s:g} s to age" if classed else "none"},
            class_scene(per_s, classed=classed),
            queued(size, "fcfs", age_s),
        )
        for per_s in size.class_per_s
        for classed, age_s in ((False, size.ages_s[0]), *((True, age_s) for age_s in size.ages_s))
    ]


# --- a batch beside chats

H200S = Path(__file__).parents[1] / "configs/engines/h200.yaml"


def batch_scene(per_s: float, tier: RequestClass | None, *, chats: bool = True) -> Scene:
    """Chats at this rate, and lines of a batch in the class `tier` until the last chat is answered;
    lines alone end after as long."""

    async def scene(world: World) -> None:
        size = world.size
        begun_s = world.now_s()
        answered = 0

        async def line() -> None:
            nonlocal answered
            while True:
                await world.write(size.line, Hints(BATCH, tier=tier or "default"))
                answered += 1

        lines = [asyncio.create_task(line()) for _ in range(size.lines if tier else 0)]
        if chats:
            await world.poisson(
                round(size.batch_s * per_s),
                per_s,
                lambda _: world.ask("chat", size.chat, Hints("tenant")),
            )
        else:
            await asyncio.sleep(size.batch_s / world.unit_per_s)
        took_s = world.now_s() - begun_s
        for task in lines:
            task.cancel()
        await asyncio.gather(*lines, return_exceptions=True)
        lost = sum(world.took.pop("lost tokens", ()))
        if tier:
            world.took["answers/h"].append(3600 * answered / took_s)
            world.took["lost tokens/answer"].append(lost / max(1, answered))

    return scene


def batches(size: Size) -> list[Case]:
    """By the rate of chats, and the batch's class or its own pair."""
    costs = None
    if size is SIMULATED:
        profiles = load_profiles(H200S)
        costs = profiles.models["qwen3-vl-8b"].costs(profiles.gpus)
    pairs = size.batch_pairs
    patient = QueueSettings(wait_s=PATIENT_S, max_waiting=100_000)
    return [
        Case(
            {"chats/s": per_s},
            {"batch": setting, "pairs": engines},
            batch_scene(per_s, tier, chats=chats),
            SchedulingSettings(queue=patient, batch_slowdown=slowdown),
            engines=engines,
            costs=costs,
        )
        for per_s in size.batch_per_s
        for setting, tier, engines, chats, slowdown in (
            ("none", None, pairs, True, 0.0),
            ("lowest class, 0.05", BATCH, pairs, True, 0.05),
            ("lowest class, 0.2", BATCH, pairs, True, 0.2),
            ("default class", "default", pairs, True, 0.0),
            ("on the other pair", None, pairs - 1, True, 0.0),
            ("alone", BATCH, 1, False, 0.0),
        )
    ]


# --- prefixes


CHATTING, TURNS, TURN, FIRST = 8, 5, (60, 16), 400
FAMILIES, SHARED, CHILD = 5, 1000, (40, 16)


async def session_scene(world: World, *, per_s: float, named: bool) -> None:
    """Chats of several turns; each is asked when the last is answered."""

    async def chat(number: int) -> None:
        name = f"chat {number}"
        hints = Hints("tenant", session=Session(name, prefix=name) if named else None)
        said = Random(f"{world.name}{name}").choices(range(_IDS), k=FIRST)
        for turn in range(TURNS):
            begun_s = world.now_s()
            said, first_s, prefilled = await world.write(TURN, hints, said)
            if turn:
                world.took["first token"].append(first_s - begun_s)
                world.took["turn"].append(world.now_s() - begun_s)
                world.took["prefilled"].append(prefilled)

    await world.poisson(CHATTING, per_s, chat)


async def child_scene(world: World, *, per_s: float, named: bool) -> None:
    """Children of a parent that arrive together, with a long prefix in common."""

    async def family(number: int) -> None:
        parent = f"parent {number}"
        shared = Random(f"{world.name}{parent}").choices(range(_IDS), k=SHARED)
        begun_s = world.now_s()

        async def child(at: int) -> int:
            session = Session(f"{parent}, child {at}", parent, parent)
            hints = Hints("tenant", session=session if named else None)
            _, first_s, prefilled = await world.write(CHILD, hints, shared)
            world.took["first token"].append(first_s - begun_s)
            world.took["child"].append(world.now_s() - begun_s)
            return prefilled

        prefilled = await asyncio.gather(*map(child, range(CHILDREN)))
        world.took["prefilled"].append(sum(prefilled))

    await world.poisson(FAMILIES, per_s, family)


def prefix_cases(
    scene: Callable[..., Awaitable[None]], *rates_per_s: float
) -> Callable[[Size], list[Case]]:
    """By the rate and the policy, with sessions and without."""
    return lambda _: [
        Case(
            {"begun/s": per_s},
            {"policy": f"{policy}, {'by session' if named else 'by request'}"},
            partial(scene, per_s=per_s, named=named),
            SchedulingSettings(SelectionSettings(policy)),
            engines=2,
            model="large",
        )
        for per_s in rates_per_s
        for policy in ("least_running", "scored")
        for named in (False, True)
    ]


Cases = Callable[[Size], list[Case]]
TABLES: Mapping[str, tuple[str, Cases]] = {
    "loop": ("A loop of calls beside its tenant's chats, one engine", loops),
    "trees": ("Trees and chats of one tenant, two engines", trees),
    "classes": ("Chats by class, one engine", classes),
    "batches": ("Chats beside a batch", batches),
}
PREFIXES: Mapping[str, tuple[str, Cases]] = {
    "sessions": ("Chats of several turns, two engines", prefix_cases(session_scene, 0.2)),
    "children": ("Children of a parent, two engines", prefix_cases(child_scene, 0.02, 0.1)),
}


async def measure_embedded(options: argparse.Namespace) -> None:
    """Print the tables that are asked for, of embedded engines."""
    tables = {**PREFIXES, **TABLES}
    async with embedded_pairs(EMBEDDED) as models:
        for table in options.table or tables:
            title, list_cases = tables[table]
            cases = list_cases(EMBEDDED)
            pairs = models[cases[0].model]
            engine = f"{cases[0].model}: {EMBEDDED.engine}, {pairs.chats_per_s:.3g} chats/s of each"
            rows = await measure_pairs(pairs, cases, EMBEDDED, options.seeds, table)
            report(title, rows, engine=engine, simulated=False, as_json=options.json)


async def measure_pairs(
    pairs: Pairs, cases: Sequence[Case], size: Size, seeds: int, name: str
) -> list[Row]:
    """One row per case; another case begins each round."""
    rounds = []
    for turn in range(seeds):
        took: list[Took] = [{}] * len(cases)
        for at in [*range(turn % len(cases), len(cases)), *range(turn % len(cases))]:
            took[at] = await pairs.live(cases[at], size, turn, f"{name}-{turn}-{at}-")
        rounds.append(took)
    return build_rows(cases, rounds, ratios=True)


async def measure_deployed(options: argparse.Namespace) -> None:
    """Print the table of batches, of a pair that runs."""
    config = load_config(options.config, os.environ, with_keys=False)
    model = config.models[options.model]
    address = address_of(model.pairs[0])
    assert isinstance(address, PairAddress)
    pairs = Pairs([address], HfTokenizer.from_folder(model.path))
    cases = [case for case in batches(DEPLOYED) if case.engines == 1]
    async with running_deployment(config):
        await measure_pairs(pairs, cases[:2], replace(DEPLOYED, batch_s=3.0), 1, "warm")
        rows = await measure_pairs(pairs, cases, DEPLOYED, options.seeds, "batches")
    title, _ = TABLES["batches"]
    engine = f"{options.model}: {DEPLOYED.engine}"
    report(title, rows, engine=engine, simulated=False, as_json=options.json)


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("simulated", "embedded"), default="simulated")
    parser.add_argument(
        "--table", choices=[*TABLES, *PREFIXES], nargs="+", metavar="NAME", help="default all"
    )
    parser.add_argument("--seeds", type=int, default=3, help="runs of each row (default 3)")
    parser.add_argument("--config", type=Path, help="the deployment's YAML")
    parser.add_argument("--model", default="large", help="its model (default large)")
    parser.add_argument("--json", action="store_true", help="end each table with one JSON object")
    options = parser.parse_args()
    if options.config is not None:
        asyncio.run(measure_deployed(options))
        return
    if options.engine == "embedded":
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the router's command does
        asyncio.run(measure_embedded(options))
        return
    for name in options.table or TABLES:
        if name in PREFIXES:
            parser.error(f"{name} needs --engine embedded; gimbal.py simulates prefixes")
        title, list_cases = TABLES[name]
        cases = list_cases(SIMULATED)
        rounds = [
            [simulate(case, SIMULATED, seed) for case in cases] for seed in range(options.seeds)
        ]
        rows = build_rows(cases, rounds, ratios=False)
        engine = "three pairs of Qwen3-VL-8B on six H200s" if cases[0].costs else SIMULATED.engine
        report(title, rows, engine=engine, simulated=True, as_json=options.json)


if __name__ == "__main__":
    main()
