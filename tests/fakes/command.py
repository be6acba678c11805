"""The `shell-router` command as a process, with what it starts in sight."""

import asyncio
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-c", "import sys; from shell_router.cli import main; sys.exit(main())")


class RunningCommand:
    """One run of `shell-router`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def line_with(self, words: str, *, limit_s: float) -> str:
        """The first line of its output that holds `words`; AssertionError with all lines where none does."""
        assert self._process.stdout is not None
        seen = []
        async with asyncio.timeout(limit_s):
            async for line in self._process.stdout:
                seen.append(line.decode())
                if words in seen[-1]:
                    return seen[-1]
        raise AssertionError(f"{words!r} is not in {''.join(seen)}")

    async def ended(self, *, limit_s: float) -> tuple[int, str]:
        """Its exit code and the rest of its output, errors included; AssertionError with that where it does not end."""
        reading = asyncio.create_task(self._process.communicate())
        ended, _ = await asyncio.wait([reading], timeout=limit_s)
        if not ended:
            self._kill_all()
        rest, _ = await reading
        assert ended, f"it did not end within {limit_s:g} s: {rest.decode()}"
        assert self._process.returncode is not None
        return self._process.returncode, rest.decode()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command alone, as a service manager would."""
        self._process.send_signal(number)

    def started(self) -> set[int]:
        """Ids of the processes that it has started and that run now, their own children included."""
        return descendants(self._process.pid)

    def engine(self, mode: str) -> int:
        """The process that leads the engine which it launched as `mode`, prefill or decode."""
        for pid in self.started():
            line = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
            if os.getpgid(pid) == pid and f"\0--disaggregation-mode\0{mode}\0" in line:
                return pid
        raise AssertionError(f"no {mode} engine runs")

    def kill(self) -> None:
        """End it without a farewell, if it still runs."""
        if self._process.returncode is None:
            self._process.kill()

    async def clear_away(self, *, limit_s: float = 30.0) -> None:
        """Kill it and all that it started, so that a failed test leaves nothing behind either."""
        self._kill_all()
        async with asyncio.timeout(limit_s):
            await self._process.communicate()

    def _kill_all(self) -> None:
        for pid in self.started():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.kill()


@asynccontextmanager
async def running_command(*arguments: str | Path) -> AsyncIterator[RunningCommand]:
    """Run `shell-router` with `arguments` from the repository's root; what still runs at the end is killed."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *map(str, arguments),
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    command = RunningCommand(process)
    try:
        yield command
    finally:
        await command.clear_away()


def survivors(pids: set[int], *, limit_s: float = 10.0) -> set[int]:
    """Those of `pids` that still run after `limit_s`; returns as soon as all have ended."""
    deadline_s = time.monotonic() + limit_s
    return {pid for pid in pids if not _ends(pid, max(0.0, deadline_s - time.monotonic()))}


def _ends(pid: int, limit_s: float) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], limit_s)[0])
    finally:
        os.close(descriptor)


def descendants(pid: int) -> set[int]:
    """The processes that `pid` has started and that run now, their own children included."""
    parents = {int(entry.name): _parent(int(entry.name)) for entry in Path("/proc").glob("[0-9]*")}
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def _parent(pid: int) -> int | None:
    """The process that started `pid`; None where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    except OSError:
        return None
