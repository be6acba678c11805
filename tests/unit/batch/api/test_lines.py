"""A batch's input, read and checked line by line."""

from pathlib import Path
from typing import Any

import pytest

from shell_router.batch.api.lines import (
    KEPT_FAULTS,
    READ_BYTES,
    BatchLine,
    check_input,
    read_line,
    read_lines,
)
from shell_router.batch.api.storage import Fault
from tests.fakes.api_server import ENDPOINT, jsonl, line

MOST_BYTES = 2**20


def fault_on(content: dict[str, Any]) -> Fault:
    found = read_line(7, jsonl(content), ENDPOINT)
    assert isinstance(found, Fault) and found.line == 7
    return found


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"custom_id": None}, "custom_id", "missing_required_parameter"),
        ({"custom_id": ""}, "custom_id", "missing_required_parameter"),
        ({"custom_id": 7}, "custom_id", "missing_required_parameter"),
        ({"method": "GET"}, "method", "invalid_method"),
        ({"url": "/v1/embeddings"}, "url", "invalid_url"),
        ({"body": None}, "body", "missing_required_parameter"),
        ({"body": []}, "body", "missing_required_parameter"),
        ({"body": {"stream": True}}, "body.stream", "invalid_request"),
    ],
)
def test_what_is_wrong_is_named_by_line_and_field(
    change: dict[str, Any], param: str, code: str
) -> None:
    found = fault_on({**line("a"), **change})
    assert (found.param, found.code) == (param, code)


@pytest.mark.parametrize(
    "raw", [b"not json\n", b"[]\n", b'"text"\n', b'{"custom_id": "a"', b"\xff\n"]
)
def test_a_line_that_is_no_json_object_is_named(raw: bytes) -> None:
    found = read_line(7, raw, ENDPOINT)
    assert isinstance(found, Fault) and (found.line, found.code) == (7, "invalid_json_line")


def test_a_body_is_not_looked_at_before_it_runs() -> None:
    assert isinstance(read_line(1, jsonl({**line("a"), "body": {"model": 7}}), ENDPOINT), BatchLine)


async def check(
    tmp_path: Path, content: bytes, most_bytes: int = MOST_BYTES
) -> tuple[int, list[tuple[object, str]]]:
    path = tmp_path / "input.jsonl"
    path.write_bytes(content)
    found = await check_input(path, ENDPOINT, most_bytes)
    return found[0], [(fault.line, fault.code) for fault in found[1]]


async def test_every_line_of_an_input_longer_than_one_read_is_counted(tmp_path: Path) -> None:
    lines = [line(str(number), "x" * 500) for number in range(READ_BYTES // 300)]
    assert await check(tmp_path, jsonl(*lines)) == (len(lines), [])


async def test_blank_lines_and_a_missing_last_newline_are_no_fault(tmp_path: Path) -> None:
    content = b"\n" + jsonl(line("a")) + b"  \r\n" + jsonl(line("b"))[:-1]
    assert await check(tmp_path, content) == (2, [])


@pytest.mark.parametrize("content", [b"", b"\n\n"])
async def test_an_input_without_lines_is_a_fault(tmp_path: Path, content: bytes) -> None:
    assert await check(tmp_path, content) == (0, [(None, "empty_file")])


async def test_a_custom_id_that_stands_twice_is_named_by_its_second_line(tmp_path: Path) -> None:
    content = jsonl(line("a"), line("b"), line("a"))
    assert await check(tmp_path, content) == (2, [(3, "duplicate_custom_id")])


async def test_a_line_longer_than_a_body_may_be_is_a_fault(tmp_path: Path) -> None:
    assert await check(tmp_path, jsonl(line("a", "x" * 1000)), most_bytes=1000) == (
        0,
        [(1, "line_too_long")],
    )


async def test_a_limited_number_of_faults_is_kept(tmp_path: Path) -> None:
    _, faults = await check(tmp_path, b"x\n" * 3 * KEPT_FAULTS)
    assert len(faults) == KEPT_FAULTS


async def test_lines_say_whether_they_are_answered(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(jsonl(line("a"), line("b"), line("c")))
    found = [
        (one.number, one.custom_id, one.is_answered)
        async for one in read_lines(path, ENDPOINT, {"b"})
    ]
    assert found == [(1, "a", False), (2, "b", True), (3, "c", False)]
