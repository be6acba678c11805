"""Keeping a process beside the router available."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from shell_router.errors import EngineError, EngineStalled
from shell_router.side_process.child import Child

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Seconds: for one answer, for the start, before a failed start is tried again, and of silence before it is killed.

    Without `hang_s` the silence of one call's limit is enough.
    """

    answer_s: float = 30.0
    start_s: float = 120.0
    retry_s: float = 10.0
    hang_s: float | None = None

    @property
    def silence_s(self) -> float:
        """How long the process may owe an answer and give none."""
        return self.answer_s if self.hang_s is None else self.hang_s


class SideProcess:
    """Asks a child process that speaks `frames`; when it has died, the next call starts it again.

    A call waits for the start at most `start_s`, then for its answer at most `answer_s`. A process that has owed
    answers for longer than the limits allow counts as hung and is killed. After a failed start, calls fail with its
    reason for `retry_s` before it is tried again. `restarts` counts the starts after the first.
    """

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], limits: ProcessLimits | None = None
    ) -> None:
        self.name = name
        self._command = tuple(command)
        self._env = dict(env)
        self._limits = limits or ProcessLimits()
        self._launch: asyncio.Task[Child] | None = None
        self._failed_s = 0.0
        self._closed = False
        self.restarts = 0

    async def start(self) -> None:
        """Start the process, unless it runs, and wait until it is ready. EngineError if it cannot be."""
        await self._running()

    async def ask(self, body: bytes) -> bytearray:
        """The answer to `body`. EngineStalled after `answer_s`, EngineUnreachable if the process dies."""
        child = await self._running()
        try:
            async with asyncio.timeout(self._limits.answer_s):
                return await child.ask(body)
        except TimeoutError:
            if child.silent_s >= self._limits.silence_s and child.alive:
                log.warning("%s process %d answered nothing for %g s: killed", self.name, child.pid, child.silent_s)
                child.kill()
            raise EngineStalled(
                f"no answer from the {self.name} process within {self._limits.answer_s:g} s.",
                remedy="Give it more threads, a GPU, or a longer limit.",
            ) from None

    async def aclose(self) -> None:
        """End the process; calls that wait fail. Safe to call twice."""
        self._closed = True
        if self._launch is None:
            return
        self._launch.cancel()
        await asyncio.wait({self._launch})
        if not self._launch.cancelled() and self._launch.exception() is None:
            await self._launch.result().close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @property
    def pid(self) -> int | None:
        """The running process's id; None while there is none that is ready."""
        child = self._child()
        return child.pid if child is not None and child.alive else None

    async def _running(self) -> Child:
        if self._closed:
            raise EngineError(f"the {self.name} process is closed.")
        if self._launch is None or self._spent(self._launch):
            if self._launch is not None:
                self.restarts += 1
                log.warning("%s process has ended; starting it again (restart %d)", self.name, self.restarts)
            start = self._start_child(after=self._child())
            self._launch = asyncio.create_task(start, name=f"{self.name}-start")
        return await self._launched(self._launch)

    async def _launched(self, launch: asyncio.Task[Child]) -> Child:
        try:
            # shared by all callers: one that gives up must not end it for the others
            return await asyncio.shield(launch)
        except asyncio.CancelledError:
            if launch.cancelled():
                raise EngineError(f"the {self.name} process was closed while it started.") from None
            raise

    async def _start_child(self, *, after: Child | None) -> Child:
        if after is not None:
            await after.close()
        try:
            return await Child.launch(self.name, self._command, self._env, self._limits.start_s)
        except EngineError as error:
            self._failed_s = asyncio.get_running_loop().time()
            log.error("%s process could not be started: %s", self.name, error)
            raise

    def _spent(self, launch: asyncio.Task[Child]) -> bool:
        if not launch.done():
            return False
        child = self._child()
        if child is None:
            return asyncio.get_running_loop().time() - self._failed_s >= self._limits.retry_s
        return not child.alive

    def _child(self) -> Child | None:
        launch = self._launch
        if launch is None or not launch.done() or launch.cancelled() or launch.exception() is not None:
            return None
        return launch.result()
