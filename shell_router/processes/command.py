"""A program as a child process: its output goes to a log, and it ends with this process."""

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shell_router.errors import EngineUnreachable
from shell_router.processes.with_parent import with_parent

LOG_TAIL_BYTES = 8192


class CommandProcess:
    """A command that runs as the leader of a process group, and can be started again."""

    def __init__(
        self, name: str, argv: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self.name = name
        self.log = log
        self._argv = argv
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        # after a group has ended, the system may give its number to another group
        self._group_may_live = False

    @property
    def running(self) -> bool:
        """Whether the process runs, ready or not."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start the command and append its output to the log. Raises EngineUnreachable."""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with self.log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *with_parent(self._argv),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self._environment},
                    # Ctrl-C in the terminal is for the router: it stops its engines in order
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineUnreachable(
                f"{self.name} cannot be started: {error}.",
                remedy="Free memory or end other processes if they ran out, and make its log "
                f"{self.log} writable.",
            ) from error
        self._group_may_live = True

    async def wait(self) -> int:
        """Wait for the end, kill the rest of the group, and return the exit code.

        Other processes of the group could still hold ports and GPUs.
        """
        assert self._process is not None
        code = await self._process.wait()
        self._signal_group(signal.SIGKILL)
        self._group_may_live = False
        return code

    async def stop(self, limit_s: float) -> None:
        """Send SIGTERM to the group, and SIGKILL to the rest of it after `limit_s`."""
        if self._process is None or not self._group_may_live:
            return
        self._signal_group(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        self._signal_group(signal.SIGKILL)
        await self._process.wait()
        self._group_may_live = False

    def read_log_tail(self) -> str:
        """Return the end of the log, which may have gigabytes."""
        with suppress(OSError), self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - LOG_TAIL_BYTES))
            return log.read().decode("utf-8", "replace").strip()
        return "its log cannot be read"

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._group_may_live:
            # macOS raises EPERM for a group of zombies
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
