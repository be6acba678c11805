"""Graders: what a text answers, as a value that compares equal to the right answer's.

exact     the stated answer to the end of its line, or else the whole text, but for case and white space
numeric   the number stated, or that the whole text is, as `core.answer_forms` reads numbers; a unit may follow
choice    the letter

Right answers and models' answers are read in the same way.
"""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Literal

from shell_router.core.answer_forms import number_of, single_at_start, without_marks
from shell_router.core.answers import stated_answer, stated_line

Grader = Literal["exact", "numeric", "choice"]
Value = str | Fraction

_MARKED_LETTER = re.compile(
    r"\(?([A-Za-z])(?:[).:,].*|\s*[-–—(].*|\s+(?:because|since|as|is)\b.*)?",
    re.DOTALL,  # not `A dog`
)
_LONE_LETTER = re.compile(r"\(?([A-Z])(?:\)?[.:]?|[).:]\s.*)", re.DOTALL)
_KEY_LETTER = re.compile(r"\(?[A-Z]\)?[.:]?|\(?[A-Z]\)\s.*", re.DOTALL)
"""A right answer that asks for a letter: nothing else, or in an option's bracket; `J. K. Rowling` does not."""
_UNIT = re.compile(r"[^\s\d]+(?:\s?[^\s\d]+)?")


def grader_of(answer: str) -> Grader:
    """The grader that the right answer's own form asks for."""
    line = stated_line(answer) or without_marks(answer)
    if number_of(stated_answer(answer) or line) is not None:
        return "numeric"
    return "choice" if _KEY_LETTER.fullmatch(line) else "exact"


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
    """The number stated, whatever unit follows it, or the number that the whole text is, with a word or two of unit."""
    if (stated := stated_answer(text)) is not None:
        return number_of(stated)
    whole = without_marks(text)
    return number_of(whole) if number_of(whole) is not None else _with_unit(whole)


def _with_unit(text: str) -> Fraction | None:
    """42 of `42 apples`; None of `24 and 13 is 37`."""
    single = single_at_start(f"{text}\n")
    unit = text.rpartition(single.value)[2].strip() if single else ""
    return number_of(single.value) if single and _UNIT.fullmatch(unit) else None


def read_choice(text: str) -> str | None:
    """The letter stated, or the one that the whole text is or begins with, as in `B) 24`."""
    stated = stated_answer(text)
    found = _LONE_LETTER.fullmatch(without_marks(text)) if stated is None else _MARKED_LETTER.fullmatch(stated)
    return found[1].upper() if found else None


READERS: Mapping[Grader, Callable[[str], Value | None]] = {
    "exact": read_exact,
    "numeric": read_numeric,
    "choice": read_choice,
}
"""Per grader how it reads an answer."""
