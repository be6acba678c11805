"""A batch's input, line by line, and the contract of what answers them."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson

from shell_router.api.batch.disk import on_disk
from shell_router.api.batch.records import Fault
from shell_router.api.batch.results import LineResult
from shell_router.api.fields import shown

READ_BYTES = 2**18
"""Read at once: parsing so much keeps the event loop for less than a millisecond."""
KEPT_FAULTS = 100
"""More would help nobody, and each stands in the batch's record."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch: its place in the input, from 1, its name there, and its body, as an online one has it."""

    number: int
    custom_id: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CheckedInput:
    """How many requests an input has, and what is wrong with it."""

    total: int
    faults: tuple[Fault, ...]


Keep = Callable[[LineResult], Awaitable[None]]


class LineRunner(Protocol):
    """Answers lines, in whatever order and grouping suits what stands behind it."""

    async def run(self, tenant: str, lines: AsyncIterator[BatchLine], keep: Keep) -> None:
        """Return once every line's result has been kept. Cancelled, it leaves nothing running.

        What `keep` raises ends it. A line that fails has a result that says so.
        """
        ...


def read_line(number: int, raw: bytes, endpoint: str) -> BatchLine | Fault:
    """The request on a line, or why there is none. Its body is looked at when it runs."""
    try:
        line = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return Fault("invalid_json_line", f"The line is not JSON: {error}. Write one JSON object.", number)
    if not isinstance(line, dict):
        return Fault("invalid_json_line", f"The line must be a JSON object, not {shown(line)}.", number)
    for param, is_right, code, message in _RULES:
        if not is_right(line, endpoint):
            return Fault(code, message.format(endpoint=endpoint), number, param)
    return BatchLine(number, line["custom_id"], line["body"])


_RULES: tuple[tuple[str, Callable[[dict[str, Any], str], bool], str, str], ...] = (
    (
        "custom_id",
        lambda line, _: isinstance(line.get("custom_id"), str) and line["custom_id"] != "",
        "missing_required_parameter",
        "custom_id must be a string that is not empty: it names the line among the results.",
    ),
    (
        "method",
        lambda line, _: line.get("method") == "POST",
        "invalid_method",
        "method must be POST.",
    ),
    (
        "url",
        lambda line, endpoint: line.get("url") == endpoint,
        "invalid_url",
        "url must be {endpoint}, the batch's endpoint.",
    ),
    (
        "body",
        lambda line, _: isinstance(line.get("body"), dict),
        "missing_required_parameter",
        "body must be an object: the request itself.",
    ),
    (
        "body.stream",
        lambda line, _: line["body"].get("stream") is not True,
        "invalid_request",
        "body.stream has no place in a batch. Leave it out.",
    ),
)
"""Per field: whether it is right, and the code and the message where it is not; the first that fails is told."""


async def checked(path: Path, endpoint: str, most_bytes: int) -> CheckedInput:
    """Look at every line, none of which may be longer than `most_bytes`. Raises StorageFailed."""
    seen: dict[str, int] = {}
    faults: list[Fault] = []
    async for number, raw in _raw_lines(path):
        fault = _fault_of(number, raw, endpoint, most_bytes, seen)
        if fault and len(faults) < KEPT_FAULTS:
            faults.append(fault)
    if not seen and not faults:
        faults.append(Fault("empty_file", "The file has no lines. Write one JSON object per request."))
    return CheckedInput(len(seen), tuple(faults))


def _fault_of(number: int, raw: bytes, endpoint: str, most_bytes: int, seen: dict[str, int]) -> Fault | None:
    """What is wrong with the line beside those already `seen`, to which it is added."""
    if len(raw) > most_bytes:
        return Fault("line_too_long", f"The line has {len(raw)} bytes; max_body_bytes is {most_bytes}.", number)
    line = read_line(number, raw, endpoint)
    if isinstance(line, Fault):
        return line
    first = seen.setdefault(line.custom_id, number)
    if first == number:
        return None
    message = f"custom_id {shown(line.custom_id)} stands on line {first} already. Give each line its own."
    return Fault("duplicate_custom_id", message, number, "custom_id")


async def lines_left(path: Path, endpoint: str, answered: Container[str]) -> AsyncGenerator[BatchLine, None]:
    """The requests of a checked input that are not yet `answered`, in their order. Raises StorageFailed."""
    async for number, raw in _raw_lines(path):
        line = read_line(number, raw, endpoint)
        if isinstance(line, BatchLine) and line.custom_id not in answered:
            yield line


async def _raw_lines(path: Path) -> AsyncGenerator[tuple[int, bytes], None]:
    """Lines with their numbers; blank ones are left out. No file stays open while others run."""
    at_byte, number = 0, 0
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
