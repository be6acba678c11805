import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chimera.baselines import enter_baselines
from shell_router.files.read import check
from shell_router.routing import model_choice
from shell_router.routing.model_choice import (
    Candidate,
    ModelChoiceSettings,
    choose_model,
    scores_decide,
)


def small(tokens: float = 0.0, score: float | None = 0.5, cost: float | None = 0.01) -> Candidate:
    return Candidate("small", score, tokens, cost, max_batch=10)


def large(tokens: float = 0.0, score: float | None = 0.9, cost: float | None = 0.04) -> Candidate:
    return Candidate("large", score, tokens, cost, max_batch=10)


def test_the_wait_is_the_tokens_in_flight_at_what_they_cost_shared_by_the_batch() -> None:
    choice = choose_model([small(1000), large(500)], ModelChoiceSettings())
    assert choice.waits == {"small": pytest.approx(1.0), "large": pytest.approx(2.0)}


@pytest.mark.parametrize(("slack", "chosen"), [(0.9, "small"), (1.0, "large"), (5.0, "large")])
def test_a_better_model_is_chosen_within_the_slack_and_not_beyond(
    slack: float, chosen: str
) -> None:
    settings = ModelChoiceSettings(latency_slack=slack)
    choice = choose_model([small(1000), large(500)], settings)
    assert (choice.model, choice.why) == (chosen, "better" if chosen == "large" else "fastest")


@pytest.mark.parametrize(("margin", "chosen"), [(0.4, "large"), (0.41, "small")])
def test_a_score_that_is_hardly_higher_changes_no_choice(margin: float, chosen: str) -> None:
    settings = ModelChoiceSettings(latency_slack=1, score_margin=margin, policy="chimera")
    assert choose_model([small(score=0.5), large(score=0.9)], settings).model == chosen


def test_a_busy_model_is_never_preferred_to_an_idle_one() -> None:
    assert (
        choose_model([small(), large(tokens=100)], ModelChoiceSettings(latency_slack=100)).model
        == "small"
    )


def test_the_first_model_within_the_slack_ends_the_search() -> None:
    medium = Candidate("medium", 0.7, 0, 0.02, 10)
    far = large(tokens=10_000)
    choice = choose_model([small(), medium, far], ModelChoiceSettings(score_margin=0.1))
    assert (choice.model, choice.why) == ("medium", "better")


def test_without_all_scores_the_load_alone_decides() -> None:
    for policy in ("chimera", "worth", "best_score"):
        choice = choose_model(
            [small(1000), large(240, score=None)], ModelChoiceSettings(policy=policy)
        )
        assert (choice.model, choice.why) == ("large", "no_scores")


def test_as_long_as_one_is_not_measured_tokens_are_compared_instead_of_seconds() -> None:
    choice = choose_model(
        [small(100, score=None), large(90, score=None, cost=None)], ModelChoiceSettings()
    )
    assert (choice.model, choice.unmeasured) == ("large", ("large",))
    assert choice.waits == {"small": 10.0, "large": 9.0}


def test_of_idle_models_the_one_whose_tokens_cost_least_is_the_fastest() -> None:
    assert (
        choose_model([large(score=None), small(score=None)], ModelChoiceSettings()).model == "small"
    )


def test_benchmarks_compare_with_the_load_alone_and_with_turns() -> None:
    enter_baselines()
    models, loaded = [small(1000), large(240)], ModelChoiceSettings("least_loaded")
    assert choose_model(models, loaded).model == "large" and not scores_decide(models, loaded)
    chosen = [choose_model(models, ModelChoiceSettings("round_robin")).model for _ in range(4)]
    assert chosen == ["small", "large", "small", "large"]


@pytest.mark.parametrize(("worth_s", "chosen"), [(4.0, "small"), (6.0, "large")])
def test_a_right_answer_is_worth_worth_s_of_waiting(worth_s: float, chosen: str) -> None:
    settings = ModelChoiceSettings("worth", answer_worth_s=worth_s)
    choice = choose_model([small(0, score=0.5), large(500, score=0.9)], settings)
    assert (choice.model, choice.why) == (chosen, "worth")


