"""The thread that owns the model: commands in by a queue, results out in one callback per step."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

logger = logging.getLogger(__name__)

STOP_LIMIT_S = 10.0

Job = TypeVar("Job")
Result = TypeVar("Result")
JobT = TypeVar("JobT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class Worker(Protocol[JobT, ResultT_co]):
    """What runs in the thread. `step` may be called when nothing is to be done."""

    @property
    def busy(self) -> bool:
        """Whether `step` has work."""
        ...

    def admit(self, job: JobT) -> None: ...

    def drop(self, job: JobT) -> None:
        """Free all that `job` holds; unknown or finished jobs are no error."""
        ...

    def step(self) -> Sequence[tuple[JobT, ResultT_co]]:
        """Do one step of work; returns what is to be told to whom."""
        ...

    def fail(self, message: str) -> Sequence[tuple[JobT, ResultT_co]]:
        """Give up everything in work after an error in a step."""
        ...


class ModelThread(Generic[Job, Result]):
    """Runs a worker step by step; between steps it obeys commands, so that each takes effect within one step."""

    def __init__(self, worker: Worker[Job, Result], deliver: Callable[[Job, Result], None]) -> None:
        """`deliver` is called in the event loop's thread."""
        self._worker = worker
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        # None ends the thread
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        self._commands.put(partial(self._worker.admit, job))

    def drop(self, job: Job) -> None:
        self._commands.put(partial(self._worker.drop, job))

    async def between_steps(self, action: Callable[[], None]) -> None:
        """Run `action` in the thread, after what was submitted and dropped before it. It must not raise."""
        ran: asyncio.Future[None] = self._loop.create_future()

        def run() -> None:
            action()
            self._loop.call_soon_threadsafe(_settle, ran)

        self._commands.put(run)
        await ran

    async def stop(self) -> None:
        """End after the current step."""
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, STOP_LIMIT_S)

    def _run(self) -> None:
        with torch.inference_mode():
            while self._obey():
                results = self._step()
                if results:
                    self._loop.call_soon_threadsafe(self._deliver_all, results)

    def _obey(self) -> bool:
        """Carry out waiting commands, waiting for one when idle; False ends the thread."""
        try:
            command = self._commands.get(block=not self._worker.busy)
            while command is not None:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _step(self) -> Sequence[tuple[Job, Result]]:
        try:
            return self._worker.step()
        except Exception as error:
            # Whatever a model raises must end the requests that met it, never the server.
            logger.exception("A step of the model failed; its requests are given up")
            return self._worker.fail(f"{type(error).__name__}: {error}")

    def _deliver_all(self, results: Sequence[tuple[Job, Result]]) -> None:
        for job, result in results:
            self._deliver(job, result)


def _settle(ran: asyncio.Future[None]) -> None:
    if not ran.done():  # else whoever waited was cancelled
        ran.set_result(None)
