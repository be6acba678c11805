"""What the placement algorithms promise, on drawn, skewed and small records."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.expert_placement.drawn import Routing, drawn
from benchmarks.expert_placement.milp import Weights, milp, objective
from shell_router.errors import ConfigError
from shell_router.experts.placement import (
    ALGORITHMS,
    ExpertPlacement,
    ExpertRecord,
    Measures,
    build_record,
    place,
)
from shell_router.experts.placement.algorithms import Bounds, Layer, compute_bounds, eplb
from shell_router.experts.placement.records import compute_loads, count_kept, measure_placement

TINY = 1e-9


@st.composite
def records(draw: st.DrawFn, *, experts: tuple[int, ...] = (4, 6, 8, 12)) -> ExpertRecord:
    """Counts of all kinds: even, skewed by powers, mostly zero, with transitions or without."""
    layers, number = draw(st.integers(1, 4)), draw(st.sampled_from(experts))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    power = draw(st.sampled_from([0, 1, 6]))
    activations = (1000 * random.random((layers, number)) ** power).astype(np.int64)
    activations[:, 0] += 1
    transitions = random.poisson(
        draw(st.sampled_from([0.0, 0.3, 20.0])), (layers - 1, number, number)
    )
    return build_record(activations, transitions)


def divisors(number: int) -> list[int]:
    return [gpus for gpus in range(1, number + 1) if number % gpus == 0]


def no_worse(one: Measures, other: Measures) -> bool:
    """In all that is measured of balance, and in traffic."""
    return (
        one.balance <= other.balance + TINY
        and one.deviation <= other.deviation + TINY
        and one.worst_balance <= other.worst_balance + TINY
        and one.traffic <= other.traffic + TINY
    )


@given(records(), st.data())
def test_the_default_is_never_worse_than_eplb_in_balance_nor_in_traffic(
    record: ExpertRecord, data: st.DataObject
) -> None:
    chosen = data.draw(st.sampled_from(divisors(record.experts)))
    found, baseline = place("swap", record, chosen), eplb(record, chosen)
    assert no_worse(measure_placement(record, found), measure_placement(record, baseline))
    assert (
        compute_loads(record, found).max(axis=1)
        <= compute_loads(record, baseline).max(axis=1) + TINY
    ).all(), "in some layer"


@pytest.mark.parametrize("routing", [Routing(layers=8), Routing(layers=8, topics=8, topical=3)])
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_on_routing_with_affinity_the_default_beats_eplb_in_traffic_and_is_no_worse_balanced(
    routing: Routing, gpus: int
) -> None:
    record, chosen = drawn(routing, 1000), gpus
    found, baseline = (
        measure_placement(record, place("swap", record, chosen)),
        measure_placement(record, eplb(record, chosen)),
    )
    assert no_worse(found, baseline)
    assert found.traffic < baseline.traffic - 0.015


def test_groups_that_no_swap_within_eplbs_bounds_reaches_are_found() -> None:
    """Two kinds of text, each with half of every layer's experts to itself; within the bounds a
    fifth would cross.
    """
    record = drawn(Routing(layers=8, topics=2, topical=10, skew=0.3), 1000)
    assert measure_placement(record, place("swap", record, 2)).traffic < 0.05


def test_without_transitions_the_default_balances_better_than_eplb() -> None:
    record = build_record(
        np.array([[8, 7, 7, 5, 4, 1]])
    )  # greedily 8 + 5 + 4 and 7 + 7 + 1, at best 16 and 16
    assert measure_placement(record, eplb(record, 2)).balance == 17 / 16
    assert measure_placement(record, place("swap", record, 2)).balance == 1


@pytest.mark.parametrize("name", ALGORITHMS)
@given(record=records(experts=(4, 6)), data=st.data())
def test_every_algorithm_puts_equal_numbers_on_the_gpus(
    name: str, record: ExpertRecord, data: st.DataObject
) -> None:
    gpus = data.draw(st.sampled_from(divisors(record.experts)))
    placement = place(name, record, gpus)
    assert placement.gpu_of.shape == record.activations.shape
    for row in placement.gpu_of:  # Placement checks it too
        assert np.bincount(row, minlength=gpus).tolist() == [record.experts // gpus] * gpus


@pytest.mark.parametrize("name", ["swap", "gimbal", "eplb", "contiguous"])
def test_the_same_record_gives_the_same_placement(name: str) -> None:
    record = drawn(Routing(layers=4), 500)
    once, again = (place(name, record, 4).gpu_of for _ in range(2))
    assert (once == again).all()


def partitions(experts: int, gpus: int) -> Iterator[tuple[int, ...]]:
    """Every way to put equal numbers on the GPUs, as the experts' GPUs."""
    wanted = [experts // gpus] * gpus
    for row in product(range(gpus), repeat=experts):
        if np.bincount(row, minlength=gpus).tolist() == wanted:
            yield row


def small(seed: int, layers: int = 3) -> ExpertRecord:
    random = np.random.default_rng(seed)
    return build_record(random.integers(1, 50, (layers, 4)), random.poisson(3, (layers - 1, 4, 4)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("one_partition", [False, True])
def test_the_milp_finds_what_trying_everything_finds(seed: int, one_partition: bool) -> None:
    record = small(seed)
    chosen = Weights(alpha=2.0, one_partition=one_partition)
    rows = list(partitions(4, 2))
    every = (
        [[row] * 3 for row in rows]
        if one_partition
        else [list(three) for three in product(rows, repeat=3)]
    )
    best = min(objective(record, ExpertPlacement(2, np.array(one)), chosen) for one in every)
    found = milp(record, 2, chosen)
    assert objective(record, found, chosen) == pytest.approx(best)
    assert not one_partition or (found.gpu_of == found.gpu_of[0]).all()


@pytest.mark.parametrize("seed", range(4))
def test_the_milp_counts_a_gpu_below_the_ideal_load_as_it_counts_one_above(seed: int) -> None:
    """With three GPUs the emptiest may be further from the ideal than the fullest."""
    random = np.random.default_rng(seed)
    record = build_record(random.integers(1, 40, (2, 6)), random.poisson(2, (1, 6, 6)))
    chosen = Weights(alpha=2.0, one_partition=True)
    best = min(
        objective(record, ExpertPlacement(3, np.array([row, row])), chosen)
        for row in partitions(6, 3)
    )
    assert objective(record, milp(record, 3, chosen), chosen) == pytest.approx(best)


def test_swaps_come_near_the_best_traffic_within_the_same_balance() -> None:
    """The best of all placements of three layers within EPLB's bounds. Swaps may miss a little of
    it.
    """
    shares = []
    for seed in range(12):
        random = np.random.default_rng(seed)
        links = random.poisson(2, (2, 6, 6)) * random.integers(0, 9, (2, 6, 6))
        record = build_record(random.integers(20, 40, (3, 6)), links)
        bounds = [compute_bounds(load) for load in compute_loads(record, eplb(record, 2))]
        fitting = [
            [row for row in partitions(6, 2) if not of.excess(np.bincount(row, counts)).any()]
            for counts, of in zip(record.activations, bounds, strict=True)
        ]
        best = max(
            count_kept(record, ExpertPlacement(2, np.array(rows))) for rows in product(*fitting)
        )
        shares.append(count_kept(record, place("swap", record, 2)) / best)
    assert max(shares) <= 1 + TINY
    assert np.mean(shares) >= 0.95


def test_gimbal_puts_the_strongest_pairs_on_the_anchor_and_the_rest_by_load() -> None:
    transitions = np.zeros((1, 6, 6), dtype=int)
    transitions[0, 1, 4] = 90
    transitions[0, 2, 4] = 80
    record = build_record(np.array([[9, 5, 4, 3, 2, 1], [9, 5, 4, 3, 2, 1]]), transitions)
    found = place("gimbal", record, 2).gpu_of
    assert found[0].tolist() == [
        1,
        0,
        0,
        0,
        1,
        1,
    ]  # the anchor has 5 + 4, so 0 goes to GPU 1; then 3, 4 and 5
    assert found[1][4] == 0


def test_gimbal_leaves_a_pair_out_that_finds_no_room_on_the_anchor() -> None:
    transitions = np.zeros((1, 4, 4), dtype=int)
    for strength, (one, other) in enumerate([(0, 0), (1, 1), (2, 2)]):
        transitions[0, one, other] = 9 - strength
    record = build_record(np.ones((2, 4), dtype=int), transitions)
    found = place("gimbal", record, 2).gpu_of
    assert [set(np.flatnonzero(row == 0)) for row in found] == [{0, 1}, {0, 1}]


def test_a_layer_that_cannot_be_levelled_says_so() -> None:
    layer = Layer(np.array([0, 0, 1, 1]), np.array([9.0, 0.0, 1.0, 0.0]), np.zeros((4, 2)))
    assert not layer.level(Bounds(0, 8))
    assert not layer.level(Bounds(2, 9))
    assert layer.level(Bounds(1, 9))


def test_experts_that_do_not_divide_over_the_gpus_are_refused() -> None:
    record = build_record(np.ones((1, 6), dtype=int))
    for name in ALGORITHMS:
        with pytest.raises(ConfigError, match="6 experts do not divide over 4 GPUs"):
            place(name, record, 4)


def test_an_unknown_algorithm_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="swap, gimbal, eplb, contiguous"):
        place("magic", small(0), 2)


def test_every_pair_of_experts_counts_once() -> None:
    """Balance and traffic by hand: two layers, four experts, two GPUs."""
    transitions = np.array([[[1, 2, 0, 0], [0, 0, 3, 0], [0, 0, 4, 0], [5, 0, 0, 5]]])
    record = build_record(np.array([[1, 2, 3, 4], [4, 4, 1, 1]]), transitions)
    found = measure_placement(record, ExpertPlacement(2, np.array([[0, 0, 1, 1], [0, 1, 1, 0]])))
    assert found.balance == pytest.approx((7 / 5 + 1) / 2)
    assert found.worst_balance == pytest.approx(7 / 5)
    assert found.deviation == pytest.approx(2 / 5)
    assert found.traffic == pytest.approx((2 + 3 + 5 + 5) / 20)  # 0-1, 1-2, 3-0 and 3-3 part
