"""Read documents as typed values, in one way for all kinds of file.

A class says with its annotations what a file may hold; pydantic checks and builds it. All problems
of a file are named at once, each with its line, what the place may hold, and a remedy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import islice
from pathlib import Path as File
from typing import Any, Literal, TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from shell_router.errors import ConfigError
from shell_router.files.document import (
    Document,
    Path,
    Problem,
    Values,
    client_document,
    read_document,
    read_text,
    spell,
)
from shell_router.files.schema import (
    Schema,
    alternatives,
    forms_at,
    json_schema,
    known_keys,
    options,
    phrase,
)

T = TypeVar("T")
SEE_PAGE = "docs/reference/settings.md explains every setting."
MAX_ERRORS = 1000
"""Errors of one document that are looked at; a client may send a hundred thousand."""
MAX_PROBLEMS = 100
"""Problems of one document that are put into words."""
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_FIRM = ("missing", "value_error", *_UNKNOWN)
"""Kinds of pydantic's errors that hold whichever form of a union was meant."""


def read_file(path: File, kind: type[T], *, see: str = SEE_PAGE) -> tuple[T, Callable[[Path], str]]:
    """Read a YAML file as a `kind`, and return what gives `file:line` of a place in it.

    Relative paths in the file count from its folder. `see` names the page that explains the file.

    Raises:
        ConfigError: The file cannot be read, or it is no `kind`.
    """
    document = load_document(path, see)
    value, problems = check(kind, document.value, folder=path.parent, see=see)
    document.require_none(problems)
    return value, lambda at: f"{path}:{document.line_of(at)}"


def load_document(path: File, see: str) -> Document:
    """Read a YAML file that is no topology. Raises ConfigError; `see` explains an empty file."""
    text = read_text(path, ConfigError)
    return read_document(text, source=str(path), error=ConfigError, see=see)


def read_sent(kind: type[T], value: Values, field: str) -> T:
    """Read what a client sent in `field` as a `kind`.

    Raises:
        InvalidField: The value does not fit.
    """
    document = client_document(value, field)
    sent, problems = check(kind, value)
    document.require_none(problems)
    built: T = sent
    return built


def check(
    kind: Any,
    value: Any,
    at: Path = (),
    *,
    folder: File = File(),
    see: str = "",
    schema: Callable[[], Schema] | None = None,
) -> tuple[Any, list[Problem]]:
    """Build a `kind` from plain values that stand `at` a place of a document.

    Args:
        kind: A dataclass, or another type that pydantic reads.
        value: Plain values, as YAML or JSON has them.
        at: The place in the document, for problems.
        folder: The folder that relative paths count from.
        see: The remedy of problems that have none of their own.
        schema: The JSON Schema that problems speak of, unless it is the kind's own.

    Returns:
        The object that was built, None if there are problems; and the problems.
    """
    adapter, own_schema = _adapter_of(kind)
    extra: Literal["forbid"] | None = "forbid" if is_dataclass(kind) else None
    try:
        built = adapter.validate_json(
            orjson.dumps(value), strict=True, extra=extra, context={"folder": folder}
        )
    except ValidationError as error:
        problems = _problems_of(error, value, (schema or own_schema)(), at, see)
        return None, list(islice(problems, MAX_PROBLEMS))
    return built, []


@cache
def _adapter_of(kind: Any) -> tuple[TypeAdapter[Any], Callable[[], Schema]]:
    return TypeAdapter(kind), cache(lambda: json_schema(kind, ""))


def _problems_of(
    error: ValidationError, value: Any, schema: Schema, at: Path, see: str
) -> Iterator[Problem]:
    """Name each place that is wrong once: pydantic has an error per form of a union."""
    places: dict[Path, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False, include_input=False)[:MAX_ERRORS]:
        places.setdefault(_place_of(detail, value), []).append(detail)
    holders = {place[:depth] for place in places for depth in range(len(place))}
    for place, details in places.items():
        firm = [detail for detail in details if detail["type"] in _FIRM]
        if firm:
            yield from (_firm_problem(detail, place, value, schema, at, see) for detail in firm)
        elif place not in holders:
            yield _wrong_value(details[0], place, value, schema, at)


