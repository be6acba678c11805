r"""Find the answer that a text states, by the marks that models and data sets put around it.

Marks are `Answer:` (or `=`, whatever its case and emphasis), `####`, `\boxed{}`, and `the answer
is` before a number, a letter or a capitalised name that ends its sentence. The last statement
counts; an empty one does not.

A number or a letter ends where it ends; other answers go to the end of their line, and `Answer:`
may have its answer on the next line. A letter counts for one only if it is delimited: `A`, `A)`,
`A.`, `**A**`, but not `A dog`. A statement is taken literally: `so the answer is 3 times 12` states
3, until another is stated. The module also counts votes on such answers.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

LIMIT = 128
"""Characters within which a number or a letter has to end; longer answers are words."""

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
"""Text behind a number that makes it part of a longer expression."""
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
    """Return the number or letter at the start of `text`; None without one, or if it may go on."""
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
    """Read the answer of a complete line: the number or letter at its start.

    Args:
        line: The line.
        names: Read a capitalised name, too.
        words: Otherwise read the number that an equation ends with, or the whole line.
    """
    head = f"{line[:LIMIT]}\n"[:LIMIT]
    if single := single_at_start(head):
        return Stated(single, line)
    if names and (name := _NAME.match(head)):
        return Stated(name["name"], name["name"])
    plain = strip_marks(line) if words else ""
    if plain:
        return Stated(_equal_number(plain) or plain, line)
    return None


def _equal_number(words: str) -> str | None:
    """Read the result of an equation: 7 of `3 + 4 = 7 pens`, 42 of `42 = 6 * 7`.

    It is None for `x = 3, y = 4`.
    """
    first, *_, last = words.split("=") if "=" in words and not _SEVERAL.search(words) else ("", "")
    right = f"{last}\n"[:LIMIT]
    if _NUMBER.match(right) and (number := single_at_start(right)):
        return number
    if parse_number(first) is not None:
        return strip_marks(first)
    return None


def strip_marks(text: str) -> str:
    """Strip emphasis, LaTeX wrappers, a full stop, and brackets around one letter or number."""
    plain = text.strip(_MARKS).rstrip(_MARKS + ".,;")
    if wrapped := _WRAPPED.fullmatch(plain):
        return _first(wrapped.groups()).strip(_MARKS).rstrip(_MARKS + ".,;")
    return plain


def parse_number(text: str) -> Fraction | None:
    r"""Return the number that the whole `text` is: `1,200`, `$1200.0`, `3/4`, `50%` or `−6e3`.

    LaTeX's `\frac{3}{4}` is a number, too.
    """
    plain = strip_marks(text).replace("\\$", "$")
    number = _WHOLE_NUMBER.fullmatch(plain) if len(plain) < LIMIT else None
    if number is None:
        return None
    try:
        return Fraction(
            _LATEX_FRACTION.sub(r"\1/\2", _plain(number)).replace(",", "").replace(" ", "")
        )
    except (ValueError, ZeroDivisionError):
        return None


def _plain(number: re.Match[str]) -> str:
    return number["sign"].replace("−", "-") + number["value"]


def _first(groups: Iterable[str | None]) -> str:
    return next(group for group in groups if group is not None)


_MARK = re.compile(
    r"""(?P<boxed>\\boxed\{) | (?P<line>(?<!\#)\#{4} | \b(?i:answer)[*_ \t]{0,8}[:=])
      | (?P<said>\b(?i:answer)[*_]{0,4}[ \t]{1,4}is[\s:*])
    """,
    re.VERBOSE,
)
_SIGNS = ("answer", "####", "boxed")
"""Every mark has one of these, and they are found faster."""
_BRACE = re.compile("[{}]")
_COMMA = re.compile(r"\s*,\s*")
_LONE_LETTER = re.compile(r"\(?([a-z])\)?[.:]?")


class AnswerReader:
    """Reads the answer of a text that is still being written, in time linear in its length.

    `stated` is the last answer of the lines that have ended. A statement voids those that began
    before it and have not ended: a box that is not closed, or a mark whose answer was to stand on
    the next line.
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
        """Take in the end of the text; return its last answer."""
        self._read("".join(self._line))
        self._line.clear()
        return self.stated

    def _read(self, line: str) -> None:
        folded = line.casefold()
        marks = []
        if any(sign in folded for sign in _SIGNS):
            marks = list(_MARK.finditer(line))
        # a statement ends where the next of its kind begins
        ends = dict.fromkeys(("line", "said", "boxed"), len(line))
        statements = []
        for mark in reversed(marks):
            kind = str(mark.lastgroup)
            statements.append((kind, True, line[mark.end() : ends[kind]]))
            ends[kind] = mark.start()
        begun = list(self._waiting)
        if self._box is not None:
            begun.insert(0, "boxed")
        statements += [(kind, False, line[: ends[kind]]) for kind in begun]
        self._waiting.clear()
        for kind, begins, rest in reversed(statements):
            if kind == "boxed":
                stated = self._read_box(rest, begins=begins)
            else:
                stated = _read_line(rest, names=kind == "said", words=kind == "line")
                if begins and not strip_marks(rest):
                    self._waiting[kind] = None
            if stated:
                self.stated = stated
                self._box = None
                self._waiting.clear()

    def _read_box(self, text: str, *, begins: bool) -> Stated | None:
        """Read the answer of a box, if `text` closes it."""
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


def find_answer(text: str) -> str | None:
    """Return the last answer that `text` states, without the words and marks around it."""
    stated = _read(text)
    return None if stated is None else stated.value


def find_answer_line(text: str) -> str | None:
    """Return the last answer to the end of its line, for answers in words: `5 pens`, not `5`."""
    stated = _read(text)
    if stated is None:
        return None
    return strip_marks(stated.words) or None


def find_forms(text: str) -> frozenset[str]:
    r"""Return the forms of answers that `text` has or asks for: `Answer:`, `####` and `\boxed{}`.

    A mark at the end of the text asks for no form: the answer follows it, whatever its form.
    """
    whole = text.rstrip()
    marks = [
        mark
        for mark in _MARK.finditer(whole)
        if mark.end() < len(whole) and mark.lastgroup != "said"
    ]
    return frozenset("answer" if mark[0][0] in "aA" else mark[0] for mark in marks)


def normalize_answer(answer: str) -> str:
    """Normalize an answer: equal answers become equal, as `1,200` and `$1200.0`, or `(C)` and `c`.

    Numbers are equal by value. In other answers case, white space, and blanks around commas do not
    matter.
    """
    number = parse_number(answer)
    if number is not None:
        return str(number)
    words = _COMMA.sub(",", " ".join(strip_marks(answer).casefold().split()))
    letter = _LONE_LETTER.fullmatch(words)
    return letter[1] if letter else words


def _read(text: str) -> Stated | None:
    reader = AnswerReader()
    reader.add(text)
    return reader.end()


@dataclass(frozen=True, slots=True)
class Ballot:
    """A complete output, the answer it votes for (None without a vote), and its confidence."""

    agent: str
    answer: str | None
    confidence: float


def cast_ballot(agent: str, text: str, confidence: float, *, is_cut: bool) -> Ballot:
    """Make an output vote for the answer it states, or else for its whole text.

    An output that is empty or was cut at its length limit has no vote.
    """
    answer = normalize_answer(find_answer(text) or text)
    return Ballot(agent, None if is_cut else answer or None, confidence)


def elect(ballots: Sequence[Ballot], waiting: int, *, by_confidence: bool = False) -> Ballot | None:
    """Return the winning ballot; None while the `waiting` outputs could still change the answer.

    Most votes win, of which each counts one or, `by_confidence`, its confidence; in a tie, the
    answer with the larger sum of confidences. Among the outputs that vote for the winner the most
    confident is forwarded; without any vote, the most confident of all.
    """
    votes: defaultdict[str, float] = defaultdict(float)
    for ballot in ballots:
        if ballot.answer is not None:
            votes[ballot.answer] += ballot.confidence if by_confidence else 1
    most, second, *_ = (*sorted(votes.values(), reverse=True), 0, 0)
    if not ballots or (waiting and most - second <= waiting):
        return None

    def rank(ballot: Ballot) -> tuple[bool, float, float, float]:
        if ballot.answer is None:
            return False, 0, 0, ballot.confidence
        agreeing = sum(other.confidence for other in ballots if other.answer == ballot.answer)
        return True, votes[ballot.answer], agreeing, ballot.confidence

    return max(ballots, key=rank)
