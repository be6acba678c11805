"""How far a fleet of routers with one Redis goes, and what saturates first; simulated.

    python benchmarks/fleet.py [--pairs N ...] [--routers N ...] [--json]
    python benchmarks/fleet.py --placement [--json]
    python benchmarks/fleet.py --measure [--write]
    python benchmarks/fleet.py --anchor

Trees of 9, 3 and 1 agents, each layer with a model and pairs of its own: of 8 pairs 3 have Qwen3-VL
4B, 2 have 8B and 3 have 32B, an H200 for each engine, by roofline. Questions have 512 tokens,
outputs 128 in the mean. A load balancer gives trees to the routers in turn, and each router's own
dispatchers choose the pairs (policy `scored`). Routers and Redis are cores that do one thing
after the other; their costs are measured (`fleet/costs.json`). Not simulated: prefill updates, the
network, and that routers go on from memory where Redis is away.

    saturated_per_s  trees per second at which the first of the three is saturated: routers and
                     Redis by their costs of a tree, pairs as 8 of them serve 400 clients
    first            what that is
    p50_s, p95_s     seconds of a tree at 70 % of that load, at random times
    *_busy           busy shares at that load
    pairs_load       that load over the one at which the pairs are saturated

`--placement` has free routers and Redis, so that only placement differs: `own` dispatchers see what
their router sent, `shared` ones what all sent.

`--measure` measures the costs on this machine, with scripted engines; `--write` keeps them.

`--anchor` pins both routers to one core, so that each is a router with half a core; engine, client
and Redis share another one. `predicted` is the same simulation with this machine's costs, on the
share of the core that the routers had. A machine that does other work gives worse figures.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parents[1]))
import uvloop
from report import Row, machine, report

from benchmarks.fleet.measured import (
    LONG,
    PAIRS,
    ROUTERS,
    SHORT,
    TOKEN_S,
    measure_anchor,
    measure_costs,
)
from benchmarks.fleet.simulated import Fleet, Load, RedisCosts, RouterCosts, simulate_fleet
from benchmarks.router_overhead.setups import Cores, spread
from shell_router.lab.simulation.settings import Length, load_profiles
from shell_router.standins.simulated.costs import DecodeCosts, PairCosts, PrefillCosts

HERE = Path(__file__).parent
COSTS = HERE / "fleet/costs.json"
SPLIT = (3, 2, 3)
OUTPUT_TOKENS = 128
LOAD = 0.7
ENGINE = "pairs of H200s by roofline; router and Redis as measured"
LIMIT_S = 600.0
T = TypeVar("T")


def main() -> None:
    """Simulate or measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2, 4, 16, 64])
    parser.add_argument("--costs", type=Path, default=COSTS, help="what --measure --write wrote")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--placement", action="store_true")
    what.add_argument("--measure", action="store_true")
    what.add_argument("--anchor", action="store_true")
    parser.add_argument("--write", action="store_true", help="keep what --measure measured")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    options = parser.parse_args()
    if any(pairs % sum(SPLIT) for pairs in options.pairs):
        parser.error(f"--pairs must be multiples of {sum(SPLIT)}")
    cores = spread()
    if options.measure:
        rows = measure(cores, options.costs if options.write else None)
        title = "What agents and tokens cost a router and Redis"
    elif options.anchor:
        rows = anchor(cores, *load_costs(options.costs))
        title = "Two routers with one Redis, measured and predicted"
    elif options.placement:
        rows = [
            placement(pairs, routers, load)
            for pairs in options.pairs
            if pairs <= 128
            for load in (0.7, 0.9)
            for routers in options.routers
        ]
        title = "What routers lose by seeing only their own requests"
    else:
        costs = load_costs(options.costs)
        rows = [
            cell(pairs, routers, *costs)
            for pairs in options.pairs
            for routers in options.routers
            if routers <= 2 * pairs
        ]
        title = "A fleet of routers with one Redis"
    measured = options.measure or options.anchor
    report(
        title,
        rows,
        engine=f"scripted engine; {cores}" if measured else ENGINE,
        simulated=not measured,
        as_json=options.json,
    )


def load_costs(file: Path) -> tuple[RouterCosts, RedisCosts]:
    """Return the measured costs."""
    costs = json.loads(file.read_text(encoding="utf-8"))
    return RouterCosts(**costs["router"]), RedisCosts(**costs["redis"])


@cache
def engines() -> tuple[PairCosts, PairCosts, PairCosts]:
    """Return the costs of a pair of each layer's model."""
    profiles = load_profiles(HERE.parent / "configs/engines/h200.yaml")
    small, medium, large = (
        profiles.models[f"qwen3-vl-{size}"].costs(profiles.gpus) for size in ("4b", "8b", "32b")
    )
    return small, medium, large


