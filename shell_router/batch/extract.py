"""The answer in a text, in a form in which equal answers are equal texts (EXTRACT in MOSAIC's Algorithm 1)."""

import re
from collections.abc import Callable

from shell_router.batch.settings import Answers
from shell_router.core.answer_forms import number_of
from shell_router.core.answers import stated_answer
from shell_router.core.grading import read_answer

Extractor = Callable[[str], str | None]
"""None where the text answers nothing."""


def extractor(answers: Answers) -> Extractor:
    """What finds answers as `answers` says."""
    if answers.pattern is not None:
        return _by_pattern(re.compile(answers.pattern))
    if answers.kind == "auto":
        return _stated
    kind = answers.kind

    def read(text: str) -> str | None:
        found = read_answer(text, kind)
        return None if found is None else str(found)

    return read


def _stated(text: str) -> str | None:
    """The answer that a mark stands before: as a number if it is one, else but for case and white space."""
    stated = stated_answer(text)
    if stated is None:
        return None
    number = number_of(stated)
    return str(number) if number is not None else " ".join(stated.casefold().split())


def _by_pattern(pattern: re.Pattern[str]) -> Extractor:
    def read(text: str) -> str | None:
        found = [match[1] if pattern.groups else match[0] for match in pattern.finditer(text)]
        return found[-1] if found and found[-1] else None

    return read
