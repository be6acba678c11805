"""Reads a YAML file into frozen dataclasses, by their annotations. Every error begins with `file:line:`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from shell_router.errors import ConfigError
from shell_router.topology.document import Document, read_document
from shell_router.topology.document import Path as Place

NOUNS: Mapping[type, str] = {
    str: "text",
    Path: "a path",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}
SEE_PAGE = "docs/configuration.md explains every setting."


def read_file(path: Path, kind: type, *, see: str = SEE_PAGE) -> tuple[Any, Callable[[Place], str]]:
    """The file's content as a `kind`, a dataclass, and what gives `file:line` of a place in it.

    Relative paths in the file count from its folder. `see` names the page that explains the file. Raises ConfigError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.", remedy="Name a file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text.", remedy="Save it as UTF-8.") from error
    if not text.strip():
        raise ConfigError(f"{path}:1: the file is empty.", remedy=see)
    document = read_document(text, source=str(path))
    return _Reader(document, path.parent, see).read(kind, ()), lambda at: f"{path}:{document.line_of(at)}"


class _Reader:
    """Turns the values of one document into what annotations ask for."""

    def __init__(self, document: Document, folder: Path, see: str) -> None:
        self._see = see
        self._document = document
        self._folder = folder

    def read(self, kind: Any, at: Place) -> Any:
        """The value at `at` as a `kind`: a dataclass, scalar, Path, Literal, tuple, Mapping, or a union."""
        value = self._value(at)
        if get_origin(kind) is UnionType:
            return None if value is None else self.read(_fitting(get_args(kind), value), at)
        if is_dataclass(kind):
            return self._section(kind, at)
        if get_origin(kind) is tuple:
            self._require(list, "a list", at)
            return tuple(self.read(get_args(kind)[0], (*at, index)) for index in range(len(value)))
        if get_origin(kind) is Literal:
            return self._choice(get_args(kind), at)
        if get_origin(kind) is not None:
            self._require(dict, "named entries", at)
            return {name: self.read(get_args(kind)[1], (*at, name)) for name in value}
        return self._scalar(kind, at)

    def _section(self, kind: Any, at: Place) -> Any:
        given = self._require(dict, "settings", at)
        hints = get_type_hints(kind)
        for name in given:
            if name not in hints:
                self._fail((*at, name), f"unknown setting {name!r}", _suggestion(name, hints))
        for each in fields(kind):
            if _is_required(each) and each.name not in given:
                self._fail(at, f"{each.name!r} is missing", f"Add {each.name} there.")
        values = {name: self.read(hints[name], (*at, name)) for name in given}
        try:
            return kind(**values)
        except ConfigError as error:
            self._fail(at, str(error.args[0]).rstrip("."), error.remedy or self._see)

    def _choice(self, choices: tuple[str, ...], at: Place) -> str:
        value = self._value(at)
        if value not in choices:
            self._fail(at, f"{_shown(value)} is not known", f"Choose {' or '.join(choices)}.")
        return str(value)

    def _scalar(self, kind: type, at: Place) -> Any:
        wanted = {Path: str, float: (int, float)}.get(kind, kind)
        value = self._require(wanted, NOUNS[kind], at)
        if kind is Path:
            return self._folder / Path(value).expanduser()
        try:
            return kind(value)
        except OverflowError:
            self._fail(at, "the number is too large", self._see)

    def _require(self, kind: Any, noun: str, at: Place) -> Any:
        value = self._value(at)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self._fail(at, f"expected {noun}, not {_shown(value)}", _remedy(kind, value) or self._see)
        return value

    def _value(self, at: Place) -> Any:
        value = self._document.value
        for step in at:
            value = value[step]
        return value

    def _fail(self, at: Place, message: str, remedy: str) -> NoReturn:
        raise ConfigError(f"{self._document.source}:{self._document.line_of(at)}: {message}.", remedy=remedy)


def _fitting(kinds: tuple[Any, ...], value: Any) -> Any:
    """The member of a union that a value is meant for: the dataclass for settings, else the scalar."""
    wanted = [kind for kind in kinds if kind is not NoneType]
    return next((kind for kind in wanted if is_dataclass(kind) == isinstance(value, dict)), wanted[0])


def _is_required(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _shown(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case dict():
            return "settings"
        case list():
            return "a list"
    return repr(value)


def _remedy(kind: Any, value: Any) -> str:
    """For a value of the wrong kind, where there is one to give. YAML takes 1e3 for text."""
    if kind is str:
        return "Put it in quotes."
    if kind not in (int, (int, float)) or not isinstance(value, str):
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    fits = math.isfinite(number) and (kind is not int or number.is_integer())
    return f"Write {number:.15g}." if fits else ""


def _suggestion(name: str, known: Mapping[str, Any]) -> str:
    close = get_close_matches(name, known, n=1)
    return f"Did you mean {close[0]!r}?" if close else f"Known here: {', '.join(known)}."
