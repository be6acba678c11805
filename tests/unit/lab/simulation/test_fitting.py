import random

import numpy as np
import pytest

from shell_router.core.statistics import Timing, fit_non_negative
from shell_router.errors import ConfigError
from shell_router.lab.simulation.profiling import (
    ProfiledCosts,
    build_decode_timing,
    build_prefill_timing,
    fit_pair,
)
from shell_router.standins.simulated.costs import (
    DecodeCosts,
    PairCosts,
    PrefillCosts,
    TransferCosts,
    attended_pairs,
)

PREFILL = PrefillCosts(0.002, 2e-5, 4e-8, chunk_tokens=512, prompts=1, cache_tokens=9000)
DECODE = DecodeCosts(0.001, 5e-5, 2e-7, cache_tokens=9000, max_batch_size=32)
TRANSFER = TransferCosts(0.001, 5e-6)
LENGTHS = (32, 128, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16)


def prefills(noise: float = 0.0, seed: int = 0) -> list[Timing]:
    draws = random.Random(seed)
    found = []
    for cached, new in [
        *((0, length) for length in LENGTHS),
        *((length, 32) for length in LENGTHS),
    ]:
        seconds = -(-new // 512) * PREFILL.forward_s + new * PREFILL.token_s
        seconds += attended_pairs(new, cached) * PREFILL.attention_s
        found.append(
            build_prefill_timing(cached, new, seconds * (1 + draws.uniform(-noise, noise)), PREFILL)
        )
    return found


def decodes(noise: float = 0.0, seed: int = 0) -> list[Timing]:
    draws = random.Random(seed)
    return [
        build_decode_timing(
            n,
            n * length,
            60,
            DECODE.steps_s(60, n, n * length) * (1 + draws.uniform(-noise, noise)),
        )
        for n in BATCHES
        for length in (32, 512, 2048)
    ]


def firsts() -> list[Timing]:
    return [
        Timing(length, (1, length), length * 1e-4 + TRANSFER.seconds(length), length * 1e-4)
        for length in LENGTHS
    ]


def fitted(
    prefill: list[Timing] | None = None,
    first: list[Timing] | None = None,
    decode: list[Timing] | None = None,
) -> ProfiledCosts:
    """Fitted to exact timings where none are given."""
    limits = PairCosts(PREFILL, DECODE)
    return fit_pair(prefill or prefills(), first or firsts(), decode or decodes(), limits)


def test_costs_are_found_again_from_exact_timings() -> None:
    found = fitted().costs
    assert (found.prefill.forward_s, found.prefill.token_s) == pytest.approx((0.002, 2e-5))
    assert found.prefill.attention_s == pytest.approx(4e-8)
    assert (found.decode.step_s, found.decode.sequence_s) == pytest.approx((0.001, 5e-5))
    assert found.decode.context_s == pytest.approx(2e-7)
    assert (found.transfer.request_s, found.transfer.token_s) == pytest.approx((0.001, 5e-6))


def test_the_limits_of_the_engines_are_kept() -> None:
    prefill, decode = fitted().costs.prefill, fitted().costs.decode
    assert (prefill.chunk_tokens, prefill.prompts, prefill.cache_tokens) == (512, 1, 9000)
    assert (decode.cache_tokens, decode.max_batch_size) == (9000, 32)


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_predictions_by_about_its_own_size(seed: int) -> None:
    costs = fitted(prefills(0.1, seed), decode=decodes(0.1, seed)).costs
    for new, attended in (
        (256, attended_pairs(256, 0)),
        (512, attended_pairs(512, 512)),
        (16, 16_000),
    ):
        assert costs.prefill.pass_s(new, attended) == pytest.approx(
            PREFILL.pass_s(new, attended), rel=0.2
        )
    for sequences in (3, 6, 12):
        assert costs.decode.steps_s(10, sequences, 500) == pytest.approx(
            DECODE.steps_s(10, sequences, 500), rel=0.2
        )


def test_the_held_out_error_is_nothing_for_exact_timings_and_grows_with_noise() -> None:
    assert fitted().errors == pytest.approx({"prefill": 0, "first token": 0, "decode": 0}, abs=1e-6)
    assert 0.02 < fitted(decode=decodes(0.2)).errors["decode"] < 0.4


def test_the_held_out_error_is_not_known_where_too_little_would_be_left() -> None:
    assert fitted(prefills()[:3], firsts()[:2]).errors.keys() == {"decode"}


def test_no_cost_is_negative_even_where_that_would_fit_best() -> None:
    faster_the_longer = [build_prefill_timing(0, length, 1 / length, PREFILL) for length in LENGTHS]
    costs = fitted(faster_the_longer).costs.prefill
    assert min(costs.forward_s, costs.token_s, costs.attention_s) >= 0
    before_its_prefill = [Timing(length, (1, length), 0.01, 0.02) for length in LENGTHS]
    assert fitted(first=before_its_prefill).costs.transfer == TransferCosts(0.0, 0.0)


def test_too_few_different_timings_are_refused_with_the_option_that_names_more() -> None:
    with pytest.raises(
        ConfigError, match=r"Prefill cannot be fitted to 2 different timings.*--lengths"
    ):
        fitted(prefills()[:2] * 5)
    with pytest.raises(ConfigError, match="--lengths"):
        fitted(first=firsts()[:1])
    with pytest.raises(ConfigError, match="--batches"):
        fitted(decode=decodes()[:2])


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="positive and finite"):
        Timing(0, (1,), seconds)


def test_the_fewest_terms_are_taken_that_explain_as_much() -> None:
    twice_the_same = np.array([[1.0, 1.0], [2.0, 2.0]])
    assert fit_non_negative(twice_the_same, np.array([3.0, 6.0])).tolist() == pytest.approx(
        [3.0, 0.0]
    )


def test_terms_that_only_make_it_worse_are_left_out() -> None:
    assert fit_non_negative(np.array([[1.0], [1.0]]), np.array([-1.0, -2.0])).tolist() == [0.0]
