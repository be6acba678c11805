import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.coserve.pool import Component, Costs, ExecutorSettings
from benchmarks.coserve.pool.errors import ComponentTooLarge
from benchmarks.coserve.pool.measuring import (
    Amount,
    Bench,
    Measured,
    batch_timing,
    largest_useful,
    measured,
)
from benchmarks.coserve.pool.simulated import SimulatedComponents
from shell_router.core.statistics import Timing, fit_costs, measure_held_out_error
from shell_router.errors import ConfigError
from shell_router.lab.simulation.virtual_time import run_virtual
from tests.coserve.fakes import COSTS, component

pytestmark = pytest.mark.slow


ALL = Amount()
SOME = [component(name) for name in "abc"]


def timings(**means: float) -> list[Timing]:
    """By size, as n3=0.2: the mean seconds per sample."""
    return [batch_timing(int(name[1:]), int(name[1:]) * mean_s) for name, mean_s in means.items()]


def test_the_largest_useful_batch_is_where_the_mean_latency_stops_falling() -> None:
    assert largest_useful(timings(n1=1.0, n2=0.7, n4=0.6, n6=0.5, n8=0.5, n12=0.55)) == 6


def test_a_gain_of_less_than_a_twentieth_is_none() -> None:
    assert largest_useful(timings(n1=1.0, n2=0.5, n4=0.48)) == 2
    assert largest_useful(timings(n1=1.0, n2=0.5, n4=0.47)) == 4


def test_a_machine_that_batches_do_not_help_takes_one_at_a_time() -> None:
    assert largest_useful(timings(n1=1.0, n2=1.0, n4=1.3)) == 1


@given(st.floats(1e-6, 1), st.floats(0, 1), st.sets(st.integers(1, 64), min_size=3))
def test_timings_on_a_line_give_its_k_and_b(
    sample_s: float, batch_s: float, sizes: set[int]
) -> None:
    timed = [batch_timing(size, sample_s * size + batch_s) for size in sizes]
    assert measure_held_out_error(timed) == pytest.approx(0, abs=1e-4)
    each_s, start_s = fit_costs(timed)
    for size in sizes:
        assert each_s * size + start_s == pytest.approx(sample_s * size + batch_s, rel=1e-3)


def test_neither_k_nor_b_is_below_zero_whatever_was_timed() -> None:
    sample_s, batch_s = fit_costs(timings(n1=1.0, n2=2.0, n4=4.0))
    assert sample_s > 0 and batch_s == 0


async def weigh(component: Component, place: str, samples: Sequence[Any]) -> int:
    """7 bytes a sample, and 5 whatever the batch."""
    return 7 * len(samples) + 5


def run(
    costs: Costs = COSTS, amount: Amount = ALL, memory_bytes: int = 1000, **more: Any
) -> Measured:
    async def main() -> Measured:
        executors = [ExecutorSettings("gpu", memory_bytes, {"net": costs})]
        components, clock = (
            SimulatedComponents(executors, {"gpu": "gpu"}),
            asyncio.get_running_loop().time,
        )
        return await measured(
            Bench(components, SOME, "gpu", memory_bytes, "sample", weigh, clock, **more), amount
        )

    return run_virtual(main())


def test_what_is_measured_is_what_experts_cost() -> None:
    costs = run().costs
    for name in ("sample_s", "batch_s", "host_load_s", "disk_load_s"):
        assert getattr(costs, name) == pytest.approx(getattr(COSTS, name))
    assert (
        costs.activation_bytes == 12
    )  # of one sample alone: what is there whatever the batch is its own


def test_the_system_forgets_each_file_before_it_is_read() -> None:
    forgotten: list[str] = []
    run(amount=Amount((1, 2), rounds=3), forget=lambda component: forgotten.append(component.name))
    assert forgotten == ["a", "b", "c", "a"]


def test_batches_that_do_not_fit_next_to_the_weights_are_not_run() -> None:
    assert [one.kind for one in run(memory_bytes=150).timings] == [1, 2, 3, 4]


def test_an_executor_without_room_for_a_sample_or_the_weights_says_what_to_do() -> None:
    with pytest.raises(
        ComponentTooLarge, match=r"takes 12 bytes, and gpu has 9 besides.*memory_bytes"
    ):
        run(memory_bytes=109)
    with pytest.raises(ComponentTooLarge, match=r"takes 10 bytes more than gpu has.*memory_bytes"):
        run(memory_bytes=90)


def test_where_one_batch_fits_all_of_it_is_k() -> None:
    costs = run(memory_bytes=112).costs
    assert (costs.sample_s, costs.batch_s, costs.largest_batch) == (
        pytest.approx(COSTS.batch_seconds(1)),
        0,
        1,
    )


def test_amounts_that_tell_nothing_are_refused() -> None:
    for batches, rounds in (((4,), 1), ((0, 1), 1), ((1, 2), 0)):
        with pytest.raises(ConfigError):
            Amount(batches, rounds)
