"""Reads YAML files into frozen dataclasses. Their annotations are the table of keys, forms and
meanings.

`Annotated[int, "What it is for."]` describes a setting; a form, as in `Annotated[int, Number("...",
above=0)]`, checks its values too. The same table gives the JSON Schema and the reference page.
Errors begin with `file:line:`.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shell_router.errors import ConfigError
from shell_router.topology.document import Document, clients_document, read_document, read_text
from shell_router.topology.document import Path as DocumentPath
from shell_router.topology.forms import (
    Block,
    Deferred,
    Either,
    Form,
    ListOf,
    MappingOf,
    Nothing,
    Number,
    OneOf,
    Schema,
    Secret,
    Switch,
    Text,
    check,
)

T = TypeVar("T")
SEE_PAGE = "docs/reference/settings.md explains every setting."
LARGEST = 1e300

Kinds = Mapping[str, Callable[[], type]]
"""Per engine kind what gives the dataclass of its settings."""
NO_KINDS: Kinds = {}
_MAPPINGS = (Mapping, dict)
_SCALARS: Mapping[Any, Callable[[Any], Any]] = {
    bool: lambda value: value in (True, "on"),
    float: float,
}
SECRET = object()
"""Annotates, behind the description, what errors must not show."""
KIND_KEYS = object()
"""Annotates the field that takes the key of an engine kind: a mapping from its name to its
settings.
"""


def read_file(
    path: Path, kind: type[T], *, see: str = SEE_PAGE, kinds: Kinds = NO_KINDS
) -> tuple[T, Callable[[DocumentPath], str]]:
    """The file's content as a `kind`, a dataclass, and what gives `file:line` of a place in it.

    Relative paths in the file count from its folder. `see` names the page that explains the file.
    Raises ConfigError.
    """
    text = read_text(path, ConfigError)
    if not text.strip():
        raise ConfigError(f"{path}:1: the file is empty.", remedy=see)
    document = read_document(text, source=str(path), error=ConfigError)
    document.refuse(check(form_of(kind, kinds=kinds), document.value, ()))
    found: T = _Builder(document, path.parent, see, kinds).build(kind, document.value, ())
    return found, lambda at: f"{path}:{document.line_of(at)}"


def read_sent(kind: type[T], value: Mapping[str, Any], field: str) -> T:
    """What a client sent in `field`, as a `kind`. Raises InvalidField, and ConfigError for values
    that do not fit.
    """
    document = clients_document(value, field)
    document.refuse(check(form_of(kind), value, ()))
    found: T = _Builder(document, Path(), SEE_PAGE, NO_KINDS).build(kind, value, ())
    return found


def json_schema(kind: type, title: str, kinds: Kinds = NO_KINDS) -> Schema:
    """JSON Schema 2020-12 of the files that are read as `kind`."""
    form = form_of(kind, kinds=kinds)
    assert isinstance(form, Block)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **form.definition(),
    }


def _plain(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        return get_args(hint)[0]
    return hint


def _members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union, without None; else the kind alone."""
    if _is_union(kind):
        return tuple(one for one in get_args(kind) if one is not NoneType)
    return (kind,)


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (UnionType, Union)


def file_fields(kind: type) -> list[Field[Any]]:
    """The fields that files may set. `metadata={"file": False}` keeps one for code: a constant of
    an algorithm.
    """
    return [each for each in fields(kind) if each.metadata.get("file", True)]


def takes_kinds(hint: Any) -> bool:
    """Whether a field of this annotation takes the keys of engine kinds."""
    return get_origin(hint) is Annotated and KIND_KEYS in get_args(hint)[1:]


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0]


