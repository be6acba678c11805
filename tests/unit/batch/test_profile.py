import asyncio
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import pytest
import yaml

from shell_router.batch.pool import Sampling
from shell_router.batch.profile import (
    Load,
    ModelProfile,
    PoolProfile,
    SessionRun,
    add_starts,
    charge_starts,
    fit_profile,
)
from shell_router.batch.prompts import BatchPrompt
from shell_router.batch.sessions import load_on_workers, profile_model
from shell_router.errors import ConfigError, EngineError, EngineRejected
from shell_router.files.read import read_file
from shell_router.files.write import plain
from tests.fakes.pools import ScriptedWorkers
from tests.fakes.scripted_engine import Script
from tests.fakes.timers import SteppedTimers

RUNS = (
    SessionRun(2, 100.0, 150.0, 3.0),
    SessionRun(8, 90.0, 160.0, 9.0),
    SessionRun(32, 110.0, 170.0, 33.0),
)
MODEL = ModelProfile(12.5, 100.0, 200.0, 1.5, 0.02, 0.0000123, 0.07, RUNS)


def prompts(number: int) -> list[BatchPrompt]:
    return [
        BatchPrompt(
            str(n), "proposer", "a", [{"role": "user", "content": f"Q{n}"}], Sampling().params(0)
        )
        for n in range(number)
    ]


def test_a_profile_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "costs.yaml"
    for profile in (
        PoolProfile({"a": MODEL, "7": fit_profile(RUNS[:2], 1.0)}, MODEL),
        PoolProfile({"a": MODEL}, None, 40.5, 2.5),
    ):
        file.write_text(yaml.safe_dump(plain(asdict(profile)), sort_keys=False), encoding="utf-8")
        found, _ = read_file(file, PoolProfile)
        assert found.models["a"] == MODEL
        assert found.aggregator == profile.aggregator
        assert (found.first_s, found.together_s) == (profile.first_s, profile.together_s)
        assert found.models.keys() == profile.models.keys()


def test_an_edited_profile_with_a_negative_figure_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "costs.yaml"
    profile = PoolProfile({"a": replace(MODEL, step_s=-0.1)})
    file.write_text(yaml.safe_dump(plain(asdict(profile)), sort_keys=False), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"models\.a\.step_s must be a number at least 0"):
        read_file(file, PoolProfile)


def test_a_fast_models_seconds_per_token_are_kept_to_a_thousandth() -> None:
    fast = ModelProfile(1.0, 100.0, 200.0, 0.1, 1.23456e-5, 6.54321e-6)
    kept = plain(asdict(fast))
    assert kept["token_s"] == pytest.approx(fast.token_s, rel=1e-3)
    assert kept["step_s"] == pytest.approx(fast.step_s, rel=1e-3)


def test_a_cost_is_what_the_curve_says_of_the_mean_and_the_longest_output() -> None:
    cost = PoolProfile({"a": MODEL}).cost("a", 50)
    assert (cost.name, cost.prompts, cost.load_s) == ("a", 50, 12.5)
    assert cost.fixed_s == pytest.approx(1.5 + 200 * 0.02)
    assert cost.per_prompt_s == pytest.approx(100 * 0.0000123)
    with pytest.raises(
        ConfigError, match=r"The profile has no model 'b'\. Run shell-router batch profile again"
    ):
        PoolProfile({"a": MODEL}).cost("b", 1)


def test_tokens_are_averaged_over_prompts_and_not_over_sessions() -> None:
    found = fit_profile(RUNS, 4.0)
    assert found.mean_tokens == pytest.approx((2 * 100 + 8 * 90 + 32 * 110) / 42)
    assert found.max_tokens == 170
    assert found.load_s == 4.0
    assert found.held_out_error is not None
    assert fit_profile(RUNS[:2], 4.0).held_out_error is None


class Timed:
    """Two workers on which a load takes 6 s, and every piece of an answer steps the clock by 1
    s."""

    def __init__(self, says: str = "one two three") -> None:
        self.timers = SteppedTimers()
        self.workers = ScriptedWorkers(lambda *_: Script(says), pace=self._pace, load=self._load)

    async def _pace(self, _rid: str, _piece: int) -> None:
        await asyncio.sleep(0)
        self.timers.step(1.0)

    async def _load(self, worker: int, _model: str) -> None:
        for _ in range(
            50 * (worker == 0)
        ):  # long enough for the other to run a session, if it did not wait
            await asyncio.sleep(0)
        self.timers.step(6.0 * (worker == 0))


