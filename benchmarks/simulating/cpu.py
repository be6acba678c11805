"""Who uses the machine's cores: the engines, the servers and the router beside them, and others. Reads /proc."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat: user, nice, system, interrupts of two kinds, and what the host took away."""


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds. A process's main thread is its event loop, the others compute; `others` do not belong to us."""

    elapsed_s: float
    loops_s: float
    others_s: float

    @classmethod
    def now(cls) -> "Usage":
        """Since the machine's start."""
        busy_s = _machine_s()
        threads = {(pid, thread): _used_s(path) for pid in _own_processes() for thread, path in _threads(pid)}
        loops_s = sum(used_s for (pid, thread), used_s in threads.items() if pid == thread)
        return cls(time.monotonic(), loops_s, busy_s - sum(threads.values()))

    def __sub__(self, earlier: "Usage") -> "Usage":
        return Usage(
            self.elapsed_s - earlier.elapsed_s, self.loops_s - earlier.loops_s, self.others_s - earlier.others_s
        )

    @property
    def cores_left(self) -> float:
        """Cores that others left us, in the mean."""
        return (os.cpu_count() or 1) - max(0.0, self.others_s) / self.elapsed_s


def _machine_s() -> float:
    columns = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    return sum(int(columns[at]) for at in BUSY) * TICK_S


def _threads(pid: int) -> Iterator[tuple[int, Path]]:
    for entry in Path(f"/proc/{pid}/task").iterdir():
        yield int(entry.name), entry


def _used_s(thread: Path) -> float:
    fields = _fields(thread)
    return (int(fields[11]) + int(fields[12])) * TICK_S


def _own_processes() -> Iterator[int]:
    """This process and all that it started; none of them ends while the benchmark measures."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int(_fields(entry)[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    frontier = {os.getpid()}
    while frontier:
        yield from frontier
        frontier = {pid for pid, parent in parents.items() if parent in frontier}


def _fields(place: Path) -> list[str]:
    """What follows the name in the line of a process or thread."""
    return (place / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
