"""The answer that a text states, found by the marks that models and data sets commonly put around it; and votes on it.

Marks are `Answer:` (or `=`, whatever its case and emphasis), `####`, `\\boxed{}`, and `the answer is` before a number,
a letter or a capitalised name that ends its sentence. The last statement counts; an empty one does not.

A number or a letter ends where it ends, other answers go to the end of their line, and `Answer:` may have its answer on
the next line. A letter counts for one only where something ends it: `A`, `A)`, `A.`, `**A**`, but not `A dog`.
A statement is taken at its word: `so the answer is 3 times 12` states 3, until something else is stated.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

LIMIT = 128
"""Characters within which a number or a letter has to be over; what is longer is words."""

_OPENING = r"(?:[ \t\r*_$`]|\\[(\[]|\\(?:text|textbf|mathrm|mathbf)\{)*"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_FRACTION = r"\\[dt]?frac\{[0-9]+\}\{[0-9]+\}|[0-9]+[ ]?/[ ]?[0-9]+"
_VALUE = rf"(?:{_FRACTION}|(?:{_DIGITS})(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?)"
_NUMBER = re.compile(rf"{_OPENING}(?P<open>(?<!\\)\()?(?P<sign>[-+−]?)(?:\\?[$€£¥])?(?P<value>-?{_VALUE})(?(open)\))")
_LETTER = re.compile(rf"{_OPENING}(?:(?<!\\)\((?P<marked>[A-Za-z])\)|(?P<bare>[A-Z]))")
_NAME = re.compile(
    rf"{_OPENING}(?!(?:St|Mr|Mrs|Ms|Dr|Mt)\.)(?P<name>[A-Z][\w'’-]+(?:[ ][A-Z][\w'’-]*){{0,4}})"
    r"(?=[*_$`]*(?:[.,;!][\s*]|[ \t]*\n))"
)

_GOES_ON = re.compile(
    r"""[eE][-+]?[0-9] | [.:][0-9] | [ \t]+[0-9]                            # 1e9999, 12:30, 5 1/2
      | [ \t]*(?:[,/−-]|\*(?!\*))[ \t]*[-+−]?\$?[0-9(] | [ \t]*[+×·÷=<>≤≥≈]  # 1, 2 or 3 - 4 or 3 + x = 5
      | [ \t]*\\(?:sqrt|pi|times|cdot|div|d?frac|pm|approx) | [ \t]*[π√]     # 3\sqrt{2}
      | \^(?!\{?\\circ) | [nxyz](?![A-Za-z])                                # 10^5, but 12^\circ; 2x
      | [A-Za-z][ \t]*(?:[+*×·^=]|-[ \t]*[0-9])                             # 5a + 3
    """,
    re.VERBOSE,
)
"""Behind a number: it is part of something longer."""
_MAY_GO_ON = re.compile(
    r"""(?: [eE][-+]? | [.:] | [ \t]*(?:[,/*−-][ \t]*[-+−]?\$?)? | [ \t]*\\[A-Za-z]* | [A-Za-z][ \t]*-?[ \t]* )\Z""",
    re.VERBOSE,
)
_LIST = r",[ \t]*\(?[A-HJ-Z](?!\w)"
_GOES_ON_AS_LIST = re.compile(_LIST)
_ENDS_LETTER = re.compile(rf"[ \t\r]*\n|[*_$`}}):;!]|\\[)\]]|\.(?!\w|[ \t]*[A-Z]\.)|(?!{_LIST}),")
_MAY_END_LETTER = re.compile(r"(?:[.,][ \t]*\(?[A-Z]?|[ \t\r]*)\Z")

_MARKS = " \t\r\n*$`"
_WRAPPED = re.compile(
    rf"\\\((?P<math>.*)\\\)|\\\[(?P<shown>.*)\\\]|\\(?:text|textbf|mathrm|mathbf)\{{(?P<words>[^{{}}]*)\}}"
    rf"|\((?P<one>[A-Za-z]|[-+−]?{_VALUE})\)",
    re.DOTALL,
)
_WHOLE_NUMBER = re.compile(rf"(?P<sign>[-+−]?)[$€£¥]?(?P<value>-?{_VALUE})\.?[ ]?\\?%?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_SEVERAL = re.compile(r"[,;](?![0-9]{3})|\b(?:and|or)\b")


class Single(NamedTuple):
    """A number, letter or name at the beginning of a text; `end` is that of a name, which has no line to itself."""

    value: str
    end: int | None = None


def single_at_start(text: str, *, names: bool = False) -> Single | None:
    """The number or letter, or with `names` the capitalised name, that `text` begins with.

    None where there is none, and where what follows in `text` does not yet tell that it is over. A line break tells it.
    """
    if number := _NUMBER.match(text):
        if _GOES_ON.match(text, number.end()) or _MAY_GO_ON.match(text, number.end()):
            return None
        return Single(_plain(number))
    if (letter := _LETTER.match(text)) and _letter_is_over(letter["bare"] is None, text, letter.end()):
        return Single(letter["marked"] or letter["bare"])
    if names and (name := _NAME.match(text)):
        return Single(name["name"], name.end())
    return None


def _letter_is_over(marked: bool, text: str, end: int) -> bool:
    if _MAY_END_LETTER.match(text, end):
        return False
    return _GOES_ON_AS_LIST.match(text, end) is None if marked else _ENDS_LETTER.match(text, end) is not None


def read_line(line: str, *, names: bool = False, words: bool = True) -> Single | None:
    """What a complete line answers: what it begins with, the number that an equation ends with, or all its words."""
    if (found := single_at_start(f"{line}\n"[:LIMIT], names=names)) or not words:
        return found
    plain = without_marks(line)
    return Single(_equal_number(plain) or plain) if plain else None


def _equal_number(words: str) -> str | None:
    """7 of `3 + 4 = 7 pens`, 42 of `42 = 6 * 7`; None for `x = 3, y = 4`."""
    first, *_, last = words.split("=") if "=" in words and not _SEVERAL.search(words) else ("", "")
    right = f"{last}\n"[:LIMIT]
    if _NUMBER.match(right) and (found := single_at_start(right)):
        return found.value
    return without_marks(first) if number_of(first) is not None else None


def without_marks(text: str) -> str:
    """`text` without what is only put around an answer: emphasis, LaTeX wrappers, a full stop, a bracket around one
    letter or number."""
    plain = text.strip(_MARKS).rstrip(_MARKS + ".,;")
    if wrapped := _WRAPPED.fullmatch(plain):
        return _first(wrapped.groups()).strip(_MARKS).rstrip(_MARKS + ".,;")
    return plain


def number_of(text: str) -> Fraction | None:
    """The number that `text` is, and nothing else: `1,200`, `$1200.0`, `3/4`, `\\frac{3}{4}`, `50%`, `−6e3`."""
    plain = without_marks(text).replace("\\$", "$")
    found = _WHOLE_NUMBER.fullmatch(plain) if len(plain) < LIMIT else None
    if found is None:
        return None
    try:
        return Fraction(_LATEX_FRACTION.sub(r"\1/\2", _plain(found)).replace(",", "").replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        return None


def _plain(number: re.Match[str]) -> str:
    return number["sign"].replace("−", "-") + number["value"]


def _first(groups: Iterable[str | None]) -> str:
    return next(one for one in groups if one is not None)


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
        """The last answer that nothing still to be written can lengthen."""
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


def stated_line(text: str) -> str | None:
    """The same as `stated_answer` to the end of its line, as answers in words want it: `5 pens`, not `5`."""
    return _read(text)._stated_line(text)


def forms_in(text: str) -> frozenset[str]:
    """The forms of answers that `text` has or asks for: `Answer:`, `####` and `\\boxed{}`.

    A mark that ends the text asks for nothing: what is written next is the answer, whatever its form.
    """
    whole = text.rstrip()
    marks = [mark for mark in _MARK.finditer(whole) if mark.end() < len(whole) and mark.lastgroup != "said"]
    return frozenset("answer" if mark[0][0] in "aA" else mark[0] for mark in marks)


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


@dataclass(frozen=True, slots=True)
class Ballot:
    """One complete output: the answer it votes for, None if it has no vote, and the output's confidence."""

    agent: str
    answer: str | None
    confidence: float


def ballot(agent: str, text: str, confidence: float, *, is_cut: bool) -> Ballot:
    """An output votes for the answer it states, or, where it states none, for its whole text.

    An output that is empty or was cut at its length limit has no vote.
    """
    answer = comparable(stated_answer(text) or text)
    return Ballot(agent, None if is_cut else answer or None, confidence)


def elected(ballots: Sequence[Ballot], waiting: int) -> Ballot | None:
    """The ballot whose output is forwarded; None while the `waiting` outputs could still change the answer.

    Most votes win; of answers with equally many, that of the larger sum of confidences. Of the outputs that vote for
    the winner the most confident is forwarded; without any vote, the most confident of all.
    """
    votes = Counter(one.answer for one in ballots if one.answer is not None)
    (most, *others) = (*sorted(votes.values(), reverse=True), 0)
    if not ballots or (waiting and most - (others or [0])[0] <= waiting):
        return None

    def standing(one: Ballot) -> tuple[int, float, float]:
        if one.answer is None:
            return 0, 0.0, one.confidence
        agreeing = sum(other.confidence for other in ballots if other.answer == one.answer)
        return votes[one.answer], agreeing, one.confidence

    return max(ballots, key=standing)
