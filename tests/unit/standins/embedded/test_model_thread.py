"""The thread that owns the model, with a worker that counts instead of computing."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from shell_router.standins.embedded.service import ModelThread


@dataclass(eq=False)
class Countdown:
    """A job of `steps` steps; at step `fails_at` the model raises."""

    steps: int
    fails_at: int = -1
    results: "list[int | str]" = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class CountingWorker:
    """Counts each of its jobs down."""

    def __init__(self) -> None:
        self.jobs: list[Countdown] = []

    @property
    def busy(self) -> bool:
        return bool(self.jobs)

    def admit(self, job: Countdown) -> None:
        self.jobs.append(job)

    def drop(self, job: Countdown) -> None:
        if job in self.jobs:
            self.jobs.remove(job)

    def step(self) -> Sequence[tuple[Countdown, int | str]]:
        for job in self.jobs:
            job.steps -= 1
            if job.steps == job.fails_at:
                raise ArithmeticError("the model fell over")
        results = [(job, job.steps) for job in self.jobs]
        self.jobs = [job for job in self.jobs if job.steps > 0]
        return results

    def fail(self, message: str) -> Sequence[tuple[Countdown, int | str]]:
        jobs, self.jobs = self.jobs, []
        return [(job, message) for job in jobs]


def deliver(job: Countdown, result: int | str) -> None:
    job.results.append(result)
    if result == 0 or isinstance(result, str):
        job.ended.set()


async def run(worker: CountingWorker, *jobs: Countdown) -> bool:
    """Run the jobs one after the other's end; says whether the thread lived to the last."""
    thread: ModelThread[Countdown, int | str] = ModelThread(worker, deliver)
    async with asyncio.timeout(10):
        for job in jobs:
            thread.submit(job)
            await job.ended.wait()
    alive = thread.alive
    await thread.stop()
    assert not thread.alive
    return alive


async def test_results_come_in_order_and_the_thread_ends_when_asked() -> None:
    job = Countdown(5)
    assert await run(CountingWorker(), job)
    assert job.results == [4, 3, 2, 1, 0]


async def test_an_error_in_a_step_ends_its_requests_and_not_the_thread() -> None:
    bad, good = Countdown(3, fails_at=1), Countdown(2)
    assert await run(CountingWorker(), bad, good)
    assert bad.results == [2, "ArithmeticError: the model fell over"]
    assert good.results == [1, 0]


async def test_a_dropped_job_stops_within_a_step() -> None:
    worker, endless, after = CountingWorker(), Countdown(2**60), Countdown(1)
    thread: ModelThread[Countdown, int | str] = ModelThread(worker, deliver)
    async with asyncio.timeout(10):
        thread.submit(endless)
        thread.drop(endless)
        thread.submit(after)
        await after.ended.wait()
    await thread.stop()
    assert not worker.busy
    assert 2**60 - endless.steps <= 1
