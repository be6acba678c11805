"""The processes under test: each on its core, ended by its id, its CPU time read from /proc."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STOP_S = 10.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cores:
    """Which core each part runs on. On two cores engine and client share one and the router has the other."""

    router: int
    engine: int
    client: int

    def __str__(self) -> str:
        if self.router == self.client:
            return "one core for everything, so the figures say little"
        if self.engine == self.client:
            return "router alone on one core, scripted engine and load client together on the other"
        return "router, scripted engine and load client on one core each"


def spread() -> Cores:
    """Cores as far as this process may use them."""
    cores = sorted(os.sched_getaffinity(0))
    return Cores(router=cores[0], engine=cores[min(1, len(cores) - 1)], client=cores[min(2, len(cores) - 1)])


@dataclass(frozen=True, slots=True)
class Process:
    """A process started here. What it prints is in `log`."""

    child: subprocess.Popen[bytes]
    log: Path

    def cpu_s(self) -> float:
        """CPU seconds it has used, in the kernel's ticks."""
        fields = Path(f"/proc/{self.child.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S

    def require_running(self) -> None:
        """RuntimeError with its last words if it has ended."""
        if self.child.poll() is not None:
            raise RuntimeError(f"{self.log.stem} ended: {self.log.read_text(errors='replace')[-2000:]}")


@contextmanager
def running(name: str, command: Sequence[str], core: int | None, folder: Path) -> Iterator[Process]:
    """`command` on `core`, or on any, while the context is open; its output goes to a file in `folder`."""
    log = folder / f"{name}.log"
    cores = os.sched_getaffinity(0) if core is None else {core}
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2],
            preexec_fn=lambda: os.sched_setaffinity(0, cores),  # noqa: PLW1509 - no threads run here yet
        )
    try:
        yield Process(child, log)
    finally:
        _stop(child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
