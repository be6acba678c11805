"""What experts on several GPUs add to a step of benchmarks/gimbal.py."""

import numpy as np
import pytest

from benchmarks.gimbal.experts import EXPERT, HIDDEN, LINK, ExpertParallel, Slowed
from benchmarks.gimbal.serving import (
    ACTIVE,
    BANDWIDTH,
    BYTES,
    CHOSEN,
    COMPUTE_SHARE,
    EXPERTS,
    FLOPS,
    LAYERS,
    MEMORY_SHARE,
    PASS_S,
    costs,
    step_s,
)
from shell_router.experts.placement import ExpertRecord, build_record, place

EVEN = build_record(np.full((LAYERS, EXPERTS), 8))
UNEVEN = build_record(np.tile(np.where(np.arange(EXPERTS) < EXPERTS // 2, 12, 4), (LAYERS, 1)))
"""The first half of the experts gets three quarters of the tokens."""


def shared(record: ExpertRecord, gpus: int, slowed: Slowed = "roofline") -> ExpertParallel:
    return ExpertParallel(record, place("contiguous", record, gpus), slowed)


@pytest.mark.parametrize("sequences", [1, 8, 100])
def test_one_gpu_with_even_experts_takes_as_long_as_a_gpu_that_has_them_all(sequences: int) -> None:
    alone = shared(EVEN, 1)
    bandwidth, flops = BANDWIDTH * MEMORY_SHARE, FLOPS * COMPUTE_SHARE
    whole_s = PASS_S + step_s(sequences, bandwidth) + sequences * 2 * ACTIVE / flops
    assert alone.costs.decode.steps_s(1, sequences, 0) + alone.step_s(sequences) == pytest.approx(
        whole_s
    )
    assert alone.costs.decode.cache_tokens == costs(cached=False).decode.cache_tokens


def test_two_gpus_halve_what_even_experts_take_and_leave_more_memory_for_kv() -> None:
    assert shared(EVEN, 2).step_s(64) == pytest.approx(shared(EVEN, 1).step_s(64) / 2)
    assert shared(EVEN, 2).costs.decode.cache_tokens > 3 * shared(EVEN, 1).costs.decode.cache_tokens


def test_by_load_experts_take_as_much_longer_as_the_fullest_gpu_has_load_over_the_mean() -> None:
    even_s = shared(UNEVEN, 1, "by load").step_s(64) / 2
    assert shared(UNEVEN, 2, "by load").step_s(64) == pytest.approx(1.5 * even_s)


def test_by_roofline_an_uneven_load_costs_products_but_no_reading_once_all_experts_have_tokens() -> (
    None
):
    tokens = 4096
    products_s = tokens * CHOSEN * LAYERS * 2 * EXPERT / (FLOPS * COMPUTE_SHARE)
    more_s = shared(UNEVEN, 2).step_s(tokens) - shared(EVEN, 2).step_s(tokens)
    assert more_s == pytest.approx((0.75 - 0.5) * products_s)


def test_tokens_cross_the_link_there_and_back_for_each_expert_that_follows_on_the_other_gpu() -> (
    None
):
    apart = np.zeros((LAYERS - 1, EXPERTS, EXPERTS))
    apart[:, : EXPERTS // 2, EXPERTS // 2 :] = 1
    record = build_record(EVEN.activations, apart)
    crossing_s = 2 * 100 * CHOSEN * LAYERS * HIDDEN * BYTES / (2 * LINK)
    assert shared(record, 2).step_s(100) - shared(EVEN, 2).step_s(100) == pytest.approx(crossing_s)
