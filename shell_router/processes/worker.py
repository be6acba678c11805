"""A process that answers calls in batches.

It does work that would block the event loop, or that needs libraries which the router never loads.
Calls that come while a batch is computed wait for the next batches. A call that is cancelled before
it is sent is not sent; the answer to a call that is cancelled later is dropped.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Self

from shell_router.core.exact_json import Values
from shell_router.errors import EngineError, EngineStalled, EngineUnreachable
from shell_router.processes.child import Failure, PythonProcess, run_in_thread

log = logging.getLogger(__name__)

Work = Callable[[Sequence[Any]], Sequence[Any]]
"""Computes the answers to a batch of bodies, in their order."""

_SERVE = "shell_router.processes.worker:serve_batches"


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Seconds: for one answer, for the start, and before a failed start is tried again.

    A process that has answered nothing for both `hang_s` and `answer_s`, though calls wait, is
    killed.
    """

    answer_s: float = 30.0
    start_s: float = 120.0
    retry_s: float = 10.0
    hang_s: float = 0.0


DEFAULT_LIMITS = WorkerLimits()


def offline_environment(threads: int) -> dict[str, str]:
    """Return the environment of a process with `threads` that loads models only from the disk."""
    return {
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
    }


class WorkerProcess:
    """A process that is started by the first call, and again by the next call after its end.

    After a failed start, calls fail with its reason for `retry_s` before it is tried again.
    `restarts` counts the starts after the first.

    Args:
        name: The process's name in messages.
        entry: `package.module:function`, which makes the `Work` of `arguments` in the process.
        arguments: Keyword arguments of `entry`.
        max_batch: The most bodies of a batch.
        threads: Threads that it computes on.
        limits: Limits of waiting.
    """

    def __init__(
        self,
        name: str,
        entry: str,
        arguments: Values,
        *,
        max_batch: int = 1,
        threads: int = 1,
        limits: WorkerLimits = DEFAULT_LIMITS,
    ) -> None:
        self.name = name
        self.restarts = 0
        self._work = {"entry": entry, "arguments": arguments}
        self._max_batch = max_batch
        self._environment = offline_environment(threads)
        self._limits = limits
        self._starting: asyncio.Task[None] | None = None
        self._failed_s = 0.0
        self._running: _Running | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The running process's id; None while no process is ready."""
        if self._running is None:
            return None
        return self._running.process.pid

    async def start(self) -> None:
        """Start the process, unless it runs, and wait until it is ready. Raises EngineError."""
        if self._is_closed:
            raise EngineError(f"the {self.name} process is closed.")
        if self._starting is None or self._may_start_again(self._starting):
            if self._starting is not None:
                self.restarts += 1
                log.warning(
                    "%s process has ended; starting it again (restart %d)", self.name, self.restarts
                )
            self._starting = asyncio.create_task(self._start(), name=f"{self.name}-start")
        starting = self._starting
        try:
            # all callers wait for one start: a cancelled one must not cancel it for the others
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            if starting.cancelled():
                raise EngineError(f"the {self.name} process was closed while it started.") from None
            raise

    async def ask(self, body: Any) -> Any:
        """Return the answer to `body`.

        Raises:
            EngineStalled: No answer came within `answer_s`.
            EngineUnreachable: The process ended.
            EngineError: The work raised an exception, or the process cannot be started.
        """
        await self.start()
        running = self._running
        if running is None:
            raise EngineUnreachable(f"the {self.name} process has ended.")
        try:
            async with asyncio.timeout(self._limits.answer_s):
                return await running.ask(body)
        except TimeoutError:
            raise EngineStalled(
                f"no answer from the {self.name} process within {self._limits.answer_s:g} s.",
                remedy="Give it more threads, a GPU, or a longer limit.",
            ) from None
        finally:  # a caller's own limit may end the wait first
            running.kill_if_silent(max(self._limits.hang_s, self._limits.answer_s))

    async def aclose(self) -> None:
        """Kill the process; waiting calls fail. Safe to call twice."""
        self._is_closed = True
        if self._starting is None:
            return
        self._starting.cancel()
        await asyncio.wait({self._starting})
        if self._running is not None:
            self._running.process.kill()
            await asyncio.wait({self._running.watching})

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _may_start_again(self, starting: asyncio.Task[None]) -> bool:
        if not starting.done():
            return False
        if starting.cancelled() or starting.exception() is not None:
            return asyncio.get_running_loop().time() - self._failed_s >= self._limits.retry_s
        return self._running is None

    async def _start(self) -> None:
        process = PythonProcess(self.name, _SERVE, self._work, self._environment)
        try:
            await self._wait_until_ready(process)
        except BaseException as error:
            process.kill()
            if isinstance(error, EngineError):
                self._failed_s = asyncio.get_running_loop().time()
                log.error("%s process could not be started: %s", self.name, error)
                await self._discard(process)
            raise
        self._running = _Running(process, self._max_batch, self._forget)

    async def _wait_until_ready(self, process: PythonProcess) -> None:
        try:
            async with asyncio.timeout(self._limits.start_s):
                await run_in_thread(process.start)
                ready = await run_in_thread(process.connection.recv)
        except TimeoutError:
            raise EngineStalled(
                f"the {self.name} process was not ready within {self._limits.start_s:g} s."
            ) from None
        except EOFError:
            status = await run_in_thread(process.wait)
            raise EngineUnreachable(
                f"the {self.name} process ended (status {status}) before it was ready."
            ) from None
        if isinstance(ready, Failure):
            raise EngineError(f"the {self.name} process failed. {ready.message}")

    async def _discard(self, process: PythonProcess) -> None:
        """Free what belongs to a killed process that was never ready."""
        if process.pid is not None and process.exit_code is None:
            await run_in_thread(process.wait)
            process.connection.close()

    def _forget(self) -> None:
        self._running = None


