import pytest

from shell_router.batch.planner import (
    BatchPlan,
    ModelWork,
    Workload,
    plan_longest_first,
    plan_round_robin,
)
from shell_router.errors import ConfigError

THREE = (ModelWork("a", 10, 5.0, 1.0), ModelWork("b", 20, 5.0, 1.0), ModelWork("c", 60, 5.0, 1.0))


def shares_of(plan: BatchPlan) -> list[dict[str, int]]:
    """Per worker of two the prompts of each model."""
    return [
        {one.model: one.prompts for one in plan.sessions if one.worker == worker}
        for worker in range(2)
    ]


@pytest.mark.parametrize(
    ("load_s", "prompts", "workers", "replicas"),
    [
        (40.0, 1000, 4, 4),  # floor(1000 / 40) = 25 is more than there are workers
        (40.0, 100, 4, 2),
        (40.0, 30, 4, 1),  # loading takes longer than running: one worker all the same
        (0.0, 30, 4, 4),
    ],
)
def test_an_expert_may_be_loaded_as_often_as_its_work_pays_for(
    load_s: float, prompts: int, workers: int, replicas: int
) -> None:
    assert ModelWork("a", prompts, load_s, 1.0).replica_cap(workers) == replicas


def test_a_cap_of_ones_own_takes_the_place_of_the_papers() -> None:
    assert ModelWork("a", 1000, 40.0, 1.0, most_workers=2).replica_cap(4) == 2
    assert ModelWork("a", 1, 40.0, 1.0, most_workers=9).replica_cap(4) == 4


@pytest.mark.parametrize("seconds", [0.0, 4.9, 5.0, 6.5, 15.0, 1e9])
def test_what_fits_does_not_take_longer_and_one_more_would(seconds: float) -> None:
    model = THREE[0]
    fits = model.fit_prompts(seconds)
    assert fits == 0 or model.session_s(fits) <= seconds
    assert fits == model.prompts or model.session_s(fits + 1) > seconds


def test_round_robin_places_whole_experts_in_turn() -> None:
    assert shares_of(plan_round_robin(Workload(THREE, 2, 2))) == [
        {"a": 10, "c": 60},
        {"b": 20},
    ]


def test_longest_first_gives_each_expert_to_the_worker_that_is_done_first() -> None:
    made = plan_longest_first(Workload(THREE, 2, 2))
    assert shares_of(made) == [{"c": 60}, {"b": 20, "a": 10}]
    assert made.makespan_s == 65.0


def test_too_many_experts_for_the_workers_says_what_would_be_enough() -> None:
    with pytest.raises(ConfigError, match="Raise the capacity to 3, or the workers to 3"):
        Workload((*THREE, ModelWork("d", 1, 1.0, 1.0), ModelWork("e", 1, 1.0, 1.0)), 2, 2)


def test_experts_without_prompts_need_no_room() -> None:
    assert Workload((*THREE, ModelWork("d", 0, 1.0, 1.0)), 3, 1).active_models == THREE


def test_names_are_unique_and_workers_are_needed() -> None:
    with pytest.raises(ConfigError, match="Two models are named 'a'"):
        Workload((THREE[0], THREE[0]), 2, 2)
    with pytest.raises(ConfigError, match="cannot run anything"):
        Workload((), 0, 2)
