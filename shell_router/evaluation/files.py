"""The files that an evaluation writes beside its tables. None that cannot be written costs what was measured."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import orjson

from shell_router.errors import ConfigError
from shell_router.evaluation.options import Reports
from shell_router.evaluation.picture import draw_picture
from shell_router.evaluation.records import Record
from shell_router.evaluation.report import Report


def check_files(reports: Reports) -> None:
    """Raises ConfigError, which names the option, for a file that cannot be written. Writes nothing."""
    for option, file in (("--json", reports.json), ("--records", reports.records), ("--picture", reports.picture)):
        if file is not None and (wrong := _wrong_with(file)):
            raise ConfigError(f"{option} {file}: {wrong}.", remedy="Name a file in a folder that you may write to.")


def _wrong_with(file: Path) -> str | None:
    if file.is_dir():
        return "this is a folder"
    if not file.parent.is_dir():
        return f"there is no folder {file.parent}"
    return None if os.access(file if file.exists() else file.parent, os.W_OK) else "it may not be written"


class RecordFile:
    """Takes each record as it is made, so that an end without warning leaves those before it.

    A write that fails is the last; `trouble` then says why.
    """

    def __init__(self, opened: BinaryIO | None, name: str) -> None:
        self._opened = opened
        self._name = name
        self.trouble: list[str] = []

    def add(self, record: Record) -> None:
        """Write one line."""
        if self._opened is not None and not self.trouble:
            line = orjson.dumps(record.as_json()) + b"\n"
            self.trouble += _tried(f"--records {self._name}", self._opened.write, line)


@contextmanager
def record_file(file: Path | None) -> Iterator[RecordFile]:
    """A new file for records; where there is none, or it cannot be opened, what is added goes nowhere."""
    if file is None:
        yield RecordFile(None, "")
        return
    try:
        opened = file.open("wb", buffering=0)
    except OSError as error:
        nowhere = RecordFile(None, str(file))
        nowhere.trouble.append(f"--records {file}: {error.strerror}")
        yield nowhere
        return
    with opened:
        yield RecordFile(opened, str(file))


def write_reports(report: Report, files: Reports) -> list[str]:
    """Write what is wanted of `--json` and `--picture`; what went wrong, by option."""
    trouble: list[str] = []
    if files.json is not None:
        content = orjson.dumps(report.as_json(), option=orjson.OPT_INDENT_2) + b"\n"
        trouble += _tried(f"--json {files.json}", files.json.write_bytes, content)
    if files.picture is not None:
        trouble += _tried(f"--picture {files.picture}", files.picture.write_bytes, draw_picture(report).encode())
    return trouble


def _tried(what: str, write: Callable[[bytes], object], content: bytes) -> list[str]:
    try:
        write(content)
    except OSError as error:
        return [f"{what}: {error.strerror}"]
    return []