@dataclass(frozen=True, slots=True)
class _Call:
    body: Any
    answer: asyncio.Future[Any]


class _Running:
    """A process that is ready, with the calls that wait for it."""

    def __init__(self, process: PythonProcess, max_batch: int, on_end: Callable[[], None]) -> None:
        self.process = process
        self._max_batch = max_batch
        self._on_end = on_end
        self._waiting: deque[_Call] = deque()
        self._sent: list[_Call] = []
        self._arrived = asyncio.Event()
        self._silent_since_s: float | None = None
        self._has_ended = False
        self._sending = asyncio.create_task(self._send_batches(), name=f"{process.name}-calls")
        self.watching = asyncio.create_task(self._watch(), name=f"{process.name}-watch")

    async def ask(self, body: Any) -> Any:
        call = _Call(body, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._arrived.set()
        if self._silent_since_s is None:
            self._silent_since_s = _now_s()
        return await call.answer

    def kill_if_silent(self, limit_s: float) -> None:
        """Kill the process if calls wait and it has answered nothing for `limit_s`."""
        if self._silent_since_s is None:
            return
        silent_s = _now_s() - self._silent_since_s
        if silent_s >= limit_s:
            log.warning(
                "%s process %d answered nothing for %g s: killed",
                self.process.name,
                self.process.pid,
                silent_s,
            )
            self._silent_since_s = None
            self.process.kill()

    async def _send_batches(self) -> None:
        """Send the calls that wait, until the process ends."""
        while await self._arrived.wait() and not self._has_ended:
            self._sent = self._take_batch()
            if self._sent:
                bodies = [call.body for call in self._sent]
                try:
                    answers = await run_in_thread(partial(self._exchange, bodies))
                except (EOFError, OSError):
                    return  # `_watch` learns why it ended, and fails the calls
                except Exception as error:  # a body that cannot be pickled fails only its batch
                    answers = Failure(f"{type(error).__name__}: {error}")
                self._settle(answers)
            self._silent_since_s = _now_s() if self._waiting else None

    def _take_batch(self) -> list[_Call]:
        """Remove the oldest calls whose callers still wait."""
        batch: list[_Call] = []
        while self._waiting and len(batch) < self._max_batch:
            call = self._waiting.popleft()
            if not call.answer.done():
                batch.append(call)
        if not self._waiting:
            self._arrived.clear()
        return batch

    def _exchange(self, bodies: Sequence[Any]) -> Any:
        """Send a batch and receive its answers, in a thread."""
        self.process.connection.send(bodies)
        return self.process.connection.recv()

    def _settle(self, answers: Sequence[Any] | Failure) -> None:
        if isinstance(answers, Failure):
            self._fail(EngineError, f"the {self.process.name} process failed. {answers.message}")
            return
        for call, answer in zip(self._sent, answers, strict=True):
            if not call.answer.done():
                call.answer.set_result(answer)
        self._sent = []

    def _fail(self, kind: type[EngineError], reason: str, remedy: str = "") -> None:
        for call in self._sent:
            if not call.answer.done():
                call.answer.set_exception(kind(reason, remedy=remedy))
        self._sent = []

    async def _watch(self) -> None:
        """Fail all calls when the process has ended."""
        status = await run_in_thread(self.process.wait)
        self._on_end()
        self._has_ended = True
        log.info("%s process %d ended", self.process.name, self.process.pid)
        self._sent += self._waiting
        self._fail(
            EngineUnreachable,
            f"the {self.process.name} process ended (status {status}) before it answered.",
            remedy="It is started again by the next call.",
        )
        self._arrived.set()
        await asyncio.wait({self._sending})
        self.process.connection.close()


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def serve_batches(connection: Connection, entry: str, arguments: Values) -> None:
    """Make the work and answer batches with it until the process is killed; runs in the child."""
    module, _, function = entry.partition(":")
    work: Work = getattr(import_module(module), function)(**arguments)
    connection.send(None)
    while True:
        bodies = connection.recv()
        try:
            answers: Sequence[Any] | Failure = work(bodies)
        except Exception as error:
            # a batch that takes too much memory must not end the process
            answers = Failure(f"{type(error).__name__}: {error}")
        connection.send(answers)