def fleet_of(pairs: int, routers: int, router: RouterCosts, redis: RedisCosts) -> Fleet:
    """Return a fleet of which each layer has its share of the pairs."""
    proposers, aggregators, roots = (pairs // sum(SPLIT) * share for share in SPLIT)
    output = Length(mean=OUTPUT_TOKENS, cv=0.5)
    return Fleet(routers, (proposers, aggregators, roots), engines(), router, redis, output)


@cache
def saturate_pairs() -> float:
    """Return the trees per second of 8 pairs behind a free router and a free Redis."""
    fleet = fleet_of(sum(SPLIT), 1, RouterCosts(), RedisCosts())
    return simulate_fleet(fleet, Load(clients=400, warm_s=20, counted_s=20)).per_s


def cell(pairs: int, routers: int, router: RouterCosts, redis: RedisCosts) -> Row:
    """Return the row of a fleet."""
    fleet = fleet_of(pairs, routers, router, redis)
    left = max(0.0, 1 - router.polls_share(fleet.pairs))
    limits = {
        "routers": routers * left / router.tree_s(OUTPUT_TOKENS, fleet.pairs),
        "Redis": 1 / redis.tree_s(OUTPUT_TOKENS),
        "pairs": pairs / sum(SPLIT) * saturate_pairs(),
    }
    first = min(limits, key=limits.__getitem__)
    per_s = LOAD * limits[first]
    outcome = simulate_fleet(fleet, _load(per_s))
    return {
        "pairs": pairs,
        "routers": routers,
        "saturated_per_s": limits[first],
        "first": first,
        "p50_s": outcome.p50_s,
        "p95_s": outcome.p95_s,
        "routers_busy": outcome.router_busy,
        "redis_busy": outcome.redis_busy,
        "pairs_load": per_s / limits["pairs"],
    }


def placement(pairs: int, routers: int, load: float) -> Row:
    """Return the row of routers that see their own requests, against the same that see all."""
    fleet = fleet_of(pairs, routers, RouterCosts(), RedisCosts())
    asked = _load(load * pairs / sum(SPLIT) * saturate_pairs())
    own = simulate_fleet(fleet, asked)
    shared = simulate_fleet(replace(fleet, shared_view=True), asked)
    return {
        "pairs": pairs,
        "routers": routers,
        "load": load,
        "own_p50_s": own.p50_s,
        "own_p95_s": own.p95_s,
        "shared_p50_s": shared.p50_s,
        "shared_p95_s": shared.p95_s,
        "p50_ratio": own.p50_s / shared.p50_s,
        "p95_ratio": own.p95_s / shared.p95_s,
    }


def _load(per_s: float) -> Load:
    """Return trees at random times, counted until there are 1,000, for 5 to 20 s."""
    return Load(per_s=per_s, warm_s=6.0, counted_s=min(20.0, max(5.0, 1000 / per_s)))


def measure(cores: Cores, file: Path | None) -> list[Row]:
    """Measure the costs, and write them to `file`."""
    os.sched_setaffinity(0, {cores.client})
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        measured = uvloop.run(_limit(measure_costs(cores, Path(folder), trees_each=5, clients=16)))
    if file is not None:
        about = {"measured": time.strftime("%Y-%m-%d"), "machine": f"{machine()}; {cores}"}
        file.write_text(json.dumps({**about, **asdict(measured)}, indent=2) + "\n", "utf-8")
    router, redis = measured.router, measured.redis
    figures: dict[str, tuple[float | None, float | None]] = {
        f"a tree of {tokens} tokens an agent, us": (
            1e6 * router.tree_s(tokens, (1, 1, 1)),
            1e6 * redis.tree_s(tokens),
        )
        for tokens in (SHORT, LONG)
    }
    figures |= {
        "a token, us": (1e6 * router.token_s, 1e6 * redis.token_s),
        "the choice of a pair, us": (1e6 * router.choice_s, None),
        "each pair that it is chosen from, us": (1e6 * router.engine_s, None),
        "a pair's polls, us each second": (1e6 * router.poll_s, None),
        f"commands, a tree of {SHORT} tokens an agent": (None, measured.commands_per_tree),
    }
    return [
        {"what": name, "router": of_router, "redis": of_redis}
        for name, (of_router, of_redis) in figures.items()
    ]


def anchor(cores: Cores, router: RouterCosts, redis: RedisCosts) -> list[Row]:
    """Measure two routers, and simulate them."""
    os.sched_setaffinity(0, {cores.client})
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        found = uvloop.run(
            _limit(
                measure_anchor(
                    cores, Path(folder), clients=64, warm_s=5.0, counted_s=25.0, load=LOAD
                ),
            )
        )
    scripted = PairCosts(PrefillCosts(0.0, 0.0), DecodeCosts(TOKEN_S))
    share = found.router_share / ROUTERS
    fleet = Fleet(
        ROUTERS,
        (PAIRS, PAIRS, PAIRS),
        (scripted, scripted, scripted),
        router,
        redis,
        Length(tokens=SHORT),
        core_share=share,
    )
    full = simulate_fleet(fleet, Load(clients=64, warm_s=5.0, counted_s=25.0))
    some = simulate_fleet(fleet, Load(per_s=found.at_random_per_s, warm_s=5.0, counted_s=25.0))
    cuts = statistics.quantiles(found.times_s, n=20, method="inclusive")
    pairs = fleet.pairs
    compared = {
        "trees per second, saturated": (found.per_s, full.per_s),
        "a router's CPU of a tree, ms": (
            1e3 * found.router_s,
            1e3 * router.tree_s(SHORT, pairs),
        ),
        "Redis' CPU of a tree, ms": (1e3 * found.redis_s, 1e3 * redis.tree_s(SHORT)),
        f"p50 at {LOAD:.0%}, s": (cuts[9], some.p50_s),
        f"p95 at {LOAD:.0%}, s": (cuts[18], some.p95_s),
    }
    rows: list[Row] = [
        {"what": name, "measured": here, "predicted": there, "ratio": here / there}
        for name, (here, there) in compared.items()
    ]
    for name, share in (
        ("share of the routers' core", found.router_share),
        ("share of the other core", found.load_busy),
    ):
        rows.append({"what": name, "measured": share, "predicted": None, "ratio": None})
    return rows


async def _limit(work: Awaitable[T]) -> T:
    async with asyncio.timeout(LIMIT_S):
        return await work


if __name__ == "__main__":
    main()
