import asyncio

import pytest

from shell_router.lab.simulation.virtual_time import run_virtual
from shell_router.standins.simulated.processor import Processor


def ends(cores: float, *jobs: tuple[float, float]) -> list[float]:
    """When jobs end with these start times and these durations alone."""

    async def run() -> list[float]:
        loop = asyncio.get_running_loop()
        processor, ended = Processor(cores), [0.0] * len(jobs)

        async def job(number: int, begin_s: float, seconds: float) -> None:
            await asyncio.sleep(begin_s)
            done = asyncio.Event()
            processor.start(seconds, done.set)
            await done.wait()
            ended[number] = loop.time()

        await asyncio.gather(*(job(number, *times) for number, times in enumerate(jobs)))
        return ended

    return run_virtual(run())


@pytest.mark.parametrize(
    ("cores", "jobs", "expected"),
    [
        (1, [(0, 2)], [2]),
        (1, [(0, 2), (0, 2)], [4, 4]),
        (2, [(0, 2), (0, 2)], [2, 2]),
        (2, [(0, 2), (0, 2), (0, 2)], [3, 3, 3]),
        (1, [(0, 3), (1, 1)], [4, 3]),
        (1, [(0, 1), (5, 1)], [1, 6]),
        (0.5, [(0, 1)], [2]),
        (1, [(0, 0), (0, 1)], [0, 1]),
    ],
)
def test_jobs_share_the_cores_evenly(
    cores: float, jobs: list[tuple[float, float]], expected: list[float]
) -> None:
    assert ends(cores, *jobs) == pytest.approx(expected)


def test_a_job_that_is_given_up_frees_its_share_and_tells_how_far_it_came() -> None:
    async def run() -> tuple[float, float, float]:
        loop = asyncio.get_running_loop()
        processor, done = Processor(1), asyncio.Event()
        given_up = processor.start(10, lambda: pytest.fail("it was given up"))
        processor.start(2, done.set)
        await asyncio.sleep(2)
        worked = processor.stop(given_up)
        await done.wait()
        return worked, processor.stop(given_up), loop.time()

    assert run_virtual(run()) == pytest.approx((1, 1, 3))


def test_held_jobs_stand_still_until_all_let_them_go() -> None:
    async def run() -> float:
        loop, processor, done = asyncio.get_running_loop(), Processor(1), asyncio.Event()
        processor.start(2, done.set)
        await asyncio.sleep(1)
        processor.hold()
        await asyncio.sleep(1)
        processor.hold()
        processor.release()
        await asyncio.sleep(3)
        processor.release()
        await done.wait()
        return loop.time()

    assert run_virtual(run()) == pytest.approx(6)
