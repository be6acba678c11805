"""What became of a batch's lines, kept as it comes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import orjson

from shell_router.api.batch.disk import append_whole


@dataclass(frozen=True, slots=True)
class LineResult:
    """What became of one line: an answer with its HTTP status, or, for a line that never ran, an error."""

    custom_id: str
    request_id: str
    status: int | None = None
    body: Mapping[str, Any] | None = None
    error: Mapping[str, str] | None = None

    @property
    def succeeded(self) -> bool:
        """Whether it belongs to the output file; the others belong to the error file."""
        return self.status == 200

    def as_line(self) -> bytes:
        """The line that OpenAI's clients expect."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        line = {
            "id": f"batch_req_{self.request_id}",
            "custom_id": self.custom_id,
            "response": response if self.status is not None else None,
            "error": self.error,
        }
        return orjson.dumps(line) + b"\n"


class Results:
    """The two files of one batch's results. All methods block; threads may call them."""

    def __init__(self, output: Path, errors: Path) -> None:
        self._output = output
        self._errors = errors
        self._adding = Lock()
        self._completed: set[str] = set()
        self._failed: set[str] = set()

    @property
    def completed(self) -> int:
        """Lines in the output file."""
        return len(self._completed)

    @property
    def failed(self) -> int:
        """Lines in the error file."""
        return len(self._failed)

    def __contains__(self, custom_id: object) -> bool:
        return custom_id in self._completed or custom_id in self._failed

    def recover(self) -> None:
        """Learn what is there. A last line that was torn when a router was killed is cut off, to be answered anew."""
        self._completed = _recovered(self._output)
        self._failed = _recovered(self._errors)

    def add(self, results: Iterable[LineResult]) -> None:
        """Append them; each is there as a whole or not at all. Raises OSError."""
        results = tuple(results)
        with self._adding:
            _append(self._output, self._completed, [one for one in results if one.succeeded])
            _append(self._errors, self._failed, [one for one in results if not one.succeeded])


def _append(path: Path, names: set[str], results: list[LineResult]) -> None:
    if results:
        append_whole(path, b"".join(one.as_line() for one in results))
        names.update(one.custom_id for one in results)


def _recovered(path: Path) -> set[str]:
    """The names on the whole lines; what comes after the first that is not whole is cut off."""
    names: set[str] = set()
    if not path.exists():
        return names
    whole_bytes = 0
    with path.open("r+b") as file:
        for line in file:
            name = _name_on(line)
            if name is None:
                break
            names.add(name)
            whole_bytes += len(line)
        file.truncate(whole_bytes)
    return names


def _name_on(line: bytes) -> str | None:
    if not line.endswith(b"\n"):
        return None
    try:
        return str(orjson.loads(line)["custom_id"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
