"""Rows of question files (JSON lines, CSV, Parquet), also of published data sets.

A data set is recognized by a key of its rows, which become questions: MATH-500 and AIME by
`problem`, MMLU-Pro by `options`, MMLU-ProX by `option_0`, MedMCQA by `cop`, GPQA by `Correct
Answer`, IFBench by `instruction_id_list`. Other rows, GSM8K's among them, stay as they are.
"""

import csv
import random
import re
import string
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import orjson

from shell_router.early_exit.answers import parse_number
from shell_router.errors import DataError

Row = dict[str, Any]

_CHOOSE = 'End with "Answer: " and the letter.'
_BOXED = "End with the final answer in \\boxed{}."
_COP = re.compile(rb'"cop": ?"?(-?\d+)')
_GPQA = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def read_rows(file: Path, content: bytes) -> list[tuple[int, Row | str]]:
    """Return each row of a file with its number from 1; a bad row is its error's text.

    Blank lines are skipped. Raises DataError if the file is no table, or pyarrow is missing.
    """
    suffix = file.suffix.casefold()
    if suffix == ".csv":
        try:
            lines = _lines(csv.DictReader(StringIO(content.decode("utf-8-sig", "replace"))))
        except csv.Error as error:
            raise DataError(f"{file}: {error}.", remedy="Write the rows as JSON lines.") from None
    elif suffix == ".parquet":
        lines = _lines(_parquet_rows(file, content))
    else:
        lines = content.split(b"\n")
    first = partial(
        _find_first_option, frozenset(int(cop) for line in lines for cop in _COP.findall(line))
    )
    return [(number, _read(line, first)) for number, line in enumerate(lines, 1) if line.strip()]


def _lines(rows: Iterable[Row]) -> list[bytes]:
    return [
        orjson.dumps({str(key): value for key, value in row.items()}, default=str) for row in rows
    ]


def _parquet_rows(file: Path, content: bytes) -> list[Row]:
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError:
        remedy = (
            "Install it with pip install 'shell-router[data]', or write the rows as JSON lines."
        )
        raise DataError(
            f"{file}: pyarrow, which reads Parquet, is missing.", remedy=remedy
        ) from None
    try:
        rows: list[Row] = pyarrow.parquet.read_table(BytesIO(content)).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file}: {error}", remedy="Name a Parquet file, or one of JSON lines."
        ) from None
    return rows


def _read(line: bytes, first_option: Callable[[], int]) -> Row | str:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return f"this is not JSON ({error})"
    if not isinstance(row, dict):
        return "this is not a JSON object"
    try:
        return _as_question(row, first_option)
    except KeyError as error:
        return f"{error.args[0]} is missing"
    except (TypeError, ValueError) as error:
        return str(error)


def _as_question(row: Row, first_option: Callable[[], int]) -> Row:
    """Return the row as a question; keys that a data set adds stay."""
    if "instruction_id_list" in row:
        fields = {
            "question": row["prompt"],
            "answer": "all instructions",
            "grader": "instructions",
        }
        return {**row, **fields, **_copy_id(row, "key")}
    if "problem" in row:
        answer = str(row["answer"])
        fields = {"question": f"{row['problem']}\n\n{_BOXED}", "answer": answer}
        grader = "math" if parse_number(answer) is None else "numeric"
        skills = _name_skill(row.get("subject"))
        return {"grader": grader, **row, **fields, **skills, **_copy_id(row, "unique_id")}
    if "cop" in row:
        options = [row[f"op{letter}"] for letter in "abcd"]
        right = int(row["cop"]) - first_option()
        return {**row, **_build_choice(row["question"], options, right, row.get("subject_name"))}
    if "Correct Answer" in row:
        # seeded by the question, so that the order is the same in every run
        order = random.Random(row["Question"]).sample(range(len(_GPQA)), len(_GPQA))
        options = [row[_GPQA[index]] for index in order]
        fields = _build_choice(row["Question"], options, order.index(0), row.get("Subdomain"))
        return {**row, **fields, **_copy_id(row, "Record ID")}
    if "option_0" in row or ("options" in row and "answer_index" in row):
        return _read_mmlu_pro(row)
    return row


def _read_mmlu_pro(row: Row) -> Row:
    listed = row.get("options") or [row.get(f"option_{index}") for index in range(10)]
    if not isinstance(listed, list):
        raise TypeError("options must be a list: CSV has none, so write JSON lines or Parquet")
    options = [option for option in listed if option not in (None, "", "N/A")]
    letter = row.get("answer") or None
    right = -1
    if letter is not None:
        if letter not in tuple(string.ascii_uppercase):
            raise ValueError(f"the answer must be a letter, not {letter!r}")
        right = string.ascii_uppercase.index(letter)
    fields = _build_choice(row["question"], options, right, row.get("category"))
    return {**row, **fields, **_copy_id(row, "question_id")}


def _copy_id(row: Row, name: str) -> Row:
    return {"id": row[name]} if name in row else {}


def _build_choice(question: object, options: Sequence[object], right: int, skill: object) -> Row:
    """Build a question with lettered options; a `right` below 0 is an unknown answer."""
    if not isinstance(question, str) or not question.strip():
        raise TypeError(f"the question must be text that is not empty, not {question!r}")
    if right >= len(options):
        raise ValueError(f"the answer is option {right + 1} of {len(options)}")
    lines = [
        f"{letter}) {str(option).strip()}"
        for letter, option in zip(string.ascii_uppercase, options, strict=False)
    ]
    listed = "\n".join(lines)
    return {
        "question": f"{question.strip()}\n\n{listed}\n\n{_CHOOSE}",
        **_name_skill(skill),
        "answer": string.ascii_uppercase[right] if right >= 0 else None,
        "grader": "choice",
    }


def _name_skill(skill: object) -> Row:
    if isinstance(skill, str) and skill:
        return {"skills": [skill]}
    return {}


def _find_first_option(cops: frozenset[int]) -> int:
    """Return MedMCQA's number of option A: 1 in its own files, 0 in those of Hugging Face.

    In the latter -1 is no answer. Raises ValueError if the file's numbers do not show it.
    """
    if cops & {0, -1}:
        return 0
    if 4 in cops:
        return 1
    raise ValueError(
        "whether cop counts from 0 or from 1 cannot be seen; add a row with cop 0 or 4"
    )
