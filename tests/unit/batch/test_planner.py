import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from shell_router.batch.planner import (
    HEURISTICS,
    OPTIMAL_GAP,
    BatchPlan,
    ModelWork,
    Workload,
    lower_bound_s,
    plan,
    plan_round_robin,
    plan_wrap_around,
)
from shell_router.batch.run import plan_apart
from shell_router.errors import ConfigError, EngineError


def workload(seed: int, *, models: int = 6, workers: int = 4, prompts: int = 2000) -> Workload:
    """A random one; some models have nothing to do, some cost more per session than for all their
    prompts.

    Every third is in the middle of a run: workers are busy, and some hold a model.
    """
    draw = random.Random(seed)
    drawn = [
        ModelWork(
            f"model-{number}",
            prompts=draw.choice((0, 1, 3, draw.randint(4, prompts), draw.randint(4, prompts))),
            load_s=draw.choice((0.0, draw.uniform(0.5, 60))),
            per_prompt_s=draw.choice((0.0, draw.uniform(0.001, 3), draw.uniform(0.001, 3))),
            fixed_s=draw.choice((0.0, draw.uniform(0, 20))),
            most_workers=draw.choice((None, None, 1, 2)),
        )
        for number in range(draw.randint(1, models))
    ]
    on = draw.randint(1, workers)
    asked = sum(model.prompts > 0 for model in drawn)
    capacity = draw.randint(max(1, -(-asked // on)), max(1, asked))
    first_s, together_s = (
        draw.choice((0.0, draw.uniform(0, 90))),
        draw.choice((0.0, 0.0, draw.uniform(0, 9))),
    )
    work = Workload(tuple(drawn), on, capacity, first_s, together_s)
    if seed % 3:
        return work
    ready_s = tuple(draw.choice((0.0, draw.uniform(0, 200))) for _ in range(on))
    return replace(
        work,
        ready_s=ready_s,
        holds=tuple(draw.choice(["", *(one.name for one in drawn)]) for _ in range(on)),
    )


def broken(work: Workload, made: BatchPlan) -> Iterator[str]:
    """The constraints of equations 5 to 10 that a plan breaks."""
    placed: Counter[str] = Counter()
    loaded: dict[str, set[int]] = defaultdict(set)
    hosted: dict[int, list[str]] = defaultdict(list)
    free_s = dict(enumerate(work.ready_s or (0.0,) * work.workers))
    models = {model.name: model for model in work.models}
    for session in made.sessions:
        placed[session.model] += session.prompts
        loaded[session.model].add(session.worker)
        hosted[session.worker].append(session.model)
        if session.prompts < 1 or not 0 <= session.worker < work.workers:
            yield f"{session} is empty, or on no worker"
        if session.begin_s < free_s[session.worker] - 1e-9:
            yield f"{session} begins before the one before it ends"
        took_s = session.end_s - session.begin_s
        model = models[session.model]
        first_s = work.first_s + work.together_s * (len({one.worker for one in made.sessions}) - 1)
        is_first = hosted[session.worker] == [session.model]
        load_s = 0.0 if work.holds and work.holds[session.worker] == session.model else model.load_s
        run_s = model.fixed_s + session.prompts * model.per_prompt_s
        if took_s != pytest.approx(load_s + run_s + first_s * is_first):
            yield f"{session} does not take as long as it should"
        free_s[session.worker] = session.end_s
    for model in work.models:
        if placed[model.name] != model.prompts:
            yield f"{placed[model.name]} of {model} are placed"
        if len(loaded[model.name]) > model.replica_cap(work.workers):
            yield f"{model} is loaded on {len(loaded[model.name])} workers"
    for worker, names in hosted.items():
        if len(set(names)) < len(names) or len(names) > work.capacity:
            yield f"worker {worker} loads {names}"


@pytest.mark.parametrize("seed", range(100))
def test_a_plan_keeps_every_constraint_and_no_baseline_beats_it(seed: int) -> None:
    work = workload(seed)
    made = plan(work, 60.0)
    assert not list(broken(work, made))
    for baseline in HEURISTICS.values():
        assert (
            list(broken(work, baseline(work)))
            or made.makespan_s <= baseline(work).makespan_s + 1e-9
        )
    assert made.bound_s <= made.makespan_s * (1 + 1e-9)
    assert made.optimal


def brute_force_s(work: Workload) -> float:
    """The shortest makespan of all placements, by trying every one."""
    options = [
        [
            counts
            for counts in product(range(model.prompts + 1), repeat=work.workers)
            if sum(counts) == model.prompts
            and sum(map(bool, counts)) <= model.replica_cap(work.workers)
        ]
        for model in work.active_models
    ]

    ready_s = work.ready_s or (0.0,) * work.workers

    def makespan_s(placed: tuple[tuple[int, ...], ...]) -> float:
        columns = list(zip(*placed, strict=True)) or [()]
        if any(sum(map(bool, column)) > work.capacity for column in columns):
            return float("inf")
        held = [
            [(model, n) for model, n in zip(work.active_models, column, strict=True) if n]
            for column in columns
        ]
        first_s = work.first_s + work.together_s * (sum(map(bool, held)) - 1)
        ends_s = [
            free_s
            + first_s
            + sum(model.session_s(n) - (model.name == holds) * model.load_s for model, n in share)
            for share, free_s, holds in zip(
                held, ready_s, work.holds or ("",) * work.workers, strict=True
            )
            if share
        ]
        return max(ends_s, default=0.0)

    return min(makespan_s(placed) for placed in product(*options))


@pytest.mark.parametrize("seed", range(80))
def test_trying_every_placement_finds_none_that_is_shorter(seed: int) -> None:
    work = workload(seed, models=3, workers=3, prompts=7)
    made, best_s = plan(work, 60.0), brute_force_s(work) if work.active_models else 0.0
    assert plan_wrap_around(work).makespan_s >= made.makespan_s
    assert lower_bound_s(work) <= best_s * (1 + 1e-9)
    assert made.makespan_s <= best_s * (1 + OPTIMAL_GAP) + 1e-9
    assert made.bound_s <= best_s * (1 + 1e-9)


def test_a_plan_cut_short_says_how_far_from_the_best_it_may_be() -> None:
    draw = random.Random(3)
    many = tuple(
        ModelWork(
            f"model-{number}", draw.randint(50, 3000), draw.uniform(30, 60), draw.uniform(0.1, 2.5)
        )
        for number in range(24)
    )
    work = Workload(many, 12, 3)
    made = plan(work, 0.001)
    assert not list(broken(work, made))
    assert not made.optimal
    assert OPTIMAL_GAP < made.gap < 1
    assert made.makespan_s < plan_round_robin(work).makespan_s


def test_states_of_workers_that_are_too_few_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"holds has 1 entries for 2 workers\. Give one for each worker, or none"
    ):
        Workload((), 2, 1, holds=("a",))


@pytest.mark.parametrize(("models", "workers", "capacity"), [(100, 64, 3), (64, 100, 2)])
def test_a_large_workload_is_planned_close_to_the_bound_without_a_solver(
    models: int, workers: int, capacity: int
) -> None:
    draw = random.Random(f"{models}/{workers}/{capacity}")  # as benchmarks/mosaic.py does
    drawn = [
        ModelWork(
            f"e{number}",
            draw.randint(50, 2000),
            draw.uniform(38, 47),
            draw.uniform(0.1, 0.2) * draw.choice((1, 1, 12)),
        )
        for number in range(models)
    ]
    work = Workload(tuple(drawn), workers, capacity)
    made = plan_wrap_around(work)
    assert not list(broken(work, made))
    assert made.gap < 0.03


@pytest.mark.parametrize("prompts", [10_000, 10_000_000])
def test_a_proof_holds_for_millions_of_prompts(prompts: int) -> None:
    counts = (prompts, prompts // 3, prompts // 7 + 1)
    work = Workload(
        tuple(
            ModelWork(f"e{n}", n, 5.0, cost)
            for n, cost in zip(counts, (1.0, 0.7, 1.3), strict=True)
        ),
        3,
        2,
    )
    made = plan(work, 60.0)
    assert not list(broken(work, made))
    assert made.optimal
    assert made.makespan_s == pytest.approx(
        sum(one.session_s(one.prompts) for one in work.active_models) / 3, rel=1e-3
    )


@pytest.mark.parametrize("limit_s", [0.0, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(limit_s: float) -> None:
    with pytest.raises(ConfigError, match="Give a positive number"):
        plan(workload(1), limit_s)


async def test_a_plan_is_made_in_a_process_of_its_own() -> None:
    work = Workload((ModelWork("a", 100, 5.0, 0.1), ModelWork("b", 50, 5.0, 0.1)), 2, 1)
    assert (await plan_apart(work)).makespan_s == pytest.approx(plan(work).makespan_s)
    with pytest.raises(EngineError, match="planner process failed"):
        await plan_apart(None)  # type: ignore[arg-type]


async def test_planning_that_is_cancelled_while_its_process_starts_leaves_nothing() -> None:
    planning = asyncio.create_task(plan_apart(Workload((ModelWork("a", 100, 5.0, 0.1),), 1, 1)))
    while len(asyncio.all_tasks()) < 3:  # noqa: ASYNC110 # this test, the planning, and the process's start
        await asyncio.sleep(0)
    planning.cancel()
    await asyncio.wait({planning})
    assert asyncio.all_tasks() == {asyncio.current_task()}
