"""Objects of JSON read by pydantic: their types, and one refusal by a field's path.

An object's type is a TypedDict, which costs nothing for the fields that are not sent. A field that
is null counts as absent.
"""

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Generic, TypeVar

import orjson
from annotated_types import MinLen
from pydantic import (
    BeforeValidator,
    FailFast,
    TypeAdapter,
    ValidationError,
)

from shell_router.core.exact_json import NewValues, Values, parse_json
from shell_router.errors import InvalidField, InvalidRequest

T = TypeVar("T")


class _OneError(FailFast):
    """The end of an array's validation at its first wrong element; hashable, to be in unions."""

    __hash__ = object.__hash__


Array = Annotated[list[T], _OneError()]
"""An array; of several wrong elements only the first is reported, as there may be a million."""
Name = Annotated[str, MinLen(1)]

SHOWN_CHARACTERS = 40
ALIKE = 0.8
"""The similarity (difflib's ratio) from which an unknown field is taken for a misspelt one."""
CHECKED_NAMES = 16
CHECKED_CHARACTERS = 64

_EXPECTED: Mapping[str, str] = {
    "string_type": "a string",
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "list_type": "an array",
    "dict_type": "an object",
    "none_required": "null",
    "literal_error": "{expected}",
    "union_tag_invalid": "{expected_tags}",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:.15g}",
    "less_than_equal": "at most {le:.15g}",
    "string_too_short": "a string that is not empty",
    "string_too_long": "a string of at most {max_length} characters",
    "string_pattern_mismatch": "a string like {pattern}",
    "too_short": "an array that is not empty",
    "too_long": "an array of at most {max_length} elements",
    "predicate_failed": "another number",
    "value_error": "{error}",
}
"""The expectation behind each of pydantic's types of errors, as words of an error's `ctx`."""


def drop_nulls(value: Any) -> Any:
    """Return an object without its fields that are null, and any other value as it is."""
    if isinstance(value, dict) and None in value.values():
        return {name: field for name, field in value.items() if field is not None}
    return value


without_nulls = BeforeValidator(drop_nulls)
"""Has null fields of an object inside another one count as absent."""


class JsonObject(Generic[T]):
    """A kind of JSON object, of the TypedDict `kind`, with remedies by paths without indexes."""

    def __init__(self, kind: type[T], remedies: Mapping[str, str] | None = None) -> None:
        self.adapter = TypeAdapter(kind)
        self.names = frozenset(kind.__annotations__)
        self._remedies = remedies or {}

    def read(self, sent: Values, path: str = "") -> T:
        """Return the object's known fields that are not null.

        Raises:
            InvalidField: A field is missing or wrong. `path` is the object's own path.
        """
        sent = drop_nulls(sent)
        try:
            fields: T = self.adapter.validator.validate_python(sent, strict=True)
        except ValidationError as failure:
            raise self._error(failure, sent, path) from None
        return fields

    def find_unknown(self, sent: Values, others: Collection[str] = ()) -> list[str]:
        """Return the names of the fields that are neither null nor known, nor one of `others`.

        Raises:
            InvalidField: A name is nearly a known one.
        """
        if sent.keys() <= self.names:
            return []
        unknown = [
            name
            for name, value in sent.items()
            if value is not None and name not in self.names and name not in others
        ]
        for name in unknown[:CHECKED_NAMES]:
            alike = difflib.get_close_matches(
                name[:CHECKED_CHARACTERS], {*self.names, *others}, 1, ALIKE
            )
            if alike:
                raise field_error(name, "is unknown", f"Did you mean {alike[0]}?")
        return unknown

    def _error(self, failure: ValidationError, sent: Any, path: str) -> InvalidField:
        errors: Sequence[Any] = failure.errors(include_url=False)
        first = errors[0]["loc"][:1]
        same = [(_path_of(error, sent), error) for error in errors if error["loc"][:1] == first]
        deepest = max([at for at, _ in same], key=_depth_of)
        there = [error for at, error in same if at == deepest]
        remedy = self._remedies.get(re.sub(r"\[\d+\]", "", deepest), "")
        if path and deepest:
            deepest = f".{deepest}"
        return field_error(path + deepest, _what_is_wrong(there), remedy)


def parse_object(body: bytes, called: str = "body") -> NewValues:
    """Return the JSON object that `body` is; raises InvalidRequest."""
    remedy = "Send one JSON object."
    try:
        value = parse_json(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"The {called} is not JSON: {error}.", remedy=remedy) from None
    if not isinstance(value, dict):
        what = f"The {called} must be a JSON object, not {show(value)}."
        raise InvalidRequest(what, remedy=remedy)
    if b'"topology"' in body:
        require_distinct(body)
    return value


def require_distinct(body: bytes) -> None:
    """Raise InvalidRequest if an object of the JSON text has a name twice: one would be lost."""
    with suppress(RecursionError, ValueError):  # as in `parse_json`
        json.loads(body, object_pairs_hook=_require_distinct_names)


def _require_distinct_names(pairs: Sequence[tuple[str, Any]]) -> None:
    names = set[str]()
    for name, _ in pairs:
        if name in names:
            raise InvalidRequest(f"The key {name!r} is there twice.", remedy="Keep one of them.")
        names.add(name)


def field_error(path: str, what: str, remedy: str = "") -> InvalidField:
    """Return the error that says `what` is wrong at `path`."""
    return InvalidField(f"{path} {what}.", field=path, remedy=remedy)


def show(value: Any) -> str:
    """Return the value as an error names it: a short one itself, a longer one by its type."""
    match value:
        case dict():
            return "an object"
        case []:
            return "an empty array"
        case list():
            return "an array"
        case str() if len(value) > SHOWN_CHARACTERS:
            return "a string"
        case int() if not isinstance(value, bool):
            return str(value)  # orjson writes 64 bits
    return orjson.dumps(value, default=str).decode()


def _depth_of(path: str) -> int:
    return path.count(".") + path.count("[")


def _path_of(error: Values, value: Any) -> str:
    """Return the path of the error's field in `value`, without the names of a union's arms."""
    path = ""
    steps: Sequence[str | int] = error["loc"]
    if error["type"].startswith("union_tag"):
        steps = (*steps, error["ctx"]["discriminator"].strip("'"))
    is_new = error["type"] == "missing" or error["type"].startswith("union_tag")
    for place, step in enumerate(steps, 1):
        if isinstance(step, int):
            path += f"[{step}]"
            value = value[step]
        elif isinstance(value, dict) and (step in value or (is_new and place == len(steps))):
            path += f".{step}"
            value = value.get(step)
    return path.removeprefix(".")


def _what_is_wrong(errors: Sequence[Values]) -> str:
    """Return the reason of errors at one path, which are those of a union's arms."""
    kinds = [error["type"] for error in errors]
    if "missing" in kinds or "union_tag_not_found" in kinds:
        return "is missing"
    if "extra_forbidden" in kinds:
        return "is unknown here"
    expected = [
        _EXPECTED.get(error["type"], "valid").format_map(error.get("ctx", {})) for error in errors
    ]
    phrase = " or ".join(dict.fromkeys(expected))
    value = errors[0]["input"]
    if errors[0]["type"] == "union_tag_invalid":
        value = errors[0]["ctx"]["tag"]
    if errors[0]["type"].endswith(("too_short", "too_long")):
        return f"must be {phrase}"
    return f"must be {phrase}, not {show(value)}"
