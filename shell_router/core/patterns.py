"""The cost of regular expressions for Python's `re`, which goes back where a match fails."""

from importlib import import_module
from math import exp2, inf, log2
from re import error
from typing import Any

_PARSER = import_module("re._parser")
"""Python's own: SGLang reads the length of a match from it, too."""


def bound_steps(pattern: str) -> float:
    """Bound the ways to match from one place times their length; infinite if nothing bounds them.

    SGLang matches stop patterns after each token, against as many of the last tokens as a match can
    have characters: against all of them if nothing bounds a match.
    """
    try:
        ways_log2, characters = _measure(_PARSER.parse(pattern))
    except (error, OverflowError, RecursionError):
        return inf
    return characters * exp2(min(ways_log2, 64))


def _measure(parsed: Any) -> tuple[float, float]:
    """Return the logarithm of the number of ways to match, and the longest match's length."""
    parts = [_measure_part(str(kind), content) for kind, content in parsed]
    return sum(ways for ways, _ in parts), sum(length for _, length in parts)


def _measure_part(kind: str, content: Any) -> tuple[float, float]:
    match kind:
        case "LITERAL" | "IN" | "ANY":
            return 0, 1
        case "AT":
            return 0, 0
        case "SUBPATTERN":
            return _measure(content[-1])
        case "BRANCH":
            ways, lengths = zip(*map(_measure, content[1]), strict=True)
            return max(ways) + log2(len(ways)), max(lengths)
        case "MAX_REPEAT" | "MIN_REPEAT" if content[1] is not _PARSER.MAXREPEAT:
            least, most, repeated = content
            ways_once, characters = _measure(repeated)
            return most * ways_once + log2(most - least + 1), most * characters
    return inf, inf
