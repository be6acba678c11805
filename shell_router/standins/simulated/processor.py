"""Processors: jobs run at the same time, as fast as there are cores for them."""

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count


@dataclass(slots=True, eq=False)
class Job:
    """Work that was begun. `begin` and `end` count the processor's seconds of undivided work."""

    begin: float
    end: float
    done: Callable[[], None] | None


class Processor:
    """A processor that runs up to `cores` jobs at full speed; more jobs share the cores evenly.

    An engine alone on its GPU is a processor of one core that gets one job at a time. Engines on
    one machine's CPU share a processor, and slow each other down.
    """

    def __init__(self, cores: float = 1.0) -> None:
        self._cores = cores
        self._loop = asyncio.get_running_loop()
        self._jobs: list[tuple[float, int, Job]] = []
        self._order = count()
        self._running = 0
        self._holds = 0
        self._worked = 0.0
        self._since_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float, done: Callable[[], None]) -> Job:
        """Begin work that takes `seconds` undivided; `done` is called at its end."""
        self._catch_up()
        job = Job(self._worked, self._worked + seconds, done)
        heapq.heappush(self._jobs, (job.end, next(self._order), job))
        self._running += 1
        self._set_timer()
        return job

    def worked_s(self, job: Job) -> float:
        """Return the seconds of work that were done on a job so far."""
        self._catch_up()
        return min(self._worked, job.end) - job.begin

    def stop(self, job: Job) -> float:
        """Give a running job up; return the seconds of work that were done on it."""
        self._catch_up()
        if job.done is not None:
            job.done = None
            job.end = min(self._worked, job.end)
            self._running -= 1
            self._set_timer()
        return job.end - job.begin

    async def work(self, seconds: float) -> None:
        """Return when `seconds` of undivided work are done; a cancel gives the work up."""
        ended = asyncio.Event()
        job = self.start(seconds, ended.set)
        try:
            await ended.wait()
        finally:
            self.stop(job)

    def hold(self) -> None:
        """Pause all jobs until `release` was called as often as this."""
        self._catch_up()
        self._holds += 1
        self._set_timer()

    def release(self) -> None:
        """Undo one `hold`."""
        self._catch_up()
        self._holds -= 1
        self._set_timer()

    @property
    def _speed(self) -> float:
        """The speed of every running job."""
        if self._holds:
            return 0.0
        if self._running:
            return min(1.0, self._cores / self._running)
        return 1.0

    def _catch_up(self) -> None:
        now_s = self._loop.time()
        self._worked += (now_s - self._since_s) * self._speed
        self._since_s = now_s

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._jobs and self._jobs[0][2].done is None:
            heapq.heappop(self._jobs)
        if self._jobs and not self._holds:
            wait_s = max(0.0, self._jobs[0][0] - self._worked) / self._speed
            self._timer = self._loop.call_at(self._since_s + wait_s, self._end_first)

    def _end_first(self) -> None:
        self._timer = None
        self._catch_up()
        end, _, job = heapq.heappop(self._jobs)
        self._worked = max(self._worked, end)  # the clock may be a rounding short of it
        self._running -= 1
        done = job.done
        job.done = None
        self._set_timer()
        if done is not None:
            done()
