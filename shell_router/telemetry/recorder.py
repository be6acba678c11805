"""Trace files: one JSON object per line, written by a thread of its own, so that neither loop nor request waits."""

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

log = logging.getLogger(__name__)

Lines = Callable[[], Sequence[Mapping[str, Any]]]
"""Makes the lines of one run. Called in the recorder's thread: counting tokens takes longer than the loop has."""

MOST_WAITING = 10_000


@dataclass(frozen=True, slots=True)
class RecordTo:
    """Where lines go: into files of about `max_file_bytes` in `folder`. `prompts` says whether texts do, too."""

    folder: Path
    prompts: bool = False
    max_file_bytes: int = 64 * 2**20


class Recorder:
    """Writes lines to `<folder>/<start, UTC>-<process>-<number>.jsonl`.

    What cannot be written is lost, and no request with it: `count` is called with how many lines were "written" or
    "lost", and the log says why when losing begins, and that it is over.
    """

    def __init__(self, to: RecordTo, count: Callable[[Literal["written", "lost"], int], None]) -> None:
        self.prompts = to.prompts
        self._to = to
        self._count = count
        self._waiting: queue.Queue[Lines | None] = queue.Queue(MOST_WAITING)
        self._stem = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
        self._number = 0
        self._losing = False
        self._thread = threading.Thread(target=self._write_until_end, name="recorder", daemon=True)
        self._thread.start()

    def add(self, lines: Lines) -> None:
        """Have `lines` written. Returns at once."""
        try:
            self._waiting.put_nowait(lines)
        except queue.Full:
            self._lost(1, f"{MOST_WAITING} runs wait to be written")

    def close(self, limit_s: float = 10.0) -> None:
        """Write what waits, and end; what is not written by the limit is lost. To be called off the event loop."""
        with contextlib.suppress(queue.Full):  # logged below
            self._waiting.put(None, timeout=limit_s)
        self._thread.join(limit_s)
        if self._thread.is_alive():
            log.warning("trace files: %d runs were not written before the end", self._waiting.qsize())

    def _write_until_end(self) -> None:
        while (lines := self._waiting.get()) is not None:
            try:
                made = b"".join(orjson.dumps(line) + b"\n" for line in lines())
            except Exception as error:  # one run's line must not end the recording of all others
                self._lost(1, f"a line could not be made: {type(error).__name__}: {error}")
                continue
            if made:
                self._write(made)

    def _write(self, made: bytes) -> None:
        count = made.count(b"\n")
        try:
            with open(self._file(), "ab", opener=_private) as file:
                _whole_or_nothing(file.fileno(), made)
        except OSError as error:
            self._lost(count, f"{self._to.folder}: {error.strerror}")
            return
        if self._losing:
            log.warning("trace files: lines are written again")
            self._losing = False
        self._count("written", count)

    def _file(self) -> Path:
        self._to.folder.mkdir(parents=True, exist_ok=True)
        file = self._to.folder / f"{self._stem}-{self._number}.jsonl"
        if file.exists() and file.stat().st_size >= self._to.max_file_bytes:
            self._number += 1
            return self._to.folder / f"{self._stem}-{self._number}.jsonl"
        return file

    def _lost(self, count: int, why: str) -> None:
        if not self._losing:
            log.error("trace files: lines are lost: %s", why)
        self._losing = True
        self._count("lost", count)


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner may read: it holds questions of all tenants."""
    return os.open(path, flags, 0o600)


def _whole_or_nothing(file: int, made: bytes) -> None:
    """A full disk takes a part: a line that was cut would make the file unreadable."""
    before = os.fstat(file).st_size
    written = 0
    try:
        while written < len(made):
            written += os.write(file, made[written:])
    except OSError:
        os.ftruncate(file, before)
        raise
