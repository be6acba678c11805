"""An embedder in a process of its own."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from shell_router.core.embedding import TokenStates
from shell_router.engines.embedder.states import unpacked_states
from shell_router.errors import EngineStalled
from shell_router.side_process import ProcessLimits, SideProcess


class SupervisedEmbedder:
    """Embeds through a child process (`side_process.SideProcess`, whose limits these are)."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        timeout_s: float = 30.0,
        start_timeout_s: float = 120.0,
        retry_s: float = 10.0,
    ) -> None:
        limits = ProcessLimits(timeout_s, start_timeout_s, retry_s)
        self._process = SideProcess("embedding", command, env, limits)

    async def start(self) -> None:
        """Start the process, unless it runs, and wait until its model is loaded. EngineError if it cannot be."""
        await self._process.start()

    async def embed(self, text: str) -> TokenStates:
        """States of `text`. EngineStalled after `timeout_s`, EngineUnreachable if the process dies."""
        try:
            # what UTF-8 cannot hold (lone surrogates) is replaced by question marks
            return unpacked_states(await self._process.ask(text.encode(errors="replace")))
        except EngineStalled as error:
            raise EngineStalled(f"A text of {len(text)} characters: {error}") from error

    async def aclose(self) -> None:
        """End the process; calls that wait fail. Safe to call twice."""
        await self._process.aclose()

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
        return self._process.pid

    @property
    def restarts(self) -> int:
        """Starts after the first."""
        return self._process.restarts
