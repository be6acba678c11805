"""The forms a value in a topology file may have. Each checks a value and describes itself as JSON Schema.

One table of forms (`syntax.py`) feeds both the loader and the editors' schema, so the two cannot disagree.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol

from shell_router.topology.document import Path, Problem
from shell_router.topology.prompting import template_pieces

Schema = dict[str, Any]


class Form(Protocol):
    """What a value must look like. `noun` completes "must be ..."; `problems` is asked only of what `fits`."""

    @property
    def noun(self) -> str: ...

    def fits(self, value: object) -> bool: ...

    def problems(self, value: Any, at: Path) -> Iterator[Problem]: ...

    def schema(self) -> Schema: ...


def check(form: Form, value: object, at: Path) -> Iterator[Problem]:
    """Everything wrong with `value`, which stands at `at`."""
    if form.fits(value):
        yield from form.problems(value, at)
    else:
        yield Problem(at, f"{spelled(at)} must be {form.noun}, not {shown(value)}.", f"Write {form.noun}.")


def spelled(at: Path) -> str:
    """A path as people write it: `agents.solver.precursors[0]`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in at)
    return text.removeprefix(".") or "The file"


def shown(value: object) -> str:
    """A value in an error message, kept short."""
    match value:
        case None:
            return "empty"
        case bool():
            return str(value).lower()
        case Mapping():
            return "a mapping"
        case list():
            return "a list"
        case int() | float():
            return f"{value:.6g}" if isinstance(value, float) or abs(value) < 10**15 else "a huge number"
    text = str(value)
    return repr(text if len(text) <= 40 else text[:40] + "...")


def suggestion(name: str, known: Sequence[str]) -> str:
    """A remedy for an unknown name: the closest known one, or all of them."""
    close = get_close_matches(name, known, n=1)
    return f"Did you mean '{close[0]}'?" if close else f"Known: {', '.join(known) or 'none'}."


@dataclass(frozen=True, slots=True)
class Text:
    """Any text, or one that matches a whole `pattern`."""

    about: str
    pattern: str = ""
    noun: str = "text"

    def fits(self, value: object) -> bool:
        return isinstance(value, str)

    def problems(self, value: str, at: Path) -> Iterator[Problem]:
        if self.pattern and not re.fullmatch(self.pattern, value, re.DOTALL):
            yield Problem(at, f"{spelled(at)} must be {self.noun}, not {shown(value)}.", f"Write {self.noun}.")

    def schema(self) -> Schema:
        pattern = {"pattern": f"^(?:{self.pattern})$"} if self.pattern else {}
        return {"type": "string", "description": self.about, **pattern}


@dataclass(frozen=True, slots=True)
class Template:
    """Prompt text in which only `placeholders` may stand, `once` exactly one time."""

    about: str
    placeholders: tuple[str, ...]
    once: str = ""
    noun: str = "text"

    def fits(self, value: object) -> bool:
        return isinstance(value, str)

    def problems(self, value: str, at: Path) -> Iterator[Problem]:
        try:
            names = [name for _, name in template_pieces(value) if name is not None]
        except ValueError as error:
            yield Problem(at, f"{spelled(at)}: {error}.", "Write {{ and }} for braces that are meant as text.")
            return
        for name in dict.fromkeys(names):
            if name not in self.placeholders:
                yield Problem(at, f"{spelled(at)}: unknown placeholder {{{name}}}.", self._remedy)
        if self.once and names.count(self.once) != 1:
            wrong = f"{spelled(at)} holds {{{self.once}}} {names.count(self.once)} times."
            yield Problem(at, wrong, f"Write {{{self.once}}} exactly once.")

    @property
    def _remedy(self) -> str:
        known = ", ".join(f"{{{name}}}" for name in self.placeholders)
        return f"Known here: {known}; write {{{{ and }}}} for braces that are meant as text."

    def schema(self) -> Schema:
        return {"type": "string", "description": self.about}


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    about: str
    options: tuple[str, ...]

    @property
    def noun(self) -> str:
        return " or ".join(f"'{option}'" for option in self.options)

    def fits(self, value: object) -> bool:
        return isinstance(value, str)

    def problems(self, value: str, at: Path) -> Iterator[Problem]:
        if value not in self.options:
            yield Problem(
                at, f"{spelled(at)} must be {self.noun}, not {shown(value)}.", suggestion(value, self.options)
            )

    def schema(self) -> Schema:
        return {"enum": list(self.options), "description": self.about}


@dataclass(frozen=True, slots=True)
class Switch:
    """On or off. YAML 1.1 reads bare `on` as true; editors, which follow YAML 1.2, read it as text."""

    about: str
    noun: str = "on or off"

    def fits(self, value: object) -> bool:
        return isinstance(value, bool) or value in ("on", "off")

    def problems(self, value: object, at: Path) -> Iterator[Problem]:
        return iter(())

    def schema(self) -> Schema:
        return {"enum": [True, False, "on", "off"], "description": self.about}


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number within bounds; with `whole`, an integer."""

    about: str
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    whole: bool = False

    @property
    def noun(self) -> str:
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (("above", self.above), ("at least", self.at_least), ("at most", self.at_most))
            if bound is not None
        ]
        return " ".join(["a whole number" if self.whole else "a number", " and ".join(bounds)]).strip()

    def fits(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return isinstance(value, int) or not self.whole

    def problems(self, value: float, at: Path) -> Iterator[Problem]:
        if not self._allows(value):
            yield Problem(at, f"{spelled(at)} must be {self.noun}, not {shown(value)}.", f"Write {self.noun}.")

    def _allows(self, value: float) -> bool:
        return (
            abs(value) < 10**15  # beyond, whole numbers no longer pass through a float unchanged
            and not math.isnan(value)
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
        )

    def schema(self) -> Schema:
        bounds = {"exclusiveMinimum": self.above, "minimum": self.at_least, "maximum": self.at_most}
        kind = "integer" if self.whole else "number"
        given = {name: bound for name, bound in bounds.items() if bound is not None}
        return {"type": kind, "description": self.about, **given}
