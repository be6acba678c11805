"""Questions from a file, and what is said of a wrong one."""

from pathlib import Path

import pytest

from shell_router.errors import DataError
from shell_router.lab.evaluation.records import read_items

GOOD = '{"question": "2 + 2?", "answer": "4", "steps": 1}'


def _written(folder: Path, *lines: str) -> Path:
    file = folder / "data.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_a_line_is_a_question_with_its_answer_grader_and_facts(tmp_path: Path) -> None:
    [item] = read_items(_written(tmp_path, GOOD))
    assert (item.index, item.question, item.answer, item.grader, item.facts) == (
        0,
        "2 + 2?",
        "4",
        "numeric",
        {"question": "2 + 2?", "answer": "4", "steps": 1},
    )


def test_metadata_are_the_labels_that_are_sent_along(tmp_path: Path) -> None:
    [item] = read_items(
        _written(tmp_path, '{"question": "2?", "answer": "2", "metadata": {"kind": "sum"}}')
    )
    assert item.labels == item.facts["metadata"] == {"kind": "sum"}


def test_offset_and_limit_choose_and_the_index_stays_that_of_the_file(tmp_path: Path) -> None:
    file = _written(
        tmp_path, *(f'{{"question": "{number}?", "answer": "{number}"}}' for number in range(6))
    )
    assert [(item.index, item.question) for item in read_items(file, offset=2, limit=3)] == [
        (2, "2?"),
        (3, "3?"),
        (4, "4?"),
    ]


def test_blank_lines_are_no_questions(tmp_path: Path) -> None:
    assert [item.index for item in read_items(_written(tmp_path, GOOD, "", " ", GOOD))] == [0, 1]


def test_a_lines_own_grader_holds_unless_one_is_asked_for(tmp_path: Path) -> None:
    file = _written(tmp_path, '{"question": "Which year?", "answer": "1984", "grader": "exact"}')
    assert read_items(file)[0].grader == "exact"
    assert read_items(file, grader="numeric")[0].grader == "numeric"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": ', "not JSON"),
        ('["question"]', "not a JSON object"),
        ('{"answer": "4"}', "question must be text that is not empty, not None"),
        ('{"question": "2 + 2?"}', "answer must be text that is not empty, not None"),
        (
            '{"question": "2 + 2?", "answer": true}',
            "answer must be text that is not empty, not True",
        ),
        ('{"question": " ", "answer": "4"}', "question must be text that is not empty"),
        (
            '{"question": "2 + 2?", "answer": "4", "grader": "kind"}',
            "no grader 'kind'. Known: exact, numeric, choice",
        ),
        (
            '{"question": "2?", "answer": "2", "metadata": {"k": 1}}',
            "metadata, which is sent as a request's labels",
        ),
        ('{"question": "2?", "answer": "2", "metadata": "k"}', "is not an object of texts"),
        (
            '{"question": "Who?", "answer": "Tom", "grader": "numeric"}',
            "the grader numeric cannot compare the answer",
        ),
    ],
)
def test_a_wrong_line_is_named_with_what_to_do(tmp_path: Path, line: str, said: str) -> None:
    file = _written(tmp_path, GOOD, line)
    with pytest.raises(DataError) as refused:
        read_items(file)
    assert str(refused.value).startswith(f"{file}:2: ")
    assert said in str(refused.value)
    assert refused.value.remedy


def test_a_file_that_is_not_there_or_has_nothing_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_items(tmp_path / "nothing.jsonl")
    with pytest.raises(DataError, match="has 1 questions, none of them from 1 on"):
        read_items(_written(tmp_path, GOOD), offset=1)
