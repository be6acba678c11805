"""Rows of published data sets, in the form they are published, as questions."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shell_router.batch.questions import read_questions
from shell_router.errors import DataError
from shell_router.lab.evaluation.grading import follows_instructions, grade
from shell_router.lab.evaluation.records import Item, read_items

MATH = {
    "problem": "Convert the point $(0,3)$ to polar coordinates.",
    "solution": "…",
    "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
    "subject": "Precalculus",
    "level": 2,
    "unique_id": "test/precalculus/807.json",
}
AIME = {"problem": "Find the sum of all integer bases.", "answer": "70", "id": "0"}
MMLU_PRO = {
    "question_id": 70,
    "question": "Which one is a colour?",
    "options": ["one", "red", "N/A"],
    "answer": "B",
    "answer_index": 1,
    "cot_content": "",
    "category": "business",
    "src": "made up",
}
MMLU_PROX = {
    "question_id": 3,
    "question": "Was ist eine Farbe?",
    **{
        f"option_{at}": text
        for at, text in enumerate(["eins", "rot", "drei", None, None, None, None, None, None, None])
    },
    "answer": "B",
    "answer_index": 1,
    "category": "biology",
}
MEDMCQA = {
    "question": "Which one is a bone?",
    **dict(zip(("opa", "opb", "opc", "opd"), ("liver", "femur", "skin", "eye"), strict=True)),
    "choice_type": "single",
    "exp": None,
    "id": "e9ad",
    "subject_name": "Anatomy",
    "topic_name": None,
}
GPQA = {
    "Question": "Which one is a planet?",
    "Correct Answer": "Mars\n",
    "Incorrect Answer 1": "Sun",
    "Incorrect Answer 2": "Moon",
    "Incorrect Answer 3": "Sirius",
    "Record ID": "rec1",
    "Subdomain": "Astrophysics",
}
IFBENCH = {
    "key": "0",
    "prompt": "Say nebula twice.",
    "instruction_id_list": ["count:word"],
    "kwargs": [{"word": "nebula", "times": 2, "N": None}],
}


def written(folder: Path, rows: Sequence[Mapping[str, Any]], suffix: str = "jsonl") -> Path:
    file = folder / f"data.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), file)
    elif suffix == "csv":
        with file.open("w", newline="", encoding="utf-8") as opened:
            table = csv.DictWriter(opened, rows[0].keys())
            table.writeheader()
            table.writerows(rows)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def only(folder: Path, row: Mapping[str, Any], suffix: str = "jsonl") -> Item:
    [item] = read_items(written(folder, [row], suffix))
    return item


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_formula_is_right_however_it_is_written(tmp_path: Path, suffix: str) -> None:
    item = only(tmp_path, MATH, suffix)
    assert item.question == f"{MATH['problem']}\n\nEnd with the final answer in \\boxed{{}}."
    assert item.grader == "math"
    assert grade(item, "So it is $\\boxed{(3, \\pi / 2)}$.")[0]
    assert grade(item, "So it is $\\boxed{(3, \\pi)}$.") == (False, "(3, \\pi)")
    assert grade(item, "I do not know.") == (False, None)


def test_aime_asks_for_a_number(tmp_path: Path) -> None:
    item = only(tmp_path, AIME)
    assert (item.grader, grade(item, "Hence \\boxed{070}."), grade(item, "\\boxed{71}")) == (
        "numeric",
        (True, "70"),
        (False, "71"),
    )


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize("row", [MMLU_PRO, MMLU_PROX], ids=["MMLU-Pro", "MMLU-ProX"])
def test_options_are_lettered_and_absent_ones_left_out(
    tmp_path: Path, row: Mapping[str, Any], suffix: str
) -> None:
    item = only(tmp_path, row, suffix)
    options = [text for text in row.get("options", ["eins", "rot", "drei"]) if text != "N/A"]
    listed = "\n".join(f"{letter}) {text}" for letter, text in zip("ABC", options, strict=False))
    assert item.question == f'{row["question"]}\n\n{listed}\n\nEnd with "Answer: " and the letter.'
    assert (item.answer, item.grader, grade(item, "Answer: B")) == ("B", "choice", (True, "B"))


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
@pytest.mark.parametrize(
    ("cops", "letters"), [((0, 1), "AB"), ((0, 3), "AD"), ((1, 4), "AD"), ((-1, 2), "-C")]
)
def test_medmcqa_counts_from_0_or_from_1_as_the_whole_file_shows(
    tmp_path: Path, cops: Sequence[int], letters: str, suffix: str
) -> None:
    rows = [MEDMCQA | {"cop": cop, "id": str(cop)} for cop in cops]
    found = read_questions(written(tmp_path, rows), ())
    assert [one.answer or "-" for one in found.asked] == list(letters)
    assert found.asked[0].skills == {"Anatomy"}


def test_medmcqa_of_which_this_cannot_be_seen_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="add a row with cop 0 or 4"):
        read_items(written(tmp_path, [MEDMCQA | {"cop": 2}]))


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_gpqas_right_answer_is_not_always_the_first_and_stands_still(
    tmp_path: Path, suffix: str
) -> None:
    rows = [
        GPQA | {"Question": f"Which one is a planet? ({at})", "Record ID": str(at)}
        for at in range(40)
    ]
    file = written(tmp_path, rows, suffix)
    items = read_items(file)
    assert {item.answer for item in items} == set("ABCD")
    assert all(f"{item.answer}) Mars\n" in item.question for item in items)
    assert [item.question for item in read_items(file)] == [item.question for item in items]
    assert [one.answer for one in read_questions(file, ()).asked] == [item.answer for item in items]


class Counted:
    """A check of IFBench's kind."""

    def __init__(self, name: str) -> None:
        self.name = name

    def build_description(self, *, word: str = "", times: int = 0, prompt: str = "") -> None:
        self.word, self.times = word or self.word, times or self.times

    word, times = "", 0

    def get_instruction_args(self) -> Mapping[str, Any]:
        return {"word": self.word, "prompt": ""}

    def check_following(self, text: str) -> bool:
        return text.count(self.word) == self.times


