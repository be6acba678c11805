"""Keeping an embedding process available."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from shell_router.core.embedding import TokenStates
from shell_router.engines.embedder.child import EmbeddingChild
from shell_router.errors import EngineError, EngineStalled

log = logging.getLogger(__name__)


class SupervisedEmbedder:
    """Embeds through a child process that speaks `frames`; when it has died, the next call starts it again.

    A call waits for the start at most `start_timeout_s`, then for its answer at most `timeout_s`. A process
    that answers nobody for `timeout_s` counts as hung and is killed. After a failed start, calls fail with its
    reason for `retry_s` before it is tried again. `restarts` counts the starts after the first.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        timeout_s: float = 30.0,
        start_timeout_s: float = 120.0,
        retry_s: float = 10.0,
    ) -> None:
        self._command = tuple(command)
        self._env = dict(env)
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._retry_s = retry_s
        self._launch: asyncio.Task[EmbeddingChild] | None = None
        self._failed_s = 0.0
        self._closed = False
        self.restarts = 0

    async def start(self) -> None:
        """Start the process, unless it runs, and wait until its model is loaded. EngineError if it cannot be."""
        await self._running()

    async def embed(self, text: str) -> TokenStates:
        """States of `text`. EngineStalled after `timeout_s`, EngineUnreachable if the process dies."""
        child = await self._running()
        answered = child.answered
        try:
            async with asyncio.timeout(self._timeout_s):
                return await child.embed(text)
        except TimeoutError:
            if child.answered == answered:
                log.warning("embedding process %d answered nothing for %g s: killed", child.pid, self._timeout_s)
                child.kill()
            raise EngineStalled(
                f"no embedding of a text of {len(text)} characters within {self._timeout_s:g} s.",
                remedy="Give the embedder more threads, a GPU, or a longer limit.",
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

    async def _running(self) -> EmbeddingChild:
        if self._closed:
            raise EngineError("the embedder is closed.")
        if self._launch is None or self._spent(self._launch):
            if self._launch is not None:
                self.restarts += 1
                log.warning("embedding process has ended; starting it again (restart %d)", self.restarts)
            start = self._start_child(after=self._child())
            self._launch = asyncio.create_task(start, name="embedding-start")
        return await self._launched(self._launch)

    async def _launched(self, launch: asyncio.Task[EmbeddingChild]) -> EmbeddingChild:
        try:
            # shared by all callers: one that gives up must not end it for the others
            return await asyncio.shield(launch)
        except asyncio.CancelledError:
            if launch.cancelled():
                raise EngineError("the embedder was closed while it started.") from None
            raise

    async def _start_child(self, *, after: EmbeddingChild | None) -> EmbeddingChild:
        if after is not None:
            await after.close()
        try:
            return await EmbeddingChild.launch(self._command, self._env, self._start_timeout_s)
        except EngineError as error:
            self._failed_s = asyncio.get_running_loop().time()
            log.error("embedding process could not be started: %s", error)
            raise

    def _spent(self, launch: asyncio.Task[EmbeddingChild]) -> bool:
        if not launch.done():
            return False
        child = self._child()
        if child is None:
            return asyncio.get_running_loop().time() - self._failed_s >= self._retry_s
        return not child.alive

    def _child(self) -> EmbeddingChild | None:
        launch = self._launch
        if launch is None or not launch.done() or launch.cancelled() or launch.exception() is not None:
            return None
        return launch.result()
