"""Output that leaves the process off the event loop: trace files, the access log, log lines."""

import contextlib
import logging
import os
import queue
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from logging.handlers import QueueHandler, QueueListener
from pathlib import Path
from typing import Any, Generic, TypeVar

import orjson

log = logging.getLogger(__name__)

Item = TypeVar("Item")

Lines = Callable[[], Sequence[Mapping[str, Any]]]
"""Makes the lines of one run, in the recorder's thread: counting tokens would hold up the loop."""

MOST_WAITING = 10_000


class Outbox(ABC, Generic[Item]):
    """A queue whose items a thread of its own takes away, so that no request waits.

    Items that cannot be taken are lost; the log says why when losing begins, and when it is over.

    Args:
        what: The plural noun for messages.
        done: The participle for messages and `count`, such as "written".
        count: Called with `done` or "lost", and with how many of `what` were.
        most_waiting: Items in the queue; more are lost.
        max_batch_size: Items that are taken together.
        linger_s: Seconds to wait for more items to take together.
    """

    def __init__(
        self,
        what: str,
        done: str,
        count: Callable[[str, int], None],
        *,
        most_waiting: int,
        max_batch_size: int = 1,
        linger_s: float = 0.0,
    ) -> None:
        self._what = what
        self._done_word = done
        self._count = count
        self._max_batch_size = max_batch_size
        self._linger_s = linger_s
        self._waiting: queue.Queue[Item | None] = queue.Queue(most_waiting)
        self._ending = threading.Event()
        self._losing = False
        self._thread = threading.Thread(target=self._take_until_end, name=what, daemon=True)
        self._thread.start()

    def add(self, item: Item) -> None:
        """Have `item` taken. Returns at once."""
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            self._count_lost(self._size(item), f"{self._waiting.maxsize} runs wait")

    def close(self, limit_s: float = 10.0) -> None:
        """Take what waits, and end. Blocks up to `limit_s`; what is not taken by then is lost."""
        self._ending.set()
        until_s = time.monotonic() + limit_s
        with contextlib.suppress(queue.Full):  # logged below
            self._waiting.put(None, timeout=limit_s)
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._thread.is_alive():
            log.warning(
                "%s of %d runs were not %s before the end",
                self._what,
                self._waiting.qsize(),
                self._done_word,
            )

    def _take_until_end(self) -> None:
        ended = False
        while not ended:
            items = [self._waiting.get()]
            if self._waiting.qsize() < self._max_batch_size:
                self._ending.wait(self._linger_s)
            with contextlib.suppress(queue.Empty):
                while len(items) < self._max_batch_size:
                    items.append(self._waiting.get_nowait())
            ended = None in items
            taken = [item for item in items if item is not None]
            if taken:
                self._take(taken)

    @abstractmethod
    def _take(self, items: Sequence[Item]) -> None:
        """Take the items, and call `_count_done` or `_count_lost` for each part. Must not raise."""

    def _size(self, item: Item) -> int:
        """Return how many of `what` an item is."""
        return 1

    def _count_done(self, count: int) -> None:
        if self._losing:
            log.warning("%s are %s again", self._what, self._done_word)
            self._losing = False
        self._count(self._done_word, count)

    def _count_lost(self, count: int, why: str) -> None:
        if not self._losing:
            log.error("%s are lost: %s", self._what, why)
        self._losing = True
        self._count("lost", count)


class Recorder(Outbox[Lines]):
    """JSON lines in `<folder>/<start, UTC>-<process>-<number>.jsonl`.

    Args:
        what: The name of these lines in the log.
        folder: Where the files are.
        max_file_bytes: A file that has as many is not continued.
        count: See `Outbox`.
        prompts: Whether the makers of lines are to put texts into them.
    """

    def __init__(
        self,
        what: str,
        folder: Path,
        max_file_bytes: int,
        count: Callable[[str, int], None],
        *,
        prompts: bool = False,
    ) -> None:
        self.prompts = prompts
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._stem = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.getpid()}"
        self._number = 0
        super().__init__(f"{what}: lines", "written", count, most_waiting=MOST_WAITING)

    def _take(self, items: Sequence[Lines]) -> None:
        for lines in items:
            try:
                made = b"".join(orjson.dumps(line) + b"\n" for line in lines())
            except Exception as error:  # one run's line must not end the recording of all others
                self._count_lost(1, f"a line could not be made: {type(error).__name__}: {error}")
                continue
            if made:
                self._write(made)

    def _write(self, made: bytes) -> None:
        count = made.count(b"\n")
        try:
            with open(self._file(), "ab", opener=_private) as file:
                _append_whole(file.fileno(), made)
        except OSError as error:
            self._count_lost(count, f"{self._folder}: {error.strerror}")
            return
        self._count_done(count)

    def _file(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{self._stem}-{self._number}.jsonl"
        if file.exists() and file.stat().st_size >= self._max_file_bytes:
            self._number += 1
            return self._folder / f"{self._stem}-{self._number}.jsonl"
        return file


class LogLines(QueueHandler):
    """Log lines that a thread writes to `file`, so a reader that stalls holds up no request.

    Beyond 10,000 that wait, lines are lost: `lost` is called with 1 for each, and the log says how
    many were.
    """

    def __init__(self, file: int = 2) -> None:
        self._lines: queue.Queue[logging.LogRecord] = queue.Queue(MOST_WAITING)
        super().__init__(self._lines)
        self.lost: Callable[[int], object] = int
        self._missing = 0
        QueueListener(self._lines, _LineWriter(file, self)).start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return a record whose message is the whole line; a failure to format it is a line too."""
        try:
            line: logging.LogRecord = super().prepare(record)
        except Exception as error:  # what logs goes on
            reason = f"{type(error).__name__}: {error}"
            message = f"A line of {record.name} could not be made: {reason}"
            line = logging.makeLogRecord({"msg": message})
        return line

    def enqueue(self, record: logging.LogRecord) -> None:
        """Have the line written, after a line about those that were lost. Returns at once."""
        if self._missing:
            gap = f"{self._missing} log lines are lost: those before were not read in time"
            record.msg = f"{gap}\n{record.msg}"
        try:
            super().enqueue(record)
            self._missing = 0
        except queue.Full:
            self._missing += 1
            self.lost(1)

    def flush(self) -> None:
        """Wait until all is written, a second at most; called before the process ends."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(
                lambda: not self._lines.unfinished_tasks, timeout=1.0
            )


class _LineWriter(logging.Handler):
    """Writes lines to a descriptor that may block, or refuse to."""

    def __init__(self, file: int, lines: LogLines) -> None:
        super().__init__()
        self._file = file
        self._log_lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        rest = record.msg.encode("utf-8", "backslashreplace") + b"\n"
        while rest:
            try:
                rest = rest[os.write(self._file, rest) :]
            except BlockingIOError:
                select.select((), (self._file,), ())
            except OSError:  # it is closed
                self._log_lines.lost(1)
                return


def _private(path: str, flags: int) -> int:
    """Open a file that only its owner may read: it holds questions of all tenants."""
    return os.open(path, flags, 0o600)


def _append_whole(file: int, made: bytes) -> None:
    """Append `made`; take back a part, which a full disk leaves, as a cut line is unreadable."""
    before = os.fstat(file).st_size
    written = 0
    try:
        while written < len(made):
            written += os.write(file, made[written:])
    except OSError:
        os.ftruncate(file, before)
        raise