@pytest.mark.parametrize(("tokens", "chosen"), [(0, "large"), (500, "small")])
def test_until_all_are_measured_the_best_of_the_least_loaded_answers(
    tokens: int, chosen: str
) -> None:
    unmeasured = replace(small(0, score=0.5), decode_s_per_token=None)
    candidates = [unmeasured, large(tokens, score=0.9)]
    for worth_s in (0.1, 1e6):
        choice = choose_model(candidates, ModelChoiceSettings("worth", answer_worth_s=worth_s))
        assert (choice.model, choice.why) == (chosen, "unmeasured")


def test_what_an_agent_takes_itself_is_part_of_what_it_is_waited_for() -> None:
    settings = ModelChoiceSettings("worth", answer_worth_s=10.0)
    own = [replace(small(), own_tokens=100.0), replace(large(), own_tokens=200.0)]
    assert choose_model([small(), large()], settings).model == "large"
    assert choose_model(own, settings).model == "small"
    assert choose_model([own[0], large()], settings).model == "large"


def test_the_only_candidate_needs_no_policy() -> None:
    assert choose_model([large(1e9)], ModelChoiceSettings()).why == "only"


def algorithm_1(candidates: Sequence[Candidate], slack: float, margin: float) -> str:
    """Lines 4 to 22 of the paper's pseudocode, as they stand there."""
    q = {m.model: m.score or 0.0 for m in candidates}
    wait = {
        m.model: m.tokens_in_flight * (m.decode_s_per_token or 0.0) / m.max_batch
        for m in candidates
    }
    fast = min(wait, key=wait.__getitem__)
    best, best_q = fast, q[fast]
    for model in sorted(q, key=q.__getitem__, reverse=True):
        if wait[model] <= (1 + slack) * wait[fast]:
            if q[model] >= best_q + margin:
                best, best_q = model, q[model]
            break
    return best


@given(st.integers(), st.floats(0, 3), st.floats(0, 0.5))
def test_chimera_is_the_papers_algorithm(seed: int, slack: float, margin: float) -> None:
    rng = random.Random(seed)
    candidates = [
        Candidate(
            str(number),
            rng.random(),
            rng.uniform(1, 1000),
            rng.uniform(0.001, 0.1),
            rng.randint(1, 64),
        )
        for number in range(rng.randint(2, 6))
    ]
    settings = ModelChoiceSettings("chimera", slack, margin)
    assert choose_model(candidates, settings).model == algorithm_1(candidates, slack, margin)


@pytest.mark.parametrize(
    ("settings", "decide"),
    [
        (ModelChoiceSettings(latency_slack=0.9), False),
        (ModelChoiceSettings(latency_slack=1.0), True),
        (ModelChoiceSettings("worth", answer_worth_s=0.001), True),
        (ModelChoiceSettings("best_score"), True),
    ],
)
def test_scores_decide_where_another_model_may_be_waited_for(
    settings: ModelChoiceSettings, decide: bool
) -> None:
    assert scores_decide([small(1000, score=None), large(500, score=None)], settings) == decide
    assert not scores_decide([small(score=None)], settings)


@given(st.integers(), st.floats(0, 3))
def test_where_scores_do_not_decide_all_scores_give_the_choice_that_none_gives(
    seed: int, slack: float
) -> None:
    rng = random.Random(seed)
    candidates = [
        Candidate(str(number), None, rng.uniform(0, 100), rng.choice((None, 0.01, 0.1)), 1)
        for number in range(rng.randint(1, 4))
    ]
    settings = ModelChoiceSettings("chimera", slack, 0.0)
    chosen = {choose_model(candidates, settings).model}
    for _ in range(20):
        chosen.add(
            choose_model([replace(one, score=rng.random()) for one in candidates], settings).model
        )
    assert scores_decide(candidates, settings) or len(chosen) == 1


IMPOSSIBLE: tuple[dict[str, float], ...] = (
    {"answer_worth_s": 0.0},
    {"latency_slack": -1.0},
    {"score_margin": -0.1},
)


@pytest.mark.parametrize("bad", IMPOSSIBLE)
def test_impossible_settings_are_refused_by_name(bad: dict[str, float]) -> None:
    _, (problem,) = check(ModelChoiceSettings, bad)
    assert problem.at == tuple(bad)


def test_an_unknown_policy_is_refused_with_those_that_exist() -> None:
    _, (problem,) = check(ModelChoiceSettings, {"policy": "fastest"})
    assert " or ".join(f"'{name}'" for name in model_choice.POLICIES) in problem.message
