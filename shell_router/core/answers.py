"""The answer that a text states, found by the marks that models and data sets commonly put around it.

Marks are `Answer:` (or `=`, whatever its case and emphasis), `####`, `\\boxed{}`, and `the answer is` before a number,
a letter or a capitalised name that ends its sentence. The last statement counts; an empty one does not.

A number or a letter ends where it ends, other answers go to the end of their line, and `Answer:` may have its answer on
the next line. A letter counts for one only where something ends it: `A`, `A)`, `A.`, `**A**`, but not `A dog`.
A statement is taken at its word: `so the answer is 3 times 12` states 3, until something else is stated.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from shell_router.core.answer_forms import LIMIT, Single, number_of, read_line, single_at_start, without_marks

_MARK = re.compile(
    r"""(?P<boxed>\\boxed\{) | (?P<line>(?<!\#)\#{4} | \b(?i:answer)[*_ \t]{0,8}[:=])
      | (?P<said>\b(?i:answer)[*_]{0,4}[ \t]{1,4}is[\s:*])
    """,
    re.VERBOSE,
)
_LONGEST_MARK = 24
_SIGNS = ("answer", "####", "boxed")
"""One of them is in every mark, and they are found faster."""
_BRACE = re.compile("[{}]")
_COMMA = re.compile(r"\s*,\s*")
_LONE_LETTER = re.compile(r"\(?([a-z])\)?[.:]?")


@dataclass(frozen=True, slots=True)
class _Stated:
    """An answer, and where what states it begins and, if that is not its line's end, ends."""

    value: str
    begin: int
    end: int | None = None


@dataclass(slots=True)
class _Line:
    """A statement that ends with its line at the latest. `begin` is where it begins in the whole text.

    `fallback` is what stood before it in the same line.
    """

    begin: int
    words: bool
    fallback: _Stated | None = None
    parts: list[str] = field(default_factory=list)
    head: str = ""
    second: bool = False

    def add(self, text: str) -> tuple[bool, _Stated | None]:
        """Whether it is over, and what it states."""
        line, newline, rest = text.partition("\n")
        self.parts.append(line)
        if len(self.head) < LIMIT:
            self.head += line[: LIMIT - len(self.head)]
            if single := single_at_start(self.head, names=not self.words):
                return True, self._stated(single)
        if not newline:
            return False, None
        if self.second or without_marks("".join(self.parts)):
            return True, self.ended()
        self.begin += sum(map(len, self.parts)) + 1
        self.parts, self.head, self.second = [], "", True
        return self.add(rest)

    def ended(self) -> _Stated | None:
        """What it states if the text ends here."""
        single = read_line("".join(self.parts), names=not self.words, words=self.words)
        return self._stated(single) if single else self.fallback

    def cut(self, at: int) -> _Stated | None:
        """What it states if another mark begins at `at`."""
        single = read_line("".join(self.parts)[: at - self.begin], words=self.words)
        return _Stated(single.value, self.begin, at) if single else self.fallback

    def _stated(self, single: Single) -> _Stated:
        return _Stated(single.value, self.begin, None if single.end is None else self.begin + single.end)


@dataclass(slots=True)
class _Boxed:
    """A statement in braces."""

    begin: int
    parts: list[str] = field(default_factory=list)
    depth: int = 1

    def add(self, text: str) -> tuple[bool, _Stated | None]:
        """Whether it is over, and what it states."""
        for brace in _BRACE.finditer(text):
            self.depth += 1 if brace[0] == "{" else -1
            if not self.depth:
                self.parts.append(text[: brace.start()])
                return True, self._closed()
        self.parts.append(text)
        return False, None

    def ended(self) -> _Stated | None:
        """Nothing: it was not closed."""
        return None

    def _closed(self) -> _Stated | None:
        inside = "".join(self.parts)
        single = read_line(inside.replace("{,}", ","))
        return _Stated(single.value, self.begin, self.begin + len(inside)) if single else None


class AnswerReader:
    """Reads the answer of a text that is still being written, in time linear in its length."""

    __slots__ = ("_last", "_length", "_open", "_tail")

    def __init__(self) -> None:
        self._last: _Stated | None = None
        self._open: dict[str, _Line | _Boxed] = {}
        self._tail = ""
        self._length = 0

    @property
    def settled(self) -> str | None:
        """The last answer that nothing still to be written can lengthen; `settled_answer` of all added so far."""
        return None if self._last is None else self._last.value

    def final(self) -> str | None:
        """The last answer if the text ends here; `stated_answer` of all added so far."""
        stated = self._stated()
        return None if stated is None else stated.value

    def add(self, text: str) -> None:
        """Take in more of the text."""
        window, fed = self._tail + text, len(self._tail)
        offset = self._length - fed
        for mark in self._new_marks(window, fed):
            self._feed(window[fed : mark.end()])
            self._begin(mark, offset)
            fed = mark.end()
        self._feed(window[fed:])
        self._tail = window[-_LONGEST_MARK:]
        self._length = offset + len(window)

    def _new_marks(self, window: str, known: int) -> Iterator[re.Match[str]]:
        folded = window.casefold()
        if any(sign in folded for sign in _SIGNS):
            yield from (mark for mark in _MARK.finditer(window) if mark.end() > known)

    def _begin(self, mark: re.Match[str], offset: int) -> None:
        """A new statement takes the place of an open one of its kind, and may fall back on it."""
        kind = str(mark.lastgroup)
        before = self._open.pop(kind, None)
        begin = offset + mark.end()
        if kind == "boxed":
            self._open[kind] = _Boxed(begin)
            return
        cut = before.cut(offset + mark.start()) if isinstance(before, _Line) and kind == "line" else None
        self._open[kind] = _Line(begin, words=kind == "line", fallback=cut)

    def _feed(self, text: str) -> None:
        """Open statements take in `text`, the latest first: what it states makes earlier ones void."""
        if not self._open:
            return
        still: list[tuple[str, _Line | _Boxed]] = []
        for kind, statement in reversed(self._open.items()):
            over, stated = statement.add(text)
            if stated:
                self._last = stated
                break
            if not over:
                still.append((kind, statement))
        self._open = dict(reversed(still))

    def _stated(self) -> _Stated | None:
        ended = (one.ended() for one in reversed(self._open.values()))
        return next((stated for stated in ended if stated), self._last)

    def _stated_line(self, text: str) -> str | None:
        stated = self._stated()
        if stated is None:
            return None
        line = text[stated.begin : stated.end] if stated.end else text[stated.begin :].partition("\n")[0]
        return without_marks(line) or None


def stated_answer(text: str) -> str | None:
    """The last answer that `text` states, without the words and marks around it; None where it states none."""
    return _read(text).final()


def settled_answer(text: str) -> str | None:
    """The same of a text that is still being written: only an answer that something already follows."""
    return _read(text).settled


def stated_line(text: str) -> str | None:
    """The same as `stated_answer` to the end of its line, as answers in words want it: `5 pens`, not `5`."""
    return _read(text)._stated_line(text)


def comparable(answer: str) -> str:
    """A form in which equal answers are equal: of `1,200`, `$1200.0` and `1200.`; of `(C)`, `c` and `C`.

    Numbers are equal as numbers; elsewhere case, white space, and blanks around commas do not matter.
    """
    number = number_of(answer)
    if number is not None:
        return str(number)
    words = _COMMA.sub(",", " ".join(without_marks(answer).casefold().split()))
    letter = _LONE_LETTER.fullmatch(words)
    return letter[1] if letter else words


def _read(text: str) -> AnswerReader:
    reader = AnswerReader()
    reader.add(text)
    return reader