async def test_each_worker_runs_each_size_and_no_prompt_is_asked_twice() -> None:
    timed = Timed()
    found, outputs, _ = await profile_model(
        "a", prompts(20), (2, 4), timed.workers, 2, 2, timed.timers.clock
    )
    assert sorted(one.prompts for one in found.runs) == [2, 2, 4, 4]
    assert sorted(text for _, text in timed.workers.asked) == sorted(f"Q{n}" for n in range(12))
    assert sorted(int(one.question) for one in outputs) == list(range(12))
    assert sorted(timed.workers.loads) == [(0, "a"), (1, "a")]
    assert timed.workers.most_running == 2
    assert not timed.workers.open
    assert (found.mean_tokens, found.max_tokens) == (3, 3)


async def test_all_workers_begin_a_size_together_when_all_have_loaded() -> None:
    timed = Timed()
    found, _, _ = await profile_model(
        "a", prompts(6), (1, 2), timed.workers, 2, 1, timed.timers.clock
    )
    by_size = {size: [one.seconds for one in found.runs if one.prompts == size] for size in (1, 2)}
    # both are busy at the same time: each sees the clock that the other steps, too
    assert sum(by_size[1]) >= 2 * 1 + 1
    assert max(by_size[1]) <= 2
    assert max(by_size[2]) <= 4
    assert timed.timers.now_s == 6 + 2 + 4


async def test_loads_are_timed_apart_from_sessions() -> None:
    timed = Timed()
    found, _, _ = await profile_model(
        "a", prompts(3), (1, 2), timed.workers, 1, 1, timed.timers.clock
    )
    assert found.load_s == 6
    assert [one.seconds for one in found.runs] == [1, 2]


async def test_a_model_that_does_not_load_on_one_worker_is_reported_as_it_is_and_the_other_waits_for_nothing() -> (
    None
):
    timed = Timed()
    timed.workers.unloadable = lambda worker, _: worker == 1
    with pytest.raises(EngineError, match="a did not load on worker 1"):
        await profile_model("a", prompts(12), (2, 4), timed.workers, 2, 2, timed.timers.clock)
    assert not timed.workers.open


@pytest.mark.parametrize("status", [400, 503])
async def test_a_prompt_that_is_not_answered_ends_the_profile_with_its_error(status: int) -> None:
    timed = Timed()
    timed.workers.says = lambda _, text: (
        Script("", error=EngineRejected("not this one", status=status))
        if text == "Q3"
        else Script("yes")
    )
    with pytest.raises(EngineError, match="not this one"):
        await profile_model("a", prompts(12), (2, 4), timed.workers, 2, 2, timed.timers.clock)
    assert not timed.workers.open


STARTED, SWAPPED, KEPT = get_args(Load)


def test_of_models_of_one_shape_loads_are_swaps_and_the_first_of_a_worker_starts_its_engine_too() -> (
    None
):
    models = {"a": replace(MODEL, load_s=2.0), "b": replace(MODEL, load_s=4.0)}
    found = add_starts(PoolProfile(models, MODEL), alone_s=43.0, together_s=73.0, workers=4)
    assert (found.first_s, found.together_s) == (40.0, 10.0)
    assert (found.models, found.aggregator) == (models, MODEL)
    alone = add_starts(PoolProfile(models), alone_s=43.0, together_s=43.0, workers=1)
    assert (alone.first_s, alone.together_s) == (40.0, 0.0)
    faster = add_starts(PoolProfile(models), alone_s=1.0, together_s=0.5, workers=2)
    assert (faster.first_s, faster.together_s) == (0.0, 0.0), "no figure is negative"


def test_of_models_of_several_shapes_each_load_may_be_a_start() -> None:
    loads = [(60.0, STARTED), (2.0, SWAPPED), (90.0, STARTED), (3.0, SWAPPED), (1.0, KEPT)]
    found = charge_starts([(replace(MODEL, load_s=load_s), load) for load_s, load in loads])
    assert [one.load_s for one in found] == [60.0, 60.0, 90.0, 90.0, 90.0]


async def test_a_load_that_starts_an_engine_on_any_worker_counts_as_a_start() -> None:
    timed = Timed()
    timed.workers.kind = lambda worker, _: SWAPPED if worker else KEPT
    _, load = await load_on_workers("a", timed.workers, 2, timed.timers.clock)
    assert load == SWAPPED
    timed.workers.kind = lambda worker, _: SWAPPED if worker else STARTED
    _, _, load = await profile_model(
        "a", prompts(12), (2, 4), timed.workers, 2, 2, timed.timers.clock
    )
    assert load == STARTED
    assert await load_on_workers("a", timed.workers, 1, timed.timers.clock) == (6.0, STARTED)
