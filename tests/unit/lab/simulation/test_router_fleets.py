"""benchmarks/fleet: the first of routers, Redis and pairs that is saturated bounds a fleet."""

import pytest

from benchmarks.fleet.simulated import (
    AGENTS,
    Fleet,
    Load,
    Outcome,
    RedisCosts,
    RouterCosts,
    simulate_fleet,
)
from shell_router.lab.simulation.settings import Length
from shell_router.standins.simulated.costs import DecodeCosts, PairCosts, PrefillCosts

FAST = PairCosts(PrefillCosts(0.0, 0.0), DecodeCosts(0.001))
ROUTER = RouterCosts(agent_s=0.02, choice_s=0.001, engine_s=0.0005, poll_s=0.01)
PAIRS = (2, 2, 2)
BUSY = Load(clients=12, warm_s=8.0, counted_s=22.0)


def serve(routers: int, redis_s: float = 0.0, load: Load = BUSY) -> Outcome:
    redis = RedisCosts(redis_s / AGENTS)
    output = Length(tokens=4)
    return simulate_fleet(
        Fleet(routers, PAIRS, (FAST, FAST, FAST), ROUTER, redis, output, question_tokens=1), load
    )


def test_two_routers_serve_twice_what_one_serves_by_its_costs_of_trees_and_polls() -> None:
    one = serve(1).per_s
    assert one == pytest.approx((1 - ROUTER.polls_share(PAIRS)) / ROUTER.tree_s(4, PAIRS), rel=0.02)
    assert serve(2).per_s == pytest.approx(2 * one, rel=0.02)


def test_a_saturated_redis_bounds_all_routers() -> None:
    outcome = serve(4, redis_s=0.25)
    # clients that wait for Redis end together, so the window may hold some trees more
    assert outcome.per_s == pytest.approx(4.0, rel=0.06)
    assert outcome.redis_busy == pytest.approx(1.0, rel=0.02)
    assert outcome.router_busy < 0.5


def test_equal_seeds_give_equal_outcomes_and_half_the_load_waits_less() -> None:
    half = Load(per_s=1.7, warm_s=2.0, counted_s=10.0)
    outcome = serve(1, load=half)
    assert outcome == serve(1, load=half)
    assert outcome.p50_s < 2.0
    assert outcome.router_busy < 0.7
