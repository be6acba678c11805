from pathlib import Path

import orjson
import pytest

from shell_router.batch.questions import Questions, Refused, read_questions
from shell_router.errors import DataError

EXPERTS = ("small", "large")


def read(folder: Path, *lines: object) -> Questions:
    file = folder / "questions.jsonl"
    file.write_bytes(
        b"\n".join(line if isinstance(line, bytes) else orjson.dumps(line) for line in lines)
    )
    return read_questions(file, EXPERTS)


def test_a_line_is_a_question_with_what_it_says_of_itself(tmp_path: Path) -> None:
    line = {
        "question": "How many?",
        "id": "q-1",
        "answer": 3,
        "proposers": ["large"],
        "skills": ["algebra"],
    }
    (one,) = read(tmp_path, line).asked
    assert (one.id, one.text, one.answer, one.proposers, one.skills, one.line) == (
        *("q-1", "How many?", "3", ("large",), frozenset({"algebra"})),
        1,
    )
    assert (one.grade("Answer: 3"), one.grade("Answer: 4"), one.grade("")) == (True, False, False)


def test_what_a_line_does_not_say_is_open_and_its_id_is_its_number(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("id", "answer", "proposers", "skills"))
    found = read(
        tmp_path,
        b"",
        {"question": "One?"},
        b"  ",
        {"question": "Two?", **nothing},
        {"question": "?", "id": 7},
    )
    assert [
        (one.id, one.proposers, one.skills, one.answer, one.grade("3")) for one in found.asked
    ] == [
        ("2", (), frozenset(), None, None),
        ("4", (), frozenset(), None, None),
        ("7", (), frozenset(), None, None),
    ]
    assert not found.refused


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b'{"question": ', "this is not JSON ("),
        ({}, "question must be text that is not empty, not None."),
        ({"question": "?", "id": True}, "id must be text or a whole number, not True."),
        ({"question": "?", "id": "first"}, "line 1 has the id 'first' already."),
        (
            {"question": "?", "id": "x", "proposers": ["tiny"]},
            "there is no proposer 'tiny'; there are small, large.",
        ),
        (
            {"question": "?", "id": "x", "proposers": ["small", "large", "small"]},
            "proposers names a model twice.",
        ),
        (
            {"question": "?", "id": "x", "proposers": "small"},
            "proposers must be a list of texts, not 'small'.",
        ),
        ({"question": "?", "id": "x", "skills": [1]}, "skills must be a list of texts, not [1]."),
        (
            {"question": "?", "id": "x", "answer": [3]},
            "answer must be text that is not empty, not [3].",
        ),
        (
            {"question": "?", "id": "x", "answer": "**"},
            "the answer '**' cannot be compared with another.",
        ),
    ],
)
def test_a_bad_line_is_reported_by_name_and_the_others_are_asked(
    tmp_path: Path, line: object, error: str
) -> None:
    found = read(tmp_path, {"question": "One?", "id": "first"}, line, {"question": "Three?"})
    assert [one.line for one in found.asked] == [1, 3]
    (refused,) = found.refused
    assert refused.line == 2
    assert refused.error.startswith(error)


@pytest.mark.parametrize(
    ("line", "named"),
    [({"id": "x"}, "x"), ({}, "2"), ({"id": ""}, None), ({"id": "first"}, None), (b"{", None)],
)
def test_a_bad_line_is_reported_with_its_id_if_it_has_a_good_one(
    tmp_path: Path, line: object, named: str | None
) -> None:
    assert read(tmp_path, {"question": "One?", "id": "first"}, line).refused[0].id == named


def test_a_refused_line_takes_no_id(tmp_path: Path) -> None:
    found = read(tmp_path, {"question": "", "id": "a"}, {"question": "Two?", "id": "a"})
    assert [one.line for one in found.asked] == [2]


def test_a_number_that_is_named_before_is_not_taken_again_by_default(tmp_path: Path) -> None:
    found = read(tmp_path, {"question": "One?", "id": 2}, {"question": "Two?"})
    assert found.refused == (Refused(2, None, "line 1 has the id '2' already."),)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", r"questions.jsonl is empty\. Write one object per line"),
        (b"\n{\n", r"questions.jsonl:2: this is not JSON"),
    ],
)
def test_a_file_without_a_question_is_refused(tmp_path: Path, content: bytes, error: str) -> None:
    with pytest.raises(DataError, match=error):
        read(tmp_path, content)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"absent\.jsonl: No such file or directory\. Name a JSONL file"
    ):
        read_questions(tmp_path / "absent.jsonl", EXPERTS)


@pytest.mark.parametrize(
    ("number", "asked", "refused"),
    [(1, [1], [2]), (2, [1, 3], [2, 4]), (3, [1, 3, 5], [2, 4, 6]), (9, [1, 3, 5], [2, 4, 6])],
)
def test_the_first_questions_stand_with_the_bad_lines_between_them(
    tmp_path: Path, number: int, asked: list[int], refused: list[int]
) -> None:
    found = read(
        tmp_path, {"question": "1"}, b"{", {"question": "3"}, b"{", {"question": "5"}, b"{"
    ).first(number)
    assert [one.line for one in found.asked] == asked
    assert [one.line for one in found.refused] == refused


def test_questions_are_distinguished_by_their_fingerprint(tmp_path: Path) -> None:
    two = read(tmp_path, {"question": "1"}, {"question": "2"})
    assert read(tmp_path, {"question": "1"}, {"question": "3"}).fingerprint != two.fingerprint
    assert two.first(1).fingerprint != two.fingerprint
    assert two.first(2).fingerprint == two.first(5).fingerprint == two.fingerprint
