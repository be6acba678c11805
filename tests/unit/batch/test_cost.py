import random
from dataclasses import replace

import pytest

from shell_router.batch.profile import ModelProfile, SessionRun, fit_profile
from shell_router.errors import ConfigError

TRUE = ModelProfile(0.0, 0.0, 0.0, start_s=1.5, step_s=0.02, token_s=0.001)
COUNTS = (1, 4, 16, 64, 256)


def seconds(curve: ModelProfile, prompts: int, mean_tokens: float, max_tokens: float) -> float:
    """T(N, mean, max)."""
    cost = replace(curve, mean_tokens=mean_tokens, max_tokens=max_tokens).cost("a", prompts)
    return cost.fixed_s + prompts * cost.per_prompt_s


def fit(runs: list[SessionRun]) -> ModelProfile:
    return fit_profile(runs, 0.0)


def timed(
    counts: tuple[int, ...] = COUNTS, *, noise: float = 0.0, seed: int = 0
) -> list[SessionRun]:
    draw = random.Random(seed)
    runs = []
    for prompts in counts:
        outputs = [draw.randint(20, 400) for _ in range(prompts)]
        run = SessionRun(prompts, sum(outputs) / prompts, max(outputs), 1.0)
        took_s = seconds(TRUE, prompts, run.mean_tokens, run.max_tokens) * (
            1 + draw.uniform(-noise, noise)
        )
        runs.append(replace(run, seconds=took_s))
    return runs


def test_a_curve_is_found_again_from_what_it_predicts() -> None:
    found = fit(timed())
    assert (found.start_s, found.step_s, found.token_s) == pytest.approx((1.5, 0.02, 0.001))


@pytest.mark.parametrize("seed", range(3))
def test_noise_moves_predictions_by_about_its_own_size(seed: int) -> None:
    found = fit(timed(noise=0.05, seed=seed))
    for prompts in (10, 100, 1000):
        assert seconds(found, prompts, 200, 400) == pytest.approx(
            seconds(TRUE, prompts, 200, 400), rel=0.15
        )


def test_no_term_is_negative_even_where_that_would_fit_best() -> None:
    shrinking = [
        SessionRun(1, 100, 100, 5.0),
        SessionRun(10, 100, 100, 4.0),
        SessionRun(100, 100, 100, 3.0),
    ]
    found = fit(shrinking)
    assert min(found.start_s, found.step_s, found.token_s) >= 0


def test_a_small_session_costs_more_per_prompt() -> None:
    assert seconds(TRUE, 10, 200, 400) / 10 > 2 * seconds(TRUE, 1000, 200, 400) / 1000


def test_longer_outputs_than_those_measured_take_longer() -> None:
    found = fit(timed())
    assert seconds(found, 100, 400, 800) == pytest.approx(seconds(TRUE, 100, 400, 800))


def test_held_out_error_is_nothing_for_exact_runs_and_shows_what_the_form_cannot_follow() -> None:
    assert fit(timed()).held_out_error == pytest.approx(0, abs=1e-6)
    quadratic = [replace(run, seconds=run.seconds * run.prompts) for run in timed()]
    assert (fit(quadratic).held_out_error or 0) > 0.5


@pytest.mark.parametrize("took_s", [0.0, float("nan")])
def test_a_time_that_cannot_have_been_is_refused(took_s: float) -> None:
    with pytest.raises(ConfigError, match="positive and finite"):
        fit([*timed(), SessionRun(1, 1.0, 1.0, took_s)])
