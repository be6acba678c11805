"""The questions of a batch, and the graders that compare answers with the right ones.

    exact     the stated answer to the end of its line, or else the whole text, without case and
              extra white space
    numeric   the stated number, or the whole text as a number; a unit may follow
    choice    the letter

Right answers and models' answers are read in the same way. A bad line is reported and does not stop
the others.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeVar

from shell_router.batch.data_sets import Row, read_rows
from shell_router.early_exit.answers import (
    find_answer,
    find_answer_line,
    parse_number,
    single_at_start,
    strip_marks,
)
from shell_router.errors import DataError

Grader = Literal["exact", "numeric", "choice"]
Value = str | Fraction

_MARKED_LETTER = re.compile(
    r"\(?([A-Za-z])(?:[).:,].*|\s*[-–—(].*|\s+(?:because|since|as|is)\b.*)?",
    re.DOTALL,  # not `A dog`
)
_LONE_LETTER = re.compile(r"\(?([A-Z])(?:\)?[.:]?|[).:]\s.*)", re.DOTALL)
_KEY_LETTER = re.compile(r"\(?[A-Z]\)?[.:]?|\(?[A-Z]\)\s.*", re.DOTALL)
"""A right answer that is a letter, alone or in an option's bracket; `J. K. Rowling` is none."""
_UNIT = re.compile(r"[^\s\d]+(?:\s?[^\s\d]+)?")


def choose_grader(answer: str) -> Grader:
    """Return the grader that fits the form of the right answer."""
    line = find_answer_line(answer) or strip_marks(answer)
    if parse_number(find_answer(answer) or line) is not None:
        return "numeric"
    if _KEY_LETTER.fullmatch(line):
        return "choice"
    return "exact"


def read_answer(text: str, grader: Grader) -> Value | None:
    """Return the answer in `text`; None if it has none of the grader's kind."""
    return READERS[grader](text)


def is_right(text: str, answer: str, grader: Grader) -> bool:
    """Return whether `text` has the right `answer`."""
    value = read_answer(text, grader)
    return value is not None and value == read_answer(answer, grader)


def read_exact(text: str) -> str | None:
    """Return the answer in lower case, with single blanks and no full stop."""
    return " ".join((find_answer_line(text) or strip_marks(text)).casefold().split()) or None


def read_numeric(text: str) -> Fraction | None:
    """Return the stated number, or the whole text as a number with a word or two of unit."""
    stated = find_answer(text)
    if stated is not None:
        return parse_number(stated)
    whole = strip_marks(text)
    number = parse_number(whole)
    if number is not None:
        return number
    return _read_with_unit(whole)


def _read_with_unit(text: str) -> Fraction | None:
    """Return 42 for `42 apples`, and None for `24 and 13 is 37`."""
    single = single_at_start(f"{text}\n")
    if single:
        unit = text.rpartition(single)[2].strip()
        if _UNIT.fullmatch(unit):
            return parse_number(single)
    return None


def read_choice(text: str) -> str | None:
    """Return the stated letter, or the letter that the text is or begins with, as in `B) 24`."""
    stated = find_answer(text)
    if stated is None:
        match = _LONE_LETTER.fullmatch(strip_marks(text))
    else:
        match = _MARKED_LETTER.fullmatch(stated)
    return match[1].upper() if match else None


READERS: Mapping[Grader, Callable[[str], Value | None]] = {
    "exact": read_exact,
    "numeric": read_numeric,
    "choice": read_choice,
}
"""The reader of answers of each grader."""


Vote = TypeVar("Vote", bound=Hashable)


def find_plurality(votes: Sequence[Vote | None]) -> int | None:
    """Return the index of the last vote for the value with most votes; None without any vote.

    Of several values with as many votes the one with the last vote wins. None is no vote.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    most = max(counts.values(), default=0)
    for index in reversed(range(len(votes))):
        vote = votes[index]
        if vote is not None and counts[vote] == most:
            return index
    return None


UNGRADED = ("math", "instructions")
"""Graders of `eval` alone; a batch does not grade their questions."""

FORM = (
    'Write one object per line: {"question": "…"}, with id, answer, proposers and skills '
    "where needed."
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question. `proposers` are the models that its line names, `answer` is the right one."""

    id: str
    text: str
    proposers: tuple[str, ...] = ()
    skills: frozenset[str] = frozenset()
    answer: str | None = None
    line: int = 0

    def grade(self, text: str) -> bool | None:
        """Return whether `text` has the right answer; None if that is not known."""
        if self.answer is None:
            return None
        return is_right(text, self.answer, choose_grader(self.answer))


