"""The forms that answers have: a number, a letter, a name, or words to the end of their line."""

import re
from collections.abc import Iterable
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
