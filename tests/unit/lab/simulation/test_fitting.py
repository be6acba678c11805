import random

import numpy as np
import pytest

from shell_router.core.statistics import non_negative
from shell_router.errors import ConfigError
from shell_router.lab.simulation.fitting import (
    DecodeTiming,
    PrefillTiming,
    TransferTiming,
    fit_decode,
    fit_prefill,
    fit_transfer,
)
from shell_router.standins.simulated import DecodeCosts, PrefillCosts, TransferCosts
from shell_router.standins.simulated.costs import attended_pairs

PREFILL = PrefillCosts(0.002, 2e-5, 4e-8, chunk_tokens=512, prompts=1, cache_tokens=9000)
DECODE = DecodeCosts(0.001, 5e-5, 2e-7, cache_tokens=9000, max_batch_size=32)
TRANSFER = TransferCosts(0.001, 5e-6)
LENGTHS = (32, 128, 512, 1024, 2048)
BATCHES = (1, 2, 4, 8, 16)


def prefills(noise: float = 0.0, seed: int = 0) -> list[PrefillTiming]:
    draws = random.Random(seed)
    found = []
    for cached, new in [*((0, length) for length in LENGTHS), *((length, 32) for length in LENGTHS)]:
        seconds = -(-new // 512) * PREFILL.forward_s + new * PREFILL.token_s
        seconds += attended_pairs(new, cached) * PREFILL.attention_s
        found.append(PrefillTiming(cached, new, seconds * (1 + draws.uniform(-noise, noise))))
    return found


def decodes(noise: float = 0.0, seed: int = 0) -> list[DecodeTiming]:
    draws = random.Random(seed)
    return [
        DecodeTiming(n, n * length, 60, DECODE.steps_s(60, n, n * length) * (1 + draws.uniform(-noise, noise)))
        for n in BATCHES
        for length in (32, 512, 2048)
    ]


def transfers() -> list[TransferTiming]:
    return [TransferTiming(length, length * 1e-4, length * 1e-4 + TRANSFER.seconds(length)) for length in LENGTHS]


def test_costs_are_found_again_from_exact_timings() -> None:
    prefill, decode, transfer = (
        fit_prefill(prefills(), PREFILL),
        fit_decode(decodes(), DECODE),
        fit_transfer(transfers()),
    )
    assert (prefill.costs.forward_s, prefill.costs.token_s) == pytest.approx((0.002, 2e-5))
    assert prefill.costs.attention_s == pytest.approx(4e-8)
    assert (decode.costs.step_s, decode.costs.sequence_s) == pytest.approx((0.001, 5e-5))
    assert decode.costs.context_s == pytest.approx(2e-7)
    assert (transfer.costs.request_s, transfer.costs.token_s) == pytest.approx((0.001, 5e-6))


def test_the_limits_of_the_engines_are_kept() -> None:
    prefill, decode = fit_prefill(prefills(), PREFILL).costs, fit_decode(decodes(), DECODE).costs
    assert (prefill.chunk_tokens, prefill.prompts, prefill.cache_tokens) == (512, 1, 9000)
    assert (decode.cache_tokens, decode.max_batch_size) == (9000, 32)


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_predictions_by_about_its_own_size(seed: int) -> None:
    prefill, decode = fit_prefill(prefills(0.1, seed), PREFILL).costs, fit_decode(decodes(0.1, seed), DECODE).costs
    for new, attended in ((256, attended_pairs(256, 0)), (512, attended_pairs(512, 512)), (16, 16_000)):
        assert prefill.pass_s(new, attended) == pytest.approx(PREFILL.pass_s(new, attended), rel=0.2)
    for sequences in (3, 6, 12):
        assert decode.steps_s(10, sequences, 500) == pytest.approx(DECODE.steps_s(10, sequences, 500), rel=0.2)


def test_the_held_out_error_is_nothing_for_exact_timings_and_grows_with_noise() -> None:
    for exact in (fit_prefill(prefills(), PREFILL), fit_decode(decodes(), DECODE), fit_transfer(transfers())):
        assert exact.held_out_error == pytest.approx(0, abs=1e-6)
    noisy = fit_decode(decodes(0.2), DECODE).held_out_error
    assert noisy is not None and 0.02 < noisy < 0.4


def test_the_held_out_error_is_not_known_where_too_little_would_be_left() -> None:
    assert fit_transfer(transfers()[:2]).held_out_error is None
    assert fit_prefill(prefills()[:3], PREFILL).held_out_error is None


def test_no_cost_is_negative_even_where_that_would_fit_best() -> None:
    faster_the_longer = [PrefillTiming(0, length, 1 / length) for length in LENGTHS]
    costs = fit_prefill(faster_the_longer, PREFILL).costs
    assert min(costs.forward_s, costs.token_s, costs.attention_s) >= 0
    before_its_prefill = [TransferTiming(length, 0.02, 0.01) for length in LENGTHS]
    assert fit_transfer(before_its_prefill).costs == TransferCosts(0.0, 0.0)


def test_too_few_different_timings_are_refused_with_the_option_that_names_more() -> None:
    with pytest.raises(ConfigError, match=r"Prefill cannot be fitted to 2 different timings.*--lengths"):
        fit_prefill(prefills()[:2] * 5, PREFILL)
    with pytest.raises(ConfigError, match="--lengths"):
        fit_transfer(transfers()[:1])
    with pytest.raises(ConfigError, match="--batches"):
        fit_decode(decodes()[:2], DECODE)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="positive and finite"):
        PrefillTiming(0, 1, seconds)


def test_the_fewest_terms_are_taken_that_explain_as_much() -> None:
    twice_the_same = np.array([[1.0, 1.0], [2.0, 2.0]])
    assert non_negative(twice_the_same, np.array([3.0, 6.0])).tolist() == pytest.approx([3.0, 0.0])


def test_terms_that_only_make_it_worse_are_left_out() -> None:
    assert non_negative(np.array([[1.0], [1.0]]), np.array([-1.0, -2.0])).tolist() == [0.0]
