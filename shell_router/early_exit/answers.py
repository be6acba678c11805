"""The answer that a text states, found by the marks that models and data sets commonly put around
it; and votes on it.

Marks are `Answer:` (or `=`, whatever its case and emphasis), `####`, `\\boxed{}`, and `the answer
is` before a number, a letter or a capitalised name that ends its sentence. The last statement
counts; an empty one does not.

A number or a letter ends where it ends, other answers go to the end of their line, and `Answer:`
may have its answer on the next line. A letter counts for one only where something ends it: `A`,
`A)`, `A.`, `**A**`, but not `A dog`. A statement is taken at its word: `so the answer is 3 times
12` states 3, until something else is stated.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

LIMIT = 128
"""Characters within which a number or a letter has to be over; what is longer is words."""

_OPENING = r"(?:[ \t\r*_$`]|\\[(\[]|\\(?:text|textbf|mathrm|mathbf)\{)*"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_FRACTION = r"\\[dt]?frac\{[0-9]+\}\{[0-9]+\}|[0-9]+[ ]?/[ ]?[0-9]+"
_VALUE = rf"(?:{_FRACTION}|(?:{_DIGITS})(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?)"
_NUMBER = re.compile(
    rf"{_OPENING}(?P<open>(?<!\\)\()?(?P<sign>[-+−]?)(?:\\?[$€£¥])?(?P<value>-?{_VALUE})(?(open)\))"
)
_LETTER = re.compile(rf"{_OPENING}(?:(?<!\\)\((?P<marked>[A-Za-z])\)|(?P<bare>[A-Z]))")
_NAME = re.compile(
    rf"{_OPENING}(?!(?:St|Mr|Mrs|Ms|Dr|Mt)\.)(?P<name>[A-Z][\w'’-]+(?:[ ][A-Z][\w'’-]*){{0,4}})"
    r"(?=[*_$`]*(?:[.,;!][\s*]|[ \t]*\n))"
)

_GOES_ON = re.compile(
    r"""[eE][-+]?[0-9] | [.:][0-9] | [ \t]+[0-9]                            # 1e9999, 12:30, 5 1/2
      | [ \t]*(?:[,/−-]|\*(?!\*))[ \t]*[-+−]?\$?[0-9(]                     # 1, 2 or 3 - 4
      | [ \t]*[+×·÷=<>≤≥≈]                                                  # 3 + x = 5
      | [ \t]*\\(?:sqrt|pi|times|cdot|div|d?frac|pm|approx) | [ \t]*[π√]     # 3\sqrt{2}
      | \^(?!\{?\\circ) | [nxyz](?![A-Za-z])                                # 10^5, but 12^\circ; 2x
      | [A-Za-z][ \t]*(?:[+*×·^=]|-[ \t]*[0-9])                             # 5a + 3
    """,
    re.VERBOSE,
)
"""Behind a number: it is part of something longer."""
_LIST = r",[ \t]*\(?[A-HJ-Z](?!\w)"
_GOES_ON_AS_LIST = re.compile(_LIST)
_ENDS_LETTER = re.compile(rf"[ \t\r]*\n|[*_$`}}):;!]|\\[)\]]|\.(?!\w|[ \t]*[A-Z]\.)|(?!{_LIST}),")

_MARKS = " \t\r\n*$`"
_WRAPPED = re.compile(
    rf"\\\((?P<math>.*)\\\)|\\\[(?P<shown>.*)\\\]|\\(?:text|textbf|mathrm|mathbf)\{{(?P<words>[^{{}}]*)\}}"
    rf"|\((?P<one>[A-Za-z]|[-+−]?{_VALUE})\)",
    re.DOTALL,
)
_WHOLE_NUMBER = re.compile(rf"(?P<sign>[-+−]?)[$€£¥]?(?P<value>-?{_VALUE})\.?[ ]?\\?%?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_SEVERAL = re.compile(r"[,;](?![0-9]{3})|\b(?:and|or)\b")


class Stated(NamedTuple):
    """An answer, and the words that state it."""

    value: str
    words: str


def single_at_start(text: str) -> str | None:
    """The number or letter that `text` begins with; None where there is none, or no end of it is in
    `text`.
    """
    if number := _NUMBER.match(text):
        goes_on = number.end() == len(text) or _GOES_ON.match(text, number.end())
        return None if goes_on else _plain(number)
    if letter := _LETTER.match(text):
        end = letter.end()
        marked = letter["bare"] is None
        if _GOES_ON_AS_LIST.match(text, end) is None if marked else _ENDS_LETTER.match(text, end):
            return letter["marked"] or letter["bare"]
    return None


def _read_line(line: str, *, names: bool = False, words: bool = True) -> Stated | None:
    """What a complete line answers: the number or letter that it begins with, with `names` the
    capitalised name; with `words` the number that an equation ends with, or all that it says."""
    head = f"{line[:LIMIT]}\n"[:LIMIT]
    if single := single_at_start(head):
        return Stated(single, line)
    if names and (name := _NAME.match(head)):
        return Stated(name["name"], name["name"])
    plain = without_marks(line) if words else ""
    if plain:
        return Stated(_equal_number(plain) or plain, line)
    return None


def _equal_number(words: str) -> str | None:
    """7 of `3 + 4 = 7 pens`, 42 of `42 = 6 * 7`; None for `x = 3, y = 4`."""
    first, *_, last = words.split("=") if "=" in words and not _SEVERAL.search(words) else ("", "")
    right = f"{last}\n"[:LIMIT]
    if _NUMBER.match(right) and (found := single_at_start(right)):
        return found
    if number_of(first) is not None:
        return without_marks(first)
    return None


def without_marks(text: str) -> str:
    """`text` without what is only put around an answer: emphasis, LaTeX wrappers, a full stop, a
    bracket around one letter or number."""
    plain = text.strip(_MARKS).rstrip(_MARKS + ".,;")
    if wrapped := _WRAPPED.fullmatch(plain):
        return _first(wrapped.groups()).strip(_MARKS).rstrip(_MARKS + ".,;")
    return plain


def number_of(text: str) -> Fraction | None:
    """The number that `text` is, and nothing else: `1,200`, `$1200.0`, `3/4`, `\\frac{3}{4}`,
    `50%`, `−6e3`.
    """
    plain = without_marks(text).replace("\\$", "$")
    if len(plain) < LIMIT:
        found = _WHOLE_NUMBER.fullmatch(plain)
    else:
        found = None
    if found is None:
        return None
    try:
        return Fraction(
            _LATEX_FRACTION.sub(r"\1/\2", _plain(found)).replace(",", "").replace(" ", "")
        )
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
_SIGNS = ("answer", "####", "boxed")
"""One of them is in every mark, and they are found faster."""
_BRACE = re.compile("[{}]")
_COMMA = re.compile(r"\s*,\s*")
_LONE_LETTER = re.compile(r"\(?([a-z])\)?[.:]?")


class AnswerReader:
    """Reads the answer of a text that is still being written, line by line, in time linear in its
    length.

    `stated` is the last answer of the lines that have ended. A statement makes those void that
    began before it and have not ended: a box that is not closed yet, or a mark whose answer was to
    stand on the next line.
    """

    __slots__ = ("_box", "_depth", "_line", "_waiting", "stated")

    def __init__(self) -> None:
        self.stated: Stated | None = None
        self._line: list[str] = []
        self._waiting: dict[str, None] = {}
        self._box: list[str] | None = None
        self._depth = 0

    def add(self, text: str) -> None:
        """Take in more of the text."""
        *ended, rest = text.split("\n")
        for end in ended:
            self._line.append(end)
            self._read("".join(self._line))
            self._line.clear()
        self._line.append(rest)

    def end(self) -> Stated | None:
        """The text is complete; its last answer."""
        self._read("".join(self._line))
        self._line.clear()
        return self.stated

    def _read(self, line: str) -> None:
        folded = line.casefold()
        if any(sign in folded for sign in _SIGNS):
            marks = list(_MARK.finditer(line))
        else:
            marks = []
        ends = dict.fromkeys(
            ("line", "said", "boxed"), len(line)
        )  # a statement ends where the next of its kind begins
        found = []
        for mark in reversed(marks):
            kind = str(mark.lastgroup)
            found.append((kind, True, line[mark.end() : ends[kind]]))
            ends[kind] = mark.start()
        before = [*(["boxed"] if self._box is not None else []), *self._waiting]
        found += [(kind, False, line[: ends[kind]]) for kind in before]
        self._waiting.clear()
        for kind, begins, said in reversed(found):
            if kind == "boxed":
                stated = self._boxed(said, begins=begins)
            else:
                stated = _read_line(said, names=kind == "said", words=kind == "line")
                if begins and not without_marks(said):
                    self._waiting[kind] = None
            if stated:
                self.stated = stated
                self._box = None
                self._waiting.clear()

    def _boxed(self, text: str, *, begins: bool) -> Stated | None:
        """What a box states, if it is closed in `text`."""
        if begins:
            self._box = []
            self._depth = 1
        if self._box is None:  # void meanwhile
            return None
        for brace in _BRACE.finditer(text):
            self._depth += 1 if brace[0] == "{" else -1
            if not self._depth:
                inside = "".join([*self._box, text[: brace.start()]])
                self._box = None
                return _read_line(inside.replace("{,}", ","))
        self._box.append(f"{text}\n")
        return None


def stated_answer(text: str) -> str | None:
    """The last answer that `text` states, without the words and marks around it; None where it
    states none.
    """
    stated = _read(text)
    return None if stated is None else stated.value


def stated_line(text: str) -> str | None:
    """The same as `stated_answer` to the end of its line, as answers in words want it: `5 pens`,
    not `5`.
    """
    stated = _read(text)
    if stated is None:
        return None
    return without_marks(stated.words) or None


def forms_in(text: str) -> frozenset[str]:
    """The forms of answers that `text` has or asks for: `Answer:`, `####` and `\\boxed{}`.

    A mark that ends the text asks for nothing: what is written next is the answer, whatever its
    form.
    """
    whole = text.rstrip()
    marks = [
        mark
        for mark in _MARK.finditer(whole)
        if mark.end() < len(whole) and mark.lastgroup != "said"
    ]
    return frozenset("answer" if mark[0][0] in "aA" else mark[0] for mark in marks)


def comparable(answer: str) -> str:
    """A form in which equal answers are equal: of `1,200`, `$1200.0` and `1200.`; of `(C)`, `c` and
    `C`.

    Numbers are equal as numbers; elsewhere case, white space, and blanks around commas do not
    matter.
    """
    number = number_of(answer)
    if number is not None:
        return str(number)
    words = _COMMA.sub(",", " ".join(without_marks(answer).casefold().split()))
    letter = _LONE_LETTER.fullmatch(words)
    return letter[1] if letter else words


def _read(text: str) -> Stated | None:
    reader = AnswerReader()
    reader.add(text)
    return reader.end()


@dataclass(frozen=True, slots=True)
class Ballot:
    """One complete output: the answer it votes for, None if it has no vote, and the output's
    confidence.
    """

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
    """The ballot whose output is forwarded; None while the `waiting` outputs could still change the
    answer.

    Most votes win; of answers with equally many, that of the larger sum of confidences. Of the
    outputs that vote for the winner the most confident is forwarded; without any vote, the most
    confident of all.
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