def test_ifbench_is_graded_by_its_own_checks(tmp_path: Path) -> None:
    item = only(tmp_path, IFBENCH)
    assert (item.question, item.grader) == (IFBENCH["prompt"], "instructions")
    known = {"count:word": Counted}
    assert follows_instructions(item, "nebula nebula", known)
    assert not follows_instructions(item, "nebula", known)
    assert not follows_instructions(item, " ", known)
    with pytest.raises(DataError, match="count:word"):
        follows_instructions(item, "nebula", {})
    with pytest.raises(DataError, match="as many kwargs"):
        only(tmp_path, IFBENCH | {"kwargs": []})


def test_a_batch_grades_neither_formulas_nor_instructions(tmp_path: Path) -> None:
    found = read_questions(written(tmp_path, [MATH, IFBENCH, AIME | {"id": "I-1"}]), ())
    assert [one.grade("\\boxed{70}") for one in found.asked] == [None, None, True]
    assert [one.id for one in found.asked] == [MATH["unique_id"], "0", "I-1"]


def test_rows_of_ones_own_keep_their_id_and_grader(tmp_path: Path) -> None:
    own = {"problem": "1 + 1?", "answer": "2", "id": "q17", "grader": "exact"}
    assert only(tmp_path, own).grader == "exact"
    assert read_questions(written(tmp_path, [own]), ()).asked[0].id == "q17"
    choices = {"question": "Which one? A) one", "answer": "A", "options": {"A": "one"}}
    assert only(tmp_path, choices).question == choices["question"]


def test_a_csv_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="field larger"):
        read_items(written(tmp_path, [GPQA | {"Question": "x" * 140_000}], "csv"))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"problem": "1 + 1?"}, "answer is missing"),
        (MMLU_PRO | {"answer": "E"}, "option 5 of 2"),
        (MMLU_PRO | {"question": None}, "must be text"),
        (MMLU_PRO | {"options": "['one' 'red']"}, "options must be a list"),
        (MMLU_PRO | {"answer": "AB"}, "must be a letter, not 'AB'"),
        ({"Question": "?", "Correct Answer": "a"}, "Incorrect Answer 1 is missing"),
    ],
)
def test_a_row_that_is_not_as_published_is_named(
    tmp_path: Path, row: Mapping[str, Any], said: str
) -> None:
    file = written(tmp_path, [row])
    with pytest.raises(DataError, match=said) as refused:
        read_items(file)
    assert str(refused.value).startswith(f"{file}:1: ")
    with pytest.raises(DataError, match=said):
        read_questions(file, ())


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "data.parquet"
    file.write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"data\.parquet"):
        read_items(file)