def _is_required(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def form_of(hint: Any, about: str = "", kinds: Kinds = NO_KINDS) -> Form:
    """The form of values of this annotation: a dataclass, scalar, Path, Literal, tuple, Mapping, or
    a union.
    """
    note, *marks = get_args(hint)[1:] if get_origin(hint) is Annotated else (about,)
    kind = _plain(hint)
    if not isinstance(note, str):
        form: Form = note
    elif len(members := _members(kind)) > 1:
        form = Either(note, tuple(form_of(one, note, kinds) for one in members))
    else:
        form = _form_of_one(members[0], note, kinds)
    about = getattr(form, "about", "")
    if _is_union(kind) and NoneType in get_args(kind):
        form = Either(about, (form, Nothing("Left out.")))
    if SECRET in marks:
        return Secret(about, form)
    return form


def _form_of_one(kind: Any, about: str, kinds: Kinds) -> Form:
    origin = get_origin(kind)
    inner = get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _block(kind, about or _first_line(kind), kinds)
    if origin is tuple:
        return ListOf(about, form_of(inner[0], kinds=kinds))
    if origin is Literal:
        return OneOf(about, inner)
    if origin is not None:
        return MappingOf(about, Text("Name."), form_of(inner[1], kinds=kinds), at_least=0)
    scalars: dict[type, Form] = {
        str: Text(about),
        Path: Text(about, noun="a path"),
        bool: Switch(about),
        int: Number(about, whole=True, limit=LARGEST),
        float: Number(about, limit=LARGEST),
    }
    return scalars[kind]


def _block(kind: type, about: str, kinds: Kinds) -> Block:
    hints = _hints(kind)
    given = file_fields(kind)
    names = [each.name for each in given if not takes_kinds(hints[each.name])]
    forms: dict[str, Form] = {name: form_of(hints[name], kinds=kinds) for name in names}
    if len(names) < len(given):
        for name, load in kinds.items():
            settings = Deferred("", lambda load=load: form_of(load(), kinds=kinds))  # type: ignore[misc]
            forms[name] = Either("An engine kind.", (settings, Nothing("Left out.")))
    required = tuple(each.name for each in given if _is_required(each))
    return Block(about, forms, required)


@dataclass(frozen=True, slots=True)
class _Builder:
    """Turns checked values into what annotations ask for. Dataclasses check what forms cannot, such
    as sums.
    """

    document: Document
    folder: Path
    see: str
    kinds: Kinds

    def build(self, hint: Any, value: Any, at: DocumentPath) -> Any:
        """The value at `at` as the annotation has it."""
        kind = _plain(hint)
        if _is_union(kind):
            fitting = (one for one in _members(kind) if form_of(one).fits(value))
            if value is None:
                return None
            return self.build(next(fitting), value, at)
        if is_dataclass(kind) and isinstance(kind, type):
            return self._section(kind, value, at)
        inner = get_args(kind)
        if get_origin(kind) is tuple:
            return tuple(
                self.build(inner[0], item, (*at, position)) for position, item in enumerate(value)
            )
        if get_origin(kind) in _MAPPINGS:
            return {name: self.build(inner[1], item, (*at, name)) for name, item in value.items()}
        if kind is Path:
            return self.folder / Path(value).expanduser()
        return _SCALARS.get(kind, lambda one: one)(value)

    def _section(self, kind: type, given: Mapping[str, Any], at: DocumentPath) -> Any:
        hints = _hints(kind)
        values = {
            name: self.build(hints[name], item, (*at, name))
            for name, item in given.items()
            if name in hints
        }
        if engine := {
            name: item for name, item in given.items() if name not in hints and item is not None
        }:
            taking = next(name for name, hint in hints.items() if takes_kinds(hint))
            values[taking] = {
                name: self.build(self.kinds[name](), item, (*at, name))
                for name, item in engine.items()
            }
        try:
            return kind(**values)
        except ConfigError as error:
            where = f"{self.document.source}:{self.document.line_of(at)}"
            raise ConfigError(
                f"{where}: {str(error.args[0]).rstrip('.')}.", remedy=error.remedy or self.see
            ) from None
