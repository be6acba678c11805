"""The questions of a batch, one JSON object per line, and how answers are compared with the right
ones.

exact     the stated answer to the end of its line, or else the whole text, without case and extra
white space numeric   the number stated, or that the whole text is; a unit may follow
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
from typing import Any, Literal, TypeVar

from shell_router.batch.data_sets import Row, read_rows
from shell_router.early_exit.answers import (
    number_of,
    single_at_start,
    stated_answer,
    stated_line,
    without_marks,
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
"""A right answer that asks for a letter: nothing else, or in an option's bracket; `J. K. Rowling`
does not.
"""
_UNIT = re.compile(r"[^\s\d]+(?:\s?[^\s\d]+)?")


def grader_of(answer: str) -> Grader:
    """The grader that the right answer's own form asks for."""
    line = stated_line(answer) or without_marks(answer)
    if number_of(stated_answer(answer) or line) is not None:
        return "numeric"
    if _KEY_LETTER.fullmatch(line):
        return "choice"
    return "exact"


def read_answer(text: str, grader: Grader) -> Value | None:
    """What `text` answers; None where it answers nothing of the grader's kind."""
    return READERS[grader](text)


def is_right(text: str, answer: str, grader: Grader) -> bool:
    """Whether `text` answers what the right `answer` does."""
    value = read_answer(text, grader)
    return value is not None and value == read_answer(answer, grader)


def read_exact(text: str) -> str | None:
    """The answer folded: lower case, single blanks, no full stop."""
    return " ".join((stated_line(text) or without_marks(text)).casefold().split()) or None


def read_numeric(text: str) -> Fraction | None:
    """The number stated, whatever unit follows it, or the number that the whole text is, with a
    word or two of unit.
    """
    if (stated := stated_answer(text)) is not None:
        return number_of(stated)
    whole = without_marks(text)
    if number_of(whole) is not None:
        return number_of(whole)
    return _with_unit(whole)


def _with_unit(text: str) -> Fraction | None:
    """42 of `42 apples`; None of `24 and 13 is 37`."""
    single = single_at_start(f"{text}\n")
    if single:
        unit = text.rpartition(single)[2].strip()
    else:
        unit = ""
    if single and _UNIT.fullmatch(unit):
        return number_of(single)
    return None


def read_choice(text: str) -> str | None:
    """The letter stated, or the one that the whole text is or begins with, as in `B) 24`."""
    stated = stated_answer(text)
    if stated is None:
        found = _LONE_LETTER.fullmatch(without_marks(text))
    else:
        found = _MARKED_LETTER.fullmatch(stated)
    return found[1].upper() if found else None


READERS: Mapping[Grader, Callable[[str], Value | None]] = {
    "exact": read_exact,
    "numeric": read_numeric,
    "choice": read_choice,
}
"""Per grader how it reads an answer."""


Vote = TypeVar("Vote", bound=Hashable)


def plurality(votes: Sequence[Vote | None]) -> int | None:
    """The place of the last vote for the winner; None where no vote has an answer.

    The winner is what most votes are for; of several such the one whose last vote stands last. None
    is no vote.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    most = max(counts.values(), default=0)
    return max(
        (place for place, vote in enumerate(votes) if vote is not None and counts[vote] == most),
        default=None,
    )


UNGRADED = ("math", "instructions")
"""Graders of `eval` alone: what answers they take is not known here."""

FORM = (
    'Write one object per line: {"question": "…"}, with id, answer, proposers and skills '
    "where needed."
)


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `proposers` answer it, if any are named; `answer` is the right one, if it is
    known.
    """

    id: str
    text: str
    proposers: tuple[str, ...] = ()
    skills: frozenset[str] = frozenset()
    answer: str | None = None
    line: int = 0

    def grade(self, text: str) -> bool | None:
        """Whether `text` answers what the right answer does; None where that is not known."""
        if self.answer is None:
            return None
        return is_right(text, self.answer, grader_of(self.answer))


@dataclass(frozen=True, slots=True)
class Refused:
    """A line that is no question, and why."""

    line: int
    id: str | None
    error: str


@dataclass(frozen=True, slots=True)
class Questions:
    """What a file holds. `fingerprint` is of its bytes."""

    asked: tuple[Question, ...]
    refused: tuple[Refused, ...]
    fingerprint: str

    def first(self, number: int) -> "Questions":
        """The first `number` questions, and the bad lines before the next one."""
        if number >= len(self.asked):
            return self
        refused = tuple(one for one in self.refused if one.line < self.asked[number].line)
        return Questions(self.asked[:number], refused, f"{self.fingerprint}, the first {number}")


def read_questions(file: Path, proposers: Collection[str]) -> Questions:
    """The questions of a file (see `data_sets`), whose rows may name any of `proposers`.

    Raises DataError for a file that cannot be read or holds no question.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(
            f"{file}: {error.strerror}.", remedy="Name a JSONL file of questions."
        ) from error
    asked: dict[str, Question] = {}
    refused: list[Refused] = []
    for number, row in read_rows(file, content):
        found = _read(row, number, proposers, asked)
        if isinstance(found, Question):
            asked[found.id] = found
        else:
            refused.append(found)
    if not asked:
        if refused:
            reason = f"{file}:{refused[0].line}: {refused[0].error}"
        else:
            reason = f"{file} is empty."
        raise DataError(reason, remedy=FORM)
    return Questions(tuple(asked.values()), tuple(refused), sha256(content).hexdigest())


def _read(
    found: Row | str, number: int, proposers: Collection[str], asked: Mapping[str, Question]
) -> Question | Refused:
    if isinstance(found, str):
        return Refused(number, None, f"{found}.")
    id = None
    try:
        id = _id(found, number, asked)
        named = _names(found, "proposers", proposers)
        skills = frozenset(_names(found, "skills"))
        graded = found.get("grader") not in UNGRADED
        return Question(
            id, _text(found, "question"), named, skills, _answer(found) if graded else None, number
        )
    except TypeError as error:
        return Refused(number, id, str(error))


def _id(found: Mapping[str, Any], number: int, asked: Mapping[str, Question]) -> str:
    """The line's own id, or its number."""
    given = number if found.get("id") is None else found["id"]
    if isinstance(given, bool) or not isinstance(given, str | int) or given == "":
        raise TypeError(f"id must be text or a whole number, not {given!r}.")
    if str(given) in asked:
        raise TypeError(f"line {asked[str(given)].line} has the id {str(given)!r} already.")
    return str(given)


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    if isinstance(value, str) and value.strip():
        return value
    raise TypeError(f"{name} must be text that is not empty, not {value!r}.")


def _names(
    found: Mapping[str, Any], name: str, known: Collection[str] | None = None
) -> tuple[str, ...]:
    """A list of texts, without repetitions."""
    value = found.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"{name} must be a list of texts, not {value!r}.")
    for one in value:
        if known is not None and one not in known:
            raise TypeError(f"there is no proposer {one!r}; there are {', '.join(known)}.")
    return tuple(dict.fromkeys(value))


def _answer(found: Mapping[str, Any]) -> str | None:
    if found.get("answer") is None:
        return None
    answer = _text(found, "answer")
    if read_answer(answer, grader_of(answer)) is None:
        raise TypeError(f"the answer {answer!r} cannot be compared with another.")
    return answer
