"""Reading a JSON object field by field, with errors that name the field's path."""

from collections.abc import Mapping
from typing import Any

import orjson

from shell_router.errors import InvalidField, InvalidRequest

SHOWN_CHARACTERS = 40


class Fields:
    """A JSON object being read. A field that is null counts as absent. Remembers what was never asked for."""

    def __init__(self, value: Mapping[str, Any], path: str = "") -> None:
        self._value = value
        self._path = path
        self._asked: set[str] = set()

    @property
    def unread(self) -> tuple[str, ...]:
        """Fields that are set and that nobody asked for."""
        return tuple(name for name, value in self._value.items() if name not in self._asked and value is not None)

    def path(self, name: str) -> str:
        """The path of field `name` from the body's root."""
        return f"{self._path}.{name}" if self._path else name

    def raw(self, name: str) -> Any:
        """The field as parsed; None where absent."""
        self._asked.add(name)
        return self._value.get(name)

    def refuse(self, name: str, what: str, remedy: str = "") -> InvalidField:
        """The error that says `what` is wrong with field `name`."""
        path = self.path(name)
        return InvalidField(f"{path} {what}.", field=path, remedy=remedy)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.raw(name)
        if value is None or isinstance(value, str):
            return value
        raise self.refuse(name, f"must be a string, not {shown(value)}")

    def required_text(self, name: str) -> str:
        """A string that is there and not empty."""
        value = self.text(name)
        if not value:
            raise self.refuse(name, "is missing", "Set it to a non-empty string.")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """A string, or an array of several different ones; there, and nothing of it empty."""
        value = self.raw(name)
        if not isinstance(value, list):
            return (self.required_text(name),)
        if not value or not all(isinstance(one, str) and one for one in value) or len(set(value)) < len(value):
            raise self.refuse(name, "must be a string or an array of different strings", "Name each once.")
        return tuple(value)

    def flag(self, name: str) -> bool:
        """A boolean; False where absent."""
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.refuse(name, f"must be true or false, not {shown(value)}")

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number from `low` to `high`."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, f"must be a number, not {shown(value)}")
        return self._within(name, value, low, high)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number from `low` to `high`."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, f"must be a whole number, not {shown(value)}")
        return int(self._within(name, value, low, high))

    def _within(self, name: str, value: float, low: float, high: float) -> float:
        if not low <= value <= high:
            raise self.refuse(name, f"must be from {low} to {high}, not {value}")
        return value

    def listed(self, name: str) -> list[Any] | None:
        """An array."""
        value = self.raw(name)
        if value is None or isinstance(value, list):
            return value
        raise self.refuse(name, f"must be an array, not {shown(value)}")

    def object(self, name: str) -> "Fields | None":
        """An object, to be read in turn."""
        value = self.raw(name)
        return None if value is None else as_object(value, self.path(name))


def as_object(value: Any, path: str) -> Fields:
    """`value`, found at `path`, as an object."""
    if not isinstance(value, dict):
        raise InvalidField(f"{path} must be an object, not {shown(value)}.", field=path)
    return Fields(value, path)


def parse_body(body: bytes) -> Fields:
    """A request's body, which must be a JSON object."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The body is not JSON: {error}.", remedy="Send one JSON object.") from None
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"The body must be a JSON object, not {shown(parsed)}.")
    return Fields(parsed)


def shown(value: Any) -> str:
    """The value as an error names it: a short one itself, a longer one by its type."""
    match value:
        case dict():
            return "an object"
        case list():
            return "an array"
        case str() if len(value) > SHOWN_CHARACTERS:
            return "a string"
    return orjson.dumps(value).decode()
