"""The forms of `grammar.py` that hold others: lists, mappings, blocks with known keys, alternatives."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shell_router.topology.document import Path, Problem
from shell_router.topology.grammar import Form, Schema, check, spelled, suggestion


@dataclass(frozen=True, slots=True)
class ListOf:
    """A list of at least `at_least` and at most `at_most` items."""

    about: str
    item: Form
    at_least: int = 0
    at_most: int = 10_000
    noun: str = "a list"

    def fits(self, value: object) -> bool:
        return isinstance(value, list)

    def problems(self, value: list[object], at: Path) -> Iterator[Problem]:
        if not self.at_least <= len(value) <= self.at_most:
            wanted = f"{self.at_least} to {self.at_most} items"
            yield Problem(at, f"{spelled(at)} must hold {wanted}, not {len(value)}.", f"Write {wanted}.")
        for position, item in enumerate(value):
            yield from check(self.item, item, (*at, position))

    def schema(self) -> Schema:
        bounds = {"minItems": self.at_least, "maxItems": self.at_most}
        return {"type": "array", "description": self.about, "items": self.item.schema(), **bounds}


@dataclass(frozen=True, slots=True)
class MappingOf:
    """A mapping from names of the user's choice to values of one form; at least one."""

    about: str
    key: Form
    item: Form
    noun: str = "a mapping"

    def fits(self, value: object) -> bool:
        return isinstance(value, Mapping)

    def problems(self, value: Mapping[str, object], at: Path) -> Iterator[Problem]:
        if not value:
            yield Problem(at, f"{spelled(at)} is empty.", "Name at least one entry.")
        for key, item in value.items():
            yield from check(self.key, key, (*at, key))
            yield from check(self.item, item, (*at, key))

    def schema(self) -> Schema:
        names, values = self.key.schema(), self.item.schema()
        about = {"description": self.about, "minProperties": 1}
        return {"type": "object", **about, "propertyNames": names, "additionalProperties": values}


@dataclass(frozen=True, slots=True)
class Block:
    """A mapping with known keys. With `open_to` other keys are let through, of that form.

    A block with a `name` stands once in the JSON Schema, under `$defs`, and is referred to elsewhere.
    """

    about: str
    fields: Mapping[str, Form]
    required: tuple[str, ...] = ()
    open_to: Form | None = None
    name: str = ""
    noun: str = "a mapping"

    def fits(self, value: object) -> bool:
        return isinstance(value, Mapping)

    def problems(self, value: Mapping[str, object], at: Path) -> Iterator[Problem]:
        for key, item in value.items():
            form = self.fields.get(key, self.open_to)
            if form is None:
                place = f" in {spelled(at)}" if at else ""
                yield Problem((*at, key), f"Unknown key '{key}'{place}.", suggestion(key, tuple(self.fields)))
            else:
                yield from check(form, item, (*at, key))
        for key in self.required:
            if key not in value:
                yield Problem(at, f"{spelled(at)} lacks '{key}'.", f"Add '{key}'.")

    def schema(self) -> Schema:
        return {"$ref": f"#/$defs/{self.name}"} if self.name else self.definition()

    def definition(self) -> Schema:
        """The block spelled out."""
        schema: Schema = {"type": "object", "description": self.about}
        schema["properties"] = {key: form.schema() for key, form in self.fields.items()}
        schema["additionalProperties"] = self.open_to.schema() if self.open_to else False
        return {**schema, "required": list(self.required)} if self.required else schema


@dataclass(frozen=True, slots=True)
class Either:
    """A value of one of several forms, told apart by the kind of value."""

    about: str
    forms: tuple[Form, ...]

    @property
    def noun(self) -> str:
        return " or ".join(form.noun for form in self.forms)

    def fits(self, value: object) -> bool:
        return any(form.fits(value) for form in self.forms)

    def problems(self, value: object, at: Path) -> Iterator[Problem]:
        yield from next(form for form in self.forms if form.fits(value)).problems(value, at)

    def schema(self) -> Schema:
        return {"description": self.about, "anyOf": [form.schema() for form in self.forms]}


@dataclass(frozen=True, slots=True)
class Json:
    """Anything that JSON can say, which leaves out infinities and NaN."""

    about: str
    noun: str = "a JSON value"

    def fits(self, value: object) -> bool:
        return True

    def problems(self, value: Any, at: Path) -> Iterator[Problem]:
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(at, f"{spelled(at)} is not a finite number.", "Write a finite number.")
        steps: Mapping[Any, Any] = dict(enumerate(value)) if isinstance(value, list) else {}
        for step, item in (value if isinstance(value, Mapping) else steps).items():
            yield from self.problems(item, (*at, step))

    def schema(self) -> Schema:
        return {"description": self.about}
