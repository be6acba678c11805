import pytest

from shell_router.batch.baselines import data_parallel, longest_first, round_robin, split
from shell_router.batch.plan import Expert, Workload, shares_of
from shell_router.errors import ConfigError

THREE = (Expert("a", 10, 5.0, 1.0), Expert("b", 20, 5.0, 1.0), Expert("c", 60, 5.0, 1.0))


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
    assert Expert("a", prompts, load_s, 1.0).replicas(workers) == replicas


def test_a_cap_of_ones_own_takes_the_place_of_the_papers() -> None:
    assert Expert("a", 1000, 40.0, 1.0, most_workers=2).replicas(4) == 2
    assert Expert("a", 1, 40.0, 1.0, most_workers=9).replicas(4) == 4


@pytest.mark.parametrize("seconds", [0.0, 4.9, 5.0, 6.5, 15.0, 1e9])
def test_what_fits_does_not_take_longer_and_one_more_would(seconds: float) -> None:
    expert = THREE[0]
    fits = expert.fitting(seconds)
    assert fits == 0 or expert.session_s(fits) <= seconds
    assert fits == expert.prompts or expert.session_s(fits + 1) > seconds


def test_round_robin_places_whole_experts_in_turn() -> None:
    assert shares_of(Workload(THREE, 2, 2), round_robin(Workload(THREE, 2, 2))) == [{"a": 10, "c": 60}, {"b": 20}]


def test_longest_first_gives_each_expert_to_the_worker_that_is_done_first() -> None:
    made = longest_first(Workload(THREE, 2, 2))
    assert shares_of(Workload(THREE, 2, 2), made) == [{"c": 60}, {"b": 20, "a": 10}]
    assert made.makespan_s == 65.0


def test_data_parallel_waits_for_all_workers_after_every_expert() -> None:
    made = data_parallel(Workload(THREE, 2, 3))
    assert [(s.worker, s.expert, s.prompts, s.begin_s, s.end_s) for s in made.sessions] == [
        (0, "a", 5, 0.0, 10.0),
        (0, "b", 10, 10.0, 25.0),
        (0, "c", 30, 25.0, 60.0),
        (1, "a", 5, 0.0, 10.0),
        (1, "b", 10, 10.0, 25.0),
        (1, "c", 30, 25.0, 60.0),
    ]


def test_splitting_fills_workers_evenly() -> None:
    made = split(Workload(THREE, 2, 3))
    assert made is not None
    assert made.makespan_s == pytest.approx(55.0, abs=1.0)  # of 65 with whole experts; no plan is below 52.5
    assert sum(session.prompts for session in made.sessions) == 90


def test_splitting_gives_up_where_it_helps_nobody() -> None:
    assert split(Workload(THREE[:2], 2, 1)) is None


def test_too_many_experts_for_the_workers_says_what_would_be_enough() -> None:
    with pytest.raises(ConfigError, match="Raise the capacity to 3, or the workers to 3"):
        Workload((*THREE, Expert("d", 1, 1.0, 1.0), Expert("e", 1, 1.0, 1.0)), 2, 2)


def test_experts_without_prompts_need_no_room() -> None:
    assert Workload((*THREE, Expert("d", 0, 1.0, 1.0)), 3, 1).asked == THREE


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompts", -1), ("load_s", -0.1), ("per_prompt_s", float("nan")), ("fixed_s", float("inf")), ("most_workers", 0)],
)
def test_a_figure_that_cannot_be_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"'a' has {field}"):
        Expert(**{"name": "a", "prompts": 1, "load_s": 1.0, "per_prompt_s": 1.0, field: value})  # type: ignore[arg-type]


def test_names_are_unique_and_workers_are_needed() -> None:
    with pytest.raises(ConfigError, match="Two experts are named 'a'"):
        Workload((THREE[0], THREE[0]), 2, 2)
    with pytest.raises(ConfigError, match="cannot run anything"):
        Workload((), 0, 2)
