"""Forms that values in a YAML file may have. Each checks a value and describes itself as JSON
Schema.

One table of forms feeds both the loader and the editors' schema, so the two cannot disagree.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

from shell_router.topology import document
from shell_router.topology.document import Path, Problem

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Form:
    """What a value must look like. `about` says what it means."""

    about: str

    types: ClassVar[tuple[type, ...]] = (object,)
    """What a value must be before `problems` looks at it."""

    @property
    def noun(self) -> str:
        """Completes "must be ..."."""
        return "a JSON value"

    def fits(self, value: object) -> bool:
        """Whether the value is of the kind that this form is for."""
        return isinstance(value, self.types)

    def problems(self, value: Any, at: Path) -> Iterator[Problem]:
        """Everything wrong with a value that `fits`."""
        return iter(())

    def schema(self) -> Schema:
        """The form as JSON Schema."""
        return {"description": self.about}


def check(form: Form, value: object, at: Path) -> Iterator[Problem]:
    """Everything wrong with `value`, which stands at `at`."""
    if form.fits(value):
        return form.problems(value, at)
    return iter([_not_a(form, value, at, _remedy(form, value))])


def _not_a(form: Form, value: object, at: Path, remedy: str = "") -> Problem:
    if isinstance(form, Secret):
        found = _kind(value)
    else:
        found = shown(value)
    return Problem(
        at, f"{spelled(at)} must be {form.noun}, not {found}.", remedy or f"Write {form.noun}."
    )


def _remedy(form: Form, value: object) -> str:
    """What to write instead. YAML takes 3 for a number where a name is meant, and 1e3 for text."""
    if isinstance(form, Text | Secret) and form.fits("") and isinstance(value, int | float):
        return "Put it in quotes."
    if isinstance(form, Number) and isinstance(value, str):
        with suppress(ValueError):
            number = float(value)
            if form.allows(number) and (number.is_integer() or not form.whole):
                return f"Write {number:.15g}."
    return ""


def spelled(at: Path) -> str:
    """A path of a file, which may be its top."""
    return document.spelled(at) or "The file"


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
            if isinstance(value, float) or abs(value) < 10**15:
                return f"{value:.6g}"
            return "a huge number"
    text = str(value)
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _kind(value: object) -> str:
    """What `shown` tells of a secret."""
    if isinstance(value, str):
        return "this text"
    if isinstance(value, int | float):
        return "a number"
    return shown(value)


def suggestion(name: str, known: Sequence[str]) -> str:
    """A remedy for an unknown name: the closest known one, or all of them."""
    close = get_close_matches(name, known, n=1)
    if close:
        return f"Did you mean '{close[0]}'?"
    return f"Known: {', '.join(known) or 'none'}."


@dataclass(frozen=True, slots=True)
class Text(Form):
    """Any text, or one that matches a whole `pattern`."""

    pattern: str = ""
    noun: str = "text"

    types = (str,)

    def problems(self, value: str, at: Path) -> Iterator[Problem]:
        if self.pattern and not re.fullmatch(self.pattern, value, re.DOTALL):
            yield _not_a(self, value, at)

    def schema(self) -> Schema:
        if self.pattern:
            pattern = {"pattern": f"^(?:{self.pattern})$"}
        else:
            pattern = {}
        return {"type": "string", "description": self.about, **pattern}


NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


def name_form(about: str) -> Text:
    """A name that a file gives: a topology's, an agent's, a cluster's, a step's."""
    return Text(about, NAME_PATTERN, "a name of letters, digits, '.', '_' and '-'")


def model_name_form(about: str) -> Text:
    """A name that requests ask for, as those of models on hubs: `Qwen/Qwen3-8B`."""
    return Text(
        about, NAME_PATTERN.replace("_-", "_/-"), "a name of letters, digits, '.', '_', '-' and '/'"
    )


@dataclass(frozen=True, slots=True)
class OneOf(Form):
    """One of a few words."""

    options: tuple[str, ...]

    types = (str,)

    @property
    def noun(self) -> str:
        return " or ".join(f"'{option}'" for option in self.options)

    def problems(self, value: str, at: Path) -> Iterator[Problem]:
        if value not in self.options:
            yield _not_a(self, value, at, suggestion(value, self.options))

    def schema(self) -> Schema:
        return {"enum": list(self.options), "description": self.about}


@dataclass(frozen=True, slots=True)
class Switch(Form):
    """On or off. YAML 1.1 reads bare `on` as true; editors, which follow YAML 1.2, read it as
    text."""

    noun = "on or off"

    def fits(self, value: object) -> bool:
        return isinstance(value, bool) or value in ("on", "off")

    def schema(self) -> Schema:
        return {"enum": [True, False, "on", "off"], "description": self.about}


@dataclass(frozen=True, slots=True)
class Number(Form):
    """A finite number within bounds; with `whole`, an integer. Its size is below `limit`."""

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    whole: bool = False
    limit: float = 10**15
    """Beyond 10**15, whole numbers do not pass through a float unchanged."""

    @property
    def noun(self) -> str:
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (
                ("above", self.above),
                ("at least", self.at_least),
                ("at most", self.at_most),
            )
            if bound is not None
        ]
        return " ".join(
            ["a whole number" if self.whole else "a number", " and ".join(bounds)]
        ).strip()

    def fits(self, value: object) -> bool:
        return not isinstance(value, bool) and isinstance(value, int if self.whole else int | float)

    def problems(self, value: float, at: Path) -> Iterator[Problem]:
        if not self.allows(value):
            yield _not_a(self, value, at)

    def allows(self, value: float) -> bool:
        """Whether the number is within the bounds."""
        return (
            abs(value) < self.limit
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


@dataclass(frozen=True, slots=True)
class ListOf(Form):
    """A list of at least `at_least` and at most `at_most` items; with `distinct`, each once."""

    item: Form
    at_least: int = 0
    at_most: int = 10_000
    noun: str = "a list"
    distinct: bool = False

    types = (list,)

    def problems(self, value: list[object], at: Path) -> Iterator[Problem]:
        if not self.at_least <= len(value) <= self.at_most:
            wanted = f"{self.at_least} to {self.at_most} items"
            yield Problem(
                at, f"{spelled(at)} must hold {wanted}, not {len(value)}.", f"Write {wanted}."
            )
        seen: set[str] = set()
        for position, item in enumerate(value):
            yield from check(self.item, item, (*at, position))
            if self.distinct and isinstance(item, str):
                if item in seen:
                    yield Problem(
                        (*at, position),
                        f"{spelled(at)} names {shown(item)} twice.",
                        "Name it once.",
                    )
                seen.add(item)

    def schema(self) -> Schema:
        bounds: Schema = {"minItems": self.at_least, "maxItems": self.at_most}
        if self.distinct:
            bounds["uniqueItems"] = True
        return {"type": "array", "description": self.about, "items": self.item.schema(), **bounds}


@dataclass(frozen=True, slots=True)
class MappingOf(Form):
    """A mapping from names of the user's choice to values of one form, at least `at_least` of
    them."""

    key: Form
    item: Form
    at_least: int = 1

    types = (Mapping,)
    noun = "a mapping"

    def problems(self, value: Mapping[str, object], at: Path) -> Iterator[Problem]:
        if len(value) < self.at_least:
            yield Problem(at, f"{spelled(at)} is empty.", "Name at least one entry.")
        for key, item in value.items():
            yield from check(self.key, key, (*at, key))
            yield from check(self.item, item, (*at, key))

    def schema(self) -> Schema:
        names = self.key.schema()
        values = self.item.schema()
        about = {"description": self.about, "minProperties": self.at_least}
        return {"type": "object", **about, "propertyNames": names, "additionalProperties": values}


@dataclass(frozen=True, slots=True)
class Block(Form):
    """A mapping with known keys. With `open_to` other keys are accepted, of that form.

    A block with a `name` stands once in the JSON Schema, under `$defs`, and is referred to
    elsewhere.
    """

    fields: Mapping[str, Form]
    required: tuple[str, ...] = ()
    open_to: Form | None = None
    name: str = ""

    types = (Mapping,)
    noun = "a mapping"

    def problems(self, value: Mapping[str, object], at: Path) -> Iterator[Problem]:
        for key, item in value.items():
            form = self.fields.get(key, self.open_to)
            if form is None:
                place = f" in {spelled(at)}" if at else ""
                yield Problem(
                    (*at, key), f"Unknown key '{key}'{place}.", suggestion(key, tuple(self.fields))
                )
            else:
                yield from check(form, item, (*at, key))
        for key in self.required:
            if key not in value:
                yield Problem(at, f"{spelled(at)} lacks '{key}'.", f"Add '{key}'.")

    def schema(self) -> Schema:
        if self.name:
            return {"$ref": f"#/$defs/{self.name}"}
        return self.definition()

    def definition(self) -> Schema:
        """The block spelled out."""
        schema: Schema = {"type": "object", "description": self.about}
        schema["properties"] = {key: form.schema() for key, form in self.fields.items()}
        schema["additionalProperties"] = self.open_to.schema() if self.open_to else False
        if self.required:
            return {**schema, "required": list(self.required)}
        return schema


@dataclass(frozen=True, slots=True)
class Either(Form):
    """A value of the first of several forms that it fits."""

    forms: tuple[Form, ...]

    @property
    def noun(self) -> str:
        return " or ".join(form.noun for form in self.forms if form.noun)

    def fits(self, value: object) -> bool:
        return any(form.fits(value) for form in self.forms)

    def problems(self, value: object, at: Path) -> Iterator[Problem]:
        return next(form for form in self.forms if form.fits(value)).problems(value, at)

    def schema(self) -> Schema:
        return {"description": self.about, "anyOf": [form.schema() for form in self.forms]}


@dataclass(frozen=True, slots=True)
class Secret(Form):
    """A value of another form that is, or holds, a secret: errors, which logs take, name its kind
    alone.
    """

    form: Form

    @property
    def noun(self) -> str:
        return self.form.noun

    def fits(self, value: object) -> bool:
        return self.form.fits(value)

    def problems(self, value: object, at: Path) -> Iterator[Problem]:
        found = self.form.problems(value, at)
        if isinstance(value, Mapping):  # its entries are secrets themselves, or none
            yield from found
        elif any(found):
            yield _not_a(self, value, at)

    def schema(self) -> Schema:
        return self.form.schema()


@dataclass(frozen=True, slots=True)
class Nothing(Form):
    """A key without a value, as if it were left out."""

    types = (type(None),)
    noun = ""

    def schema(self) -> Schema:
        return {"type": "null"}


@dataclass(frozen=True, slots=True)
class Deferred(Form):
    """A block whose keys are looked up only where a file has it."""

    load: Callable[[], Form]

    types = (Mapping,)
    noun = "a mapping"

    def problems(self, value: object, at: Path) -> Iterator[Problem]:
        return self.load().problems(value, at)

    def schema(self) -> Schema:
        return self.load().schema()


@dataclass(frozen=True, slots=True)
class Json(Form):
    """Anything that JSON can say, which leaves out infinities and NaN."""

    def problems(self, value: Any, at: Path) -> Iterator[Problem]:
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(at, f"{spelled(at)} is not a finite number.", "Write a finite number.")
        steps: Mapping[Any, Any] = dict(enumerate(value)) if isinstance(value, list) else {}
        for step, item in (value if isinstance(value, Mapping) else steps).items():
            yield from self.problems(item, (*at, step))
