"""Read documents as typed values, in one way for all kinds of file.

A class says with its annotations what a file may hold; pydantic checks and builds it. All problems
of a file are reported at once, each with its line, what is expected there, and a remedy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import islice
from pathlib import Path as File
from typing import Any, Literal, TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from shell_router.errors import ConfigError, hide_user
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
    forms_at,
    json_schema,
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
"""Pydantic's types of errors that are certain, whichever form of a union was meant."""


def read_file(path: File, kind: type[T], *, see: str = SEE_PAGE) -> tuple[T, Callable[[Path], str]]:
    """Read a YAML file as a `kind`; also return a function that gives `file:line` of a place.

    Relative paths in the file count from its folder. `see` names the page that explains the file.

    Raises:
        ConfigError: The file cannot be read, or it is no `kind`.
    """
    document = load_document(path, see)
    value, problems = check(kind, document.value, folder=path.parent, see=see)
    document.require_none(problems)
    return value, lambda at: f"{path}:{document.line_of(at)}"


def load_document(path: File, see: str, environ: Mapping[str, str] | None = None) -> Document:
    """Read a YAML file, not of a topology. Raises ConfigError; `see` helps if it is empty."""
    text = read_text(path, ConfigError)
    return read_document(text, source=str(path), error=ConfigError, see=see, environ=environ)


def read_sent(kind: type[T], value: Values, field: str) -> T:
    """Read a value that a client sent in `field` as a `kind`.

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
        see: The remedy of problems without a remedy of their own.
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
        report = _Report(value, (schema or own_schema)(), at, see)
        return None, list(islice(report.problems(error), MAX_PROBLEMS))
    return built, []


@cache
def _adapter_of(kind: Any) -> tuple[TypeAdapter[Any], Callable[[], Schema]]:
    return TypeAdapter(kind), cache(lambda: json_schema(kind, ""))


def problem_of(error: Exception, at: Path, see: str) -> Problem:
    """Return the problem of the value at `at`, which its class refused with `error`."""
    message = str(error.args[0]).rstrip(".")
    remedy = getattr(error, "remedy", "") or see
    return Problem(at, f"{spell(at)}: {message}." if at else f"{message}.", remedy)


@dataclass(frozen=True, slots=True)
class _Report:
    """The problems of a value that stands `at` a place of a document."""

    value: Any
    schema: Schema
    at: Path
    see: str

    def problems(self, error: ValidationError) -> Iterator[Problem]:
        """Report each wrong place once: pydantic reports an error for every form of a union."""
        places: dict[Path, list[ErrorDetails]] = {}
        for detail in error.errors(include_url=False, include_input=False)[:MAX_ERRORS]:
            places.setdefault(self._place_of(detail), []).append(detail)
        holders = {place[:depth] for place in places for depth in range(len(place))}
        for place, details in places.items():
            firm = [detail for detail in details if detail["type"] in _FIRM]
            if firm:
                yield from (self._firm_problem(detail, place) for detail in firm)
            elif place not in holders:
                yield self._wrong_value(details[0], place)

    def _place_of(self, detail: ErrorDetails) -> Path:
        """Return the path to the wrong value: pydantic's location without the forms of unions."""
        path: Path = ()
        value = self.value
        for step in detail["loc"]:
            is_key = isinstance(value, Mapping) and step in value
            is_position = isinstance(value, list) and isinstance(step, int) and step < len(value)
            if is_key or is_position:
                path = (*path, step)
                value = value[step]
        return path

    def _firm_problem(self, detail: ErrorDetails, place: Path) -> Problem:
        whole = (*self.at, *place)
        if detail["type"] == "missing":
            key = detail["loc"][-1]
            return Problem(whole, f"{spell(whole) or 'The file'} lacks '{key}'.", f"Add '{key}'.")
        if detail["type"] == "value_error":
            return problem_of(detail["ctx"]["error"], whole, self.see)
        key = str(place[-1])
        holder = spell(whole[:-1])
        forms = forms_at(self.schema, place[:-1])
        names = [name for form in forms for name in form.get("properties", {})]
        where = f" in {holder}" if holder else ""
        return Problem(whole, f"Unknown key '{key}'{where}.", suggest(key, names))

    def _wrong_value(self, detail: ErrorDetails, place: Path) -> Problem:
        if detail["loc"][-1:] == ("[key]",):
            holders = forms_at(self.schema, place[:-1])
            forms = [form["propertyNames"] for form in holders if "propertyNames" in form]
            value: Any = place[-1]
        else:
            forms = forms_at(self.schema, place)
            value = self.value
            for step in place:
                value = value[step]
        expected = phrase(forms)
        is_secret = any(form.get("writeOnly") for form in forms)
        shown = _kind_of(value) if is_secret else show(value)
        whole = (*self.at, *place)
        message = f"{spell(whole) or 'The file'} must be {expected}, not {shown}."
        return Problem(whole, message, _remedy(value, forms) or f"Write {expected}.")


def _remedy(value: object, forms: Sequence[Schema]) -> str:
    """Say what to write instead: YAML takes 3 for a number where a name is meant, 1e3 for text."""
    kinds = {form.get("type") for form in forms}
    if "string" in kinds and isinstance(value, int | float):
        return "Put it in quotes."
    if not isinstance(value, str):
        return ""
    if kinds & {"integer", "number"}:
        with suppress(ValueError):
            number = float(value)
            if number.is_integer() or "number" in kinds:
                return f"Write {number:.15g}."
    words = [option for form in forms for option in options(form) if isinstance(option, str)]
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
    text = hide_user(str(value))
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _kind_of(secret: object) -> str:
    if isinstance(secret, str):
        return "this text"
    if isinstance(secret, int | float):
        return "a number"
    return show(secret)


def suggest(name: str, names: Sequence[str]) -> str:
    """Write a remedy for an unknown name: the closest known name, or all of them."""
    close = get_close_matches(name, names, n=1, cutoff=0.65)
    if close:
        return f"Did you mean '{close[0]}'?"
    return f"Known: {', '.join(names) or 'none'}."
