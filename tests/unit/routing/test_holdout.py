import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shell_router.files.read import check
from shell_router.routing.holdout import (
    MOST_COMPARISONS,
    Compared,
    Comparison,
    Holdouts,
    HoldoutSettings,
)

KEY = Compared("incremental_prefill", "tree", "large, small")


class World:
    """Programs one after the other, a second apart; those with the optimization take `factor` as
    long.
    """

    def __init__(self, seed: int = 0, noise: float = 0.2, **settings: float) -> None:
        self.holdouts = Holdouts(HoldoutSettings(**settings))
        self.draws = random.Random(seed)
        self.noise = noise
        self.now_s = 0.0
        self.held_out = 0

    def run(self, programs: int, factor: float) -> list[Comparison]:
        changes = []
        for _ in range(programs):
            self.now_s += 1.0
            without = self.holdouts.holds_out(KEY, self.draws.random(), self.now_s)
            self.held_out += without
            seconds = (
                10.0 * (1.0 if without else factor) * self.draws.lognormvariate(0.0, self.noise)
            )
            change = self.holdouts.observe(KEY, held_out=without, seconds=seconds, now_s=self.now_s)
            if change is not None:
                changes.append(change)
        return changes

    def state(self) -> Comparison:
        (only,) = self.holdouts.comparisons()
        return only


@pytest.mark.parametrize("seed", range(5))
def test_where_it_pays_it_stays_on_and_the_share_is_held_out(seed: int) -> None:
    world = World(seed)
    assert world.run(1000, factor=0.7) == []
    assert 20 <= world.held_out <= 80
    seen = world.state()
    assert seen.benefit is not None
    assert seen.benefit.low < 0.3 < seen.benefit.high
    assert seen.benefit.low > 0


@pytest.mark.parametrize("seed", range(5))
def test_where_it_turns_harmful_it_is_off_within_fifty_programs(seed: int) -> None:
    world = World(seed)
    world.run(300, factor=0.9)
    changes = world.run(50, factor=2.0)
    assert [change.state for change in changes] == ["trial", "off"]
    last = changes[-1].benefit
    assert last is not None
    assert last.mean < 0


@pytest.mark.parametrize("seed", range(5))
def test_where_it_harms_from_the_start_it_is_switched_off(seed: int) -> None:
    world = World(seed)
    world.run(400, factor=1.3)
    assert world.state().state == "off"


def test_while_it_is_off_every_program_runs_without_until_it_is_tried_again_and_comes_back() -> (
    None
):
    world = World(retry_s=100.0)
    world.run(300, factor=0.9)
    world.run(50, factor=2.0)
    before = world.held_out
    world.run(50, factor=2.0)
    assert world.held_out == before + 50
    world.run(300, factor=0.7)
    assert world.state().state == "on"


def test_without_any_difference_it_does_not_matter_but_does_end() -> None:
    world = World()
    world.run(3000, factor=1.0)
    assert world.state().state in ("on", "off", "trial")
    benefit = world.state().benefit
    assert benefit is not None
    assert abs(benefit.mean) < 0.15


def test_a_share_of_0_compares_nothing() -> None:
    world = World(share=0.0)
    assert world.run(100, factor=3.0) == []
    assert world.held_out == 0


@given(draw=st.floats(0, 1, exclude_max=True))
def test_equal_draws_choose_equally(draw: float) -> None:
    holdouts = Holdouts()
    assert len({holdouts.holds_out(KEY, draw, now_s) for now_s in (0.0, 1.0, 1e6)}) == 1


def test_optimizations_topologies_models_and_roles_are_compared_apart() -> None:
    holdouts = Holdouts()
    keys = [KEY, KEY._replace(models="small"), KEY._replace(topology="panel")]
    keys += [Compared("drafts", "tree", "small", role) for role in ("aggregator", "root")]
    for key in keys:
        holdouts.observe(key, held_out=False, seconds=1.0, now_s=0.0)
    assert [one.compared for one in holdouts.comparisons()] == sorted(keys)


def test_the_comparison_that_was_not_observed_for_longest_is_forgotten_first() -> None:
    holdouts = Holdouts()
    topologies = [f"t{number}" for number in range(MOST_COMPARISONS)]
    for topology in [*topologies, "t0", "further"]:
        key = KEY._replace(topology=topology)
        holdouts.observe(key, held_out=False, seconds=1.0, now_s=0.0)
    kept = {one.compared.topology for one in holdouts.comparisons()}
    assert kept == {*topologies, "further"} - {"t1"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"share": 0.6}, "share"), ({"share": -0.1}, "share"), ({"retry_s": 0}, "retry_s")],
)
def test_settings_out_of_range_are_refused_by_name(fields: dict[str, float], named: str) -> None:
    _, (problem,) = check(HoldoutSettings, fields)
    assert problem.at == (named,)
