"""The questions of a batch: one JSON object per line, of which every bad one is told and none stops the rest."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from shell_router.core.grading import Grader, grader_of, read_answer
from shell_router.errors import DataError

FORM = 'Write one object per line: {"question": "…"}, and beside it id, answer, experts and skills as wanted.'


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `experts` answer it, if any are named; `answer` is the right one, if it is known."""

    id: str
    text: str
    experts: tuple[str, ...] = ()
    skills: frozenset[str] = frozenset()
    answer: str | None = None
    line: int = 0

    @property
    def grader(self) -> Grader | None:
        """How answers are compared with the right one."""
        return None if self.answer is None else grader_of(self.answer)


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
        """The first so many, and the bad lines before the next one."""
        if number >= len(self.asked):
            return self
        refused = tuple(one for one in self.refused if one.line < self.asked[number].line)
        return Questions(self.asked[:number], refused, f"{self.fingerprint}, the first {number}")


def read_questions(file: Path, experts: Collection[str]) -> Questions:
    """The questions of a JSONL file, whose lines may name any of `experts`.

    Raises DataError for a file that cannot be read or holds no question.
    """
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}.", remedy="Name a JSONL file of questions.") from error
    asked: dict[str, Question] = {}
    refused: list[Refused] = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            found = _read(line, number, experts, asked)
            if isinstance(found, Question):
                asked[found.id] = found
            else:
                refused.append(found)
    if not asked:
        told = f"{file}:{refused[0].line}: {refused[0].error}" if refused else f"{file} is empty."
        raise DataError(told, remedy=FORM)
    return Questions(tuple(asked.values()), tuple(refused), sha256(content).hexdigest())


def _read(line: bytes, number: int, experts: Collection[str], asked: Mapping[str, Question]) -> Question | Refused:
    named: str | None = None
    try:
        found = orjson.loads(line)
        if not isinstance(found, dict):
            raise TypeError("this is not a JSON object.")
        named = _named(found, number, asked)
        return Question(
            named,
            _text(found, "question"),
            _names(found, "experts", experts),
            frozenset(_names(found, "skills")),
            _answer(found),
            number,
        )
    except orjson.JSONDecodeError as error:
        return Refused(number, None, f"this is not JSON ({error}).")
    except TypeError as error:
        return Refused(number, named, str(error))


def _named(found: Mapping[str, Any], number: int, asked: Mapping[str, Question]) -> str:
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


def _names(found: Mapping[str, Any], name: str, known: Collection[str] | None = None) -> tuple[str, ...]:
    """A list of texts, none twice."""
    value = found.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"{name} must be a list of texts, not {value!r}.")
    for one in value:
        if known is not None and one not in known:
            raise TypeError(f"there is no expert {one!r}; there are {', '.join(known)}.")
    return tuple(dict.fromkeys(value))


def _answer(found: Mapping[str, Any]) -> str | None:
    if found.get("answer") is None:
        return None
    answer = _text(found, "answer")
    if read_answer(answer, grader_of(answer)) is None:
        raise TypeError(f"the answer {answer!r} cannot be compared with another.")
    return answer
