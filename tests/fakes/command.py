"""The `shell-router` command as a process, with what it starts in sight."""

import asyncio
import os
import signal
import sys
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
        """Its exit code and the rest of its output, errors included."""
        async with asyncio.timeout(limit_s):
            rest, _ = await self._process.communicate()
        assert self._process.returncode is not None
        return self._process.returncode, rest.decode()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the command alone, as a service manager would."""
        self._process.send_signal(number)

    def started(self) -> set[int]:
        """Ids of the processes that it has started and that run now, their own children included."""
        return _descendants(self._process.pid)

    def kill(self) -> None:
        """End it without a farewell, if it still runs."""
        if self._process.returncode is None:
            self._process.kill()


@asynccontextmanager
async def running_command(*arguments: str | Path) -> AsyncIterator[RunningCommand]:
    """Run `shell-router` with `arguments` from the repository's root; it is killed if it still runs at the end."""
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
        command.kill()
        await process.communicate()


def alive(pids: set[int]) -> set[int]:
    """Those of `pids` that still run; a zombie does not."""
    return {pid for pid in pids if (stat := _stat(pid)) is not None and stat[0] != "Z"}


def _descendants(pid: int) -> set[int]:
    parents = {int(entry.name): stat[1] for entry in Path("/proc").glob("[0-9]*") if (stat := _stat(int(entry.name)))}
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def _stat(pid: int) -> tuple[str, int] | None:
    """State and parent of a process; None where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1])
