"""A Ray cluster of one node, this machine, with what runs on it in sight."""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from tests.fakes.command import ROOT, descendants, survivors

START_LIMIT_S = 90.0
STARTED = b"Ray runtime started"


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster that runs. `address` is for drivers on this machine, `client_address` for those of any other."""

    address: str
    client_address: str
    head: subprocess.Popen[bytes]

    def engines(self) -> set[int]:
        """The processes of all embedded engines that run on it."""
        return self._with("shell_router.engines.embedded.spawner")

    def workers(self) -> set[int]:
        """The processes of all of a pool's workers on it."""
        return self._with("ray::NodeWorker")

    def _with(self, words: str) -> set[int]:
        return {pid for pid in descendants(self.head.pid) if words in _command_line(pid)}


@contextmanager
def running_cluster() -> Iterator[RunningCluster]:
    """A cluster while the context is open; AssertionError with what it says where it does not start."""
    folder = tempfile.mkdtemp(prefix="ray-")  # short: the names of sockets in it have a limit
    port, client_port = _free_ports(2)
    head = subprocess.Popen(
        [
            *(str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--disable-usage-stats"),
            *("--port", str(port), "--ray-client-server-port", str(client_port), "--include-dashboard", "false"),
            *("--num-cpus", "4", "--num-gpus", "0", "--object-store-memory", "80000000", "--temp-dir", folder),
        ],
        cwd=ROOT,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},  # else a token of this user's would be asked for
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
