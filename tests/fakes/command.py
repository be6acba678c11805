"""The `shell-router` command and a Ray cluster as processes, with what they start in sight."""

import asyncio
import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-c", "import sys; from shell_router.cli import main; sys.exit(main())")


class RunningCommand:
    """A run of `shell-router`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def line_with(self, words: str, *, limit_s: float) -> str:
        """The first line of its output that holds `words`; AssertionError with all lines where none
        does.
        """
        assert self._process.stdout is not None
        seen = []
        async with asyncio.timeout(limit_s):
            async for line in self._process.stdout:
                seen.append(line.decode())
                if words in seen[-1]:
                    return seen[-1]
        raise AssertionError(f"{words!r} is not in {''.join(seen)}")

    async def ended(self, *, limit_s: float) -> tuple[int, str]:
        """Its exit code and the rest of its output, errors included; AssertionError with that where
        it does not end.
        """
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
        """Ids of the processes that it has started and that run now, their own children
        included."""
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
async def running_command(
    *arguments: str | Path,
    command: Sequence[str] = COMMAND,
    cwd: Path = ROOT,
    env: Mapping[str, str] = os.environ,
) -> AsyncIterator[RunningCommand]:
    """Run `shell-router` with `arguments`; what still runs at the end is killed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        *map(str, arguments),
        cwd=cwd,
        env={**env, "PYTHONUNBUFFERED": "1"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    running = RunningCommand(process)
    try:
        yield running
    finally:
        await running.clear_away()


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
        return int(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
        )
    except OSError:
        return None


START_LIMIT_S = 90.0
STARTED = b"Ray runtime started"


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A running cluster.

    `address` is for drivers on this machine, `client_address` for drivers on other machines.
    """

    address: str
    client_address: str
    head: subprocess.Popen[bytes]

    def engines(self) -> set[int]:
        """The processes of all embedded engines that run on it."""
        return self._with("shell_router.standins.embedded.preload")

    def workers(self) -> set[int]:
        """The processes of all of a pool's workers on it."""
        return self._with("ray::NodeWorker")

    def _with(self, words: str) -> set[int]:
        return {pid for pid in descendants(self.head.pid) if words in _command_line(pid)}


@contextmanager
def running_cluster() -> Iterator[RunningCluster]:
    """A cluster while the context is open; AssertionError with what it says where it does not
    start.
    """
    folder = tempfile.mkdtemp(prefix="ray-")  # short: the names of sockets in it have a limit
    port, client_port = _free_ports(2)
    head = subprocess.Popen(
        [
            *(
                str(Path(sys.executable).parent / "ray"),
                "start",
                "--head",
                "--block",
                "--disable-usage-stats",
            ),
            *(
                "--port",
                str(port),
                "--ray-client-server-port",
                str(client_port),
                "--include-dashboard",
                "false",
            ),
            *(
                "--num-cpus",
                "4",
                "--num-gpus",
                "0",
                "--object-store-memory",
                "80000000",
                "--temp-dir",
                folder,
            ),
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
        },  # else a token of this user's would be asked for
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        _await_start(head)
        yield RunningCluster(f"127.0.0.1:{port}", f"ray://127.0.0.1:{client_port}", head)
    finally:
        _stop(head)
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _await_start(head: subprocess.Popen[bytes]) -> None:
    assert head.stdout is not None
    deadline_s, said = monotonic() + START_LIMIT_S, b""
    while STARTED not in said:
        ready, _, _ = select.select([head.stdout], [], [], max(0.0, deadline_s - monotonic()))
        chunk = os.read(head.stdout.fileno(), 65536) if ready else b""
        assert chunk, said.decode()
        said += chunk


def _stop(head: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL to whatever it started."""
    started = descendants(head.pid)
    head.terminate()
    for pid in survivors(started):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    head.kill()
    head.communicate(timeout=START_LIMIT_S)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    except OSError:  # it has ended
        return ""
