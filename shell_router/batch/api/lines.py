"""A batch's lines: read and checked, the contract of what answers them, and their results as they
come.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import orjson

from shell_router.api.fields import shown
from shell_router.batch.api.storage import Fault, on_disk
from shell_router.batch.journal import append_whole, recovered


@dataclass(frozen=True, slots=True)
class LineResult:
    """What became of one line: an answer with its HTTP status, or, for a line that never ran, an
    error.
    """

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
        """Read what is there. A last line that was torn when a router was killed is cut off, to be
        answered again.
        """
        self._completed, self._failed = (
            set(recovered(path, lambda line: str(orjson.loads(line)["custom_id"])))
            for path in (self._output, self._errors)
        )

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


READ_BYTES = 2**18
"""Read at once: parsing so much keeps the event loop for less than a millisecond."""
KEPT_FAULTS = 100
"""Each is kept in the batch's record."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch: its line number from 1, its name there, and its body, as of an online
    request.
    """

    number: int
    custom_id: str
    body: Mapping[str, Any]
    is_answered: bool = False


Keep = Callable[[LineResult], Awaitable[None]]


def read_line(number: int, raw: bytes, endpoint: str) -> BatchLine | Fault:
    """The request on a line, or why there is none. Its body is looked at when it runs."""
    try:
        line = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return Fault(
            "invalid_json_line", f"The line is not JSON: {error}. Write one JSON object.", number
        )
    if not isinstance(line, dict):
        return Fault(
            "invalid_json_line", f"The line must be a JSON object, not {shown(line)}.", number
        )
    custom_id = line.get("custom_id")
    body = line.get("body")
    missing = "missing_required_parameter"
    named = "custom_id must be a string that is not empty: it names the line among the results."
    for param, holds, code, message in (
        ("custom_id", isinstance(custom_id, str) and custom_id != "", missing, named),
        ("method", line.get("method") == "POST", "invalid_method", "method must be POST."),
        (
            "url",
            line.get("url") == endpoint,
            "invalid_url",
            f"url must be {endpoint}, the batch's endpoint.",
        ),
        ("body", isinstance(body, dict), missing, "body must be an object: the request itself."),
        (
            "body.stream",
            not (isinstance(body, dict) and body.get("stream") is True),
            "invalid_request",
            "body.stream has no place in a batch. Leave it out.",
        ),
    ):
        if not holds:
            return Fault(code, message, number, param)
    return BatchLine(number, line["custom_id"], line["body"])


async def checked(path: Path, endpoint: str, max_bytes: int) -> tuple[int, tuple[Fault, ...]]:
    """The number of requests and the faults of an input with lines of at most `max_bytes`. Raises
    StorageFailed.
    """
    seen: dict[str, int] = {}
    faults: list[Fault] = []
    async for number, raw in _raw_lines(path):
        fault = _fault_of(number, raw, endpoint, max_bytes, seen)
        if fault and len(faults) < KEPT_FAULTS:
            faults.append(fault)
    if not seen and not faults:
        faults.append(
            Fault("empty_file", "The file has no lines. Write one JSON object per request.")
        )
    return len(seen), tuple(faults)


def _fault_of(
    number: int, raw: bytes, endpoint: str, max_bytes: int, seen: dict[str, int]
) -> Fault | None:
    """What is wrong with the line after those `seen`, to which it is added."""
    if len(raw) > max_bytes:
        return Fault(
            "line_too_long",
            f"The line has {len(raw)} bytes; max_body_bytes is {max_bytes}.",
            number,
        )
    line = read_line(number, raw, endpoint)
    if isinstance(line, Fault):
        return line
    first = seen.setdefault(line.custom_id, number)
    if first == number:
        return None
    message = (
        f"custom_id {shown(line.custom_id)} stands on line {first} already. Give each line its own."
    )
    return Fault("duplicate_custom_id", message, number, "custom_id")


async def lines_of(
    path: Path, endpoint: str, answered: Container[str]
) -> AsyncGenerator[BatchLine, None]:
    """The requests of a checked input, in their order, and which are `answered` by then. Raises
    StorageFailed.
    """
    async for number, raw in _raw_lines(path):
        line = read_line(number, raw, endpoint)
        if isinstance(line, BatchLine):
            yield replace(line, is_answered=line.custom_id in answered)


async def _raw_lines(path: Path) -> AsyncGenerator[tuple[int, bytes], None]:
    """Lines with their numbers; blank ones are left out. No file stays open while others run."""
    at_byte = 0
    number = 0
    while lines := await on_disk(_read_from, path, at_byte):
        for raw in lines:
            at_byte += len(raw)
            number += 1
            if not raw.isspace():
                yield number, raw


def _read_from(path: Path, at_byte: int) -> list[bytes]:
    with path.open("rb") as file:
        file.seek(at_byte)
        return file.readlines(READ_BYTES)
