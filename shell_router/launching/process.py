"""One engine as a child process: the leader of a process group, its output in a log file."""

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

from shell_router.launching.commands import EngineCommand
from shell_router.launching.with_parent import with_parent

LOG_TAIL_CHARACTERS = 2000


class EngineProcess:
    """One run after the other of one command. It ends with this process, however that ends (Linux)."""

    def __init__(self, command: EngineCommand, folder: Path) -> None:
        self.command = command
        self.log = folder / f"{command.name.replace('/', '-')}.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        """Whether its process runs, ready or not."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the command; its output is added to the log."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *with_parent(self.command.argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.command.env},
                start_new_session=True,  # Ctrl-C in the terminal is for the router, which stops its engines in order
            )

    async def ended(self) -> int:
        """Wait for its end, kill what is left of its group, which may hold ports and GPUs, and give its exit code."""
        assert self._process is not None
        code = await self._process.wait()
        self._signal(signal.SIGKILL)
        return code

    async def stop(self, limit_s: float) -> None:
        """SIGTERM to the group, SIGKILL to what is left of it after `limit_s`; returns when the engine is gone."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies is EPERM
            os.killpg(self._process.pid, number)

    def log_tail(self) -> str:
        """The end of its output."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARACTERS:].strip()
