"""The lines of a batch: how they are read and checked, and the files of their results."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Literal

import orjson
from typing_extensions import TypedDict

from shell_router.batch.api.storage import Fault, on_disk
from shell_router.batch.journal import append_whole, recover_lines
from shell_router.core.exact_json import NewValues, Values, write_line
from shell_router.core.validation import (
    JsonObject,
    Name,
    field_error,
    parse_object,
    show,
)
from shell_router.errors import InvalidField, InvalidRequest


@dataclass(frozen=True, slots=True)
class LineResult:
    """The result of a line: an answer and its HTTP status, or the error of one that never ran."""

    custom_id: str
    request_id: str
    status: int | None = None
    body: Values | None = None
    error: Mapping[str, str] | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the result belongs to the output file; others belong to the error file."""
        return self.status == 200

    def as_line(self) -> bytes:
        """Return the line in OpenAI's form."""
        response = {"status_code": self.status, "request_id": self.request_id, "body": self.body}
        line = {
            "id": f"batch_req_{self.request_id}",
            "custom_id": self.custom_id,
            "response": None if self.status is None else response,
            "error": self.error,
        }
        return write_line(line)


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
        """Read both files. A line that was torn when a router was killed is answered again."""
        self._completed = set(recover_lines(self._output, _read_custom_id))
        self._failed = set(recover_lines(self._errors, _read_custom_id))

    def add(self, results: Iterable[LineResult]) -> None:
        """Append the results to their files, each as a whole or not at all. Raises OSError."""
        completed: list[LineResult] = []
        failed: list[LineResult] = []
        for result in results:
            (completed if result.succeeded else failed).append(result)
        with self._adding:
            _append(self._output, self._completed, completed)
            _append(self._errors, self._failed, failed)


def _read_custom_id(line: bytes) -> str:
    return str(orjson.loads(line)["custom_id"])


def _append(path: Path, custom_ids: set[str], results: list[LineResult]) -> None:
    if results:
        append_whole(path, b"".join(result.as_line() for result in results))
        custom_ids.update(result.custom_id for result in results)


READ_BYTES = 2**18
"""Bytes read at a time; parsing them blocks the event loop for under a millisecond."""
KEPT_FAULTS = 100
"""Faults kept in a batch's record; further ones are dropped."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of a batch. Line numbers count from 1."""

    number: int
    custom_id: str
    body: Values
    is_answered: bool = False


Keep = Callable[[LineResult], Awaitable[None]]


class LineFields(TypedDict):
    """A line of an input file."""

    custom_id: Name
    method: Literal["POST"]
    url: str
    body: NewValues


LINE = JsonObject(LineFields, {"custom_id": "It names the line among the results."})
CODES = {"method": "invalid_method", "url": "invalid_url", "body.stream": "invalid_request"}
"""OpenAI's codes of wrong fields; of others it is `missing_required_parameter`."""


def read_line(number: int, raw: bytes, endpoint: str) -> BatchLine | Fault:
    """Return the request on a line, or its fault. The body is checked when the line runs."""
    try:
        line = LINE.read(parse_object(raw, "line"))
        if line["url"] != endpoint:
            raise field_error("url", f"must be {endpoint}, the batch's endpoint")
        if line["body"].get("stream") is True:
            raise field_error("body.stream", "has no place in a batch", "Leave it out.")
    except InvalidField as error:
        code = CODES.get(error.field, "missing_required_parameter")
        return Fault(code, str(error), number, error.field)
    except InvalidRequest as error:
        return Fault("invalid_json_line", str(error), number)
    return BatchLine(number, line["custom_id"], line["body"])


async def check_input(path: Path, endpoint: str, max_bytes: int) -> tuple[int, tuple[Fault, ...]]:
    """Return the number of requests and the faults of an input. Raises StorageFailed."""
    seen: dict[str, int] = {}
    faults: list[Fault] = []
    async for number, raw in _raw_lines(path):
        fault = _find_fault(number, raw, endpoint, max_bytes, seen)
        if fault and len(faults) < KEPT_FAULTS:
            faults.append(fault)
    if not seen and not faults:
        faults.append(
            Fault("empty_file", "The file has no lines. Write one JSON object per request.")
        )
    return len(seen), tuple(faults)


def _find_fault(
    number: int, raw: bytes, endpoint: str, max_bytes: int, seen: dict[str, int]
) -> Fault | None:
    """Return the fault of a line; add its custom_id to those `seen` on earlier lines."""
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
        f"custom_id {show(line.custom_id)} stands on line {first} already. Give each line its own."
    )
    return Fault("duplicate_custom_id", message, number, "custom_id")


async def read_lines(
    path: Path, endpoint: str, answered: Container[str]
) -> AsyncGenerator[BatchLine, None]:
    """Yield the requests of a checked input in order; a line in `answered` is marked.

    Raises StorageFailed.
    """
    async for number, raw in _raw_lines(path):
        line = read_line(number, raw, endpoint)
        if isinstance(line, BatchLine):
            yield replace(line, is_answered=line.custom_id in answered)


async def _raw_lines(path: Path) -> AsyncGenerator[tuple[int, bytes], None]:
    """Yield the lines that are not blank, with their numbers; no file stays open meanwhile."""
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