def _place_of(detail: ErrorDetails, value: Any) -> Path:
    """Follow pydantic's location through the values, which have no steps for forms of unions."""
    path: Path = ()
    for step in detail["loc"]:
        is_key = isinstance(value, Mapping) and step in value
        is_position = isinstance(value, list) and isinstance(step, int) and step < len(value)
        if is_key or is_position:
            path = (*path, step)
            value = value[step]
    return path


def _firm_problem(
    detail: ErrorDetails, place: Path, value: Any, schema: Schema, at: Path, see: str
) -> Problem:
    kind = detail["type"]
    whole = (*at, *place)
    name = spell(whole) or "The file"
    if kind == "missing":
        key = detail["loc"][-1]
        return Problem(whole, f"{name} lacks '{key}'.", f"Add '{key}'.")
    if kind in _UNKNOWN:
        holder = spell(whole[:-1])
        where = f" in {holder}" if holder else ""
        keys = known_keys(schema, forms_at(schema, place[:-1]))
        return Problem(whole, f"Unknown key '{place[-1]}'{where}.", suggest(str(place[-1]), keys))
    return problem_of(detail["ctx"]["error"], whole, see)


def problem_of(error: Exception, at: Path, see: str) -> Problem:
    """Place what a class refused, whose error may have a remedy."""
    message = str(error.args[0]).rstrip(".")
    remedy = getattr(error, "remedy", "") or see
    return Problem(at, f"{spell(at)}: {message}." if at else f"{message}.", remedy)


def _wrong_value(
    detail: ErrorDetails, place: Path, value: Any, schema: Schema, at: Path
) -> Problem:
    whole = (*at, *place)
    forms = forms_at(schema, place)
    if detail["loc"][-1:] == ("[key]",):
        holders = [
            form for outer in forms_at(schema, place[:-1]) for form in alternatives(schema, outer)
        ]
        forms = [form["propertyNames"] for form in holders if "propertyNames" in form]
        found: Any = place[-1]
    else:
        found = _value_at(value, place)
    wanted = phrase(schema, forms)
    shown = _kind_of(found) if _is_secret(schema, place) else show(found)
    message = f"{spell(whole) or 'The file'} must be {wanted}, not {shown}."
    return Problem(whole, message, _remedy(found, schema, forms) or f"Write {wanted}.")


def _value_at(value: Any, place: Path) -> Any:
    for step in place:
        value = value[step]
    return value


def _is_secret(schema: Schema, place: Path) -> bool:
    """Return whether the value at `place`, or one that holds it, is secret."""
    prefixes = (place[:length] for length in range(len(place) + 1))
    return any(form.get("writeOnly") for prefix in prefixes for form in forms_at(schema, prefix))


def _remedy(value: object, schema: Schema, forms: Sequence[Schema]) -> str:
    """Say what to write instead: YAML takes 3 for a number where a name is meant, 1e3 for text."""
    every = [form for outer in forms for form in alternatives(schema, outer)]
    kinds = {form.get("type") for form in every}
    if "string" in kinds and isinstance(value, int | float):
        return "Put it in quotes."
    if not isinstance(value, str):
        return ""
    if kinds & {"integer", "number"}:
        with suppress(ValueError):
            number = float(value)
            if number.is_integer() or "number" in kinds:
                return f"Write {number:.15g}."
    words = [option for form in every for option in options(form) if isinstance(option, str)]
    return suggest(value, words) if words else ""


def show(value: object) -> str:
    """Write a value into an error message, kept short."""
    match value:
        case None:
            return "empty"
        case bool():
            return str(value).lower()
        case Mapping():
            return "a mapping" if value else "an empty mapping"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case int() | float():
            return f"{value:.6g}"
    text = str(value)
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _kind_of(secret: object) -> str:
    if isinstance(secret, str):
        return "this text"
    if isinstance(secret, int | float):
        return "a number"
    return show(secret)


def suggest(name: str, known: Sequence[str]) -> str:
    """Write a remedy for an unknown name: the closest known name, or all of them."""
    close = get_close_matches(name, known, n=1)
    if close:
        return f"Did you mean '{close[0]}'?"
    return f"Known: {', '.join(known) or 'none'}."