@dataclass(frozen=True, slots=True)
class Refused:
    """A line that is no question, with its error."""

    line: int
    id: str | None
    error: str


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions and bad lines of a file. `fingerprint` is the hash of its bytes."""

    asked: tuple[Question, ...]
    refused: tuple[Refused, ...]
    fingerprint: str

    def first(self, number: int) -> "Questions":
        """Return the first `number` questions, and the bad lines before the next one."""
        if number >= len(self.asked):
            return self
        end = self.asked[number].line
        refused = tuple(line for line in self.refused if line.line < end)
        return Questions(self.asked[:number], refused, f"{self.fingerprint}, the first {number}")


def read_questions(
    file: Path, proposers: Collection[str] = (), limit: int | None = None
) -> Questions:
    """Read the first `limit` questions of a file (see `data_sets`), or all.

    Its rows may name any of `proposers`.

    Raises DataError if the file cannot be read or holds no question.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{file}: {error.strerror}.", remedy="Name a JSONL file of questions."
        ) from error
    by_id: dict[str, Question] = {}
    refused: list[Refused] = []
    for number, row in read_rows(file, content):
        line = _read_question(row, number, proposers, by_id)
        if isinstance(line, Question):
            by_id[line.id] = line
        else:
            refused.append(line)
    if not by_id:
        reason = f"{file} is empty."
        if refused:
            reason = f"{file}:{refused[0].line}: {refused[0].error}"
        raise DataError(reason, remedy=FORM)
    questions = Questions(tuple(by_id.values()), tuple(refused), sha256(content).hexdigest())
    return questions if limit is None else questions.first(limit)


def _read_question(
    row: Row | str, number: int, proposers: Collection[str], earlier: Mapping[str, Question]
) -> Question | Refused:
    if isinstance(row, str):
        return Refused(number, None, f"{row}.")
    id = None
    try:
        id = _read_id(row, number, earlier)
        names = _read_texts(row, "proposers")
        if len({*names}) < len(names):
            raise TypeError("proposers names a model twice.")
        for name in names:
            if name not in proposers:
                raise TypeError(f"there is no proposer {name!r}; there are {', '.join(proposers)}.")
        skills = frozenset(_read_texts(row, "skills"))
        text = read_text(row, "question")
        answer = None
        if row.get("grader") not in UNGRADED:
            answer = _read_right_answer(row)
        return Question(id, text, names, skills, answer, number)
    except TypeError as error:
        return Refused(number, id, str(error))


def _read_id(row: Row, number: int, earlier: Mapping[str, Question]) -> str:
    """Return the line's own id, or its number."""
    value = row.get("id")
    if value is None:
        value = number
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise TypeError(f"id must be text or a whole number, not {value!r}.")
    id = str(value)
    if id in earlier:
        raise TypeError(f"line {earlier[id].line} has the id {id!r} already.")
    return id


def read_text(row: Row, name: str) -> str:
    """Return the row's text `name`; an answer may be a number.

    Raises TypeError if it is missing or empty.
    """
    value = row.get(name)
    if isinstance(value, str) and value.strip():
        return value
    if name == "answer" and type(value) in (int, float):
        return str(value)
    raise TypeError(f"{name} must be text that is not empty, not {value!r}.")


def _read_texts(row: Row, name: str) -> tuple[str, ...]:
    """Return a list of texts."""
    value = row.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TypeError(f"{name} must be a list of texts, not {value!r}.")
    return tuple(value)


def _read_right_answer(row: Row) -> str | None:
    if row.get("answer") is None:
        return None
    answer = read_text(row, "answer")
    if read_answer(answer, choose_grader(answer)) is None:
        raise TypeError(f"the answer {answer!r} cannot be compared with another.")
    return answer
