"""A program as a child process: its output goes to a log, and it ends with this process."""

import asyncio
import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shell_router.errors import EngineUnreachable
from shell_router.http.server import bind_sockets
from shell_router.processes.with_parent import with_parent

LOG_TAIL_BYTES = 8192
SEARCHED_BYTES = 2**16
PORT_TAKEN = "address already in use"


def require_free_ports(name: str, host: str, ports: Iterable[int]) -> None:
    """Raise EngineUnreachable for a port that is taken: what listens there may pass for `name`."""
    for port in ports:
        try:
            with bind_sockets(host, port):
                pass
        except OSError as error:
            raise _taken_port(name, host, port, str(error.strerror)) from error


def _taken_port(name: str, host: str, port: int | str, reason: str) -> EngineUnreachable:
    return EngineUnreachable(
        f"{name} cannot listen on {host}, port {port}: {reason}.",
        remedy="Stop what listens there, or correct the URLs; --machine says which host this is.",
    )


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
        self._log_begin = 0
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
                self._log_begin = log.tell()
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

    def read_log_tail(self, most_bytes: int = LOG_TAIL_BYTES) -> str:
        """Return the end of what this run wrote to the log, which may have gigabytes."""
        with suppress(OSError), self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_begin, size - most_bytes))
            return log.read().decode("utf-8", "replace").strip()
        return "its log cannot be read"

    def require_ports(self, host: str, ports: Iterable[int]) -> None:
        """Raise EngineUnreachable if the log of this run says that one of its ports is taken.

        SGLang then neither serves nor ends.
        """
        log = self.read_log_tail(SEARCHED_BYTES)
        taken = re.search(rf"\b({'|'.join(map(str, ports))})\b.*{PORT_TAKEN}", log, re.I)
        if taken is not None:
            raise _taken_port(self.name, host, taken[1], f"{PORT_TAKEN}, says {self.log}")

    def _signal_group(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._group_may_live:
            # macOS raises EPERM for a group of zombies
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
