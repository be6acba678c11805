"""JSON schemas that move into other schemas: their references go on to point at their parts."""

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any
from urllib.parse import unquote, urljoin

from shell_router.core.exact_json import NewValues
from shell_router.errors import InvalidField

MAX_POINTER = 2**10
"""The most characters of a pointer and of a URI, as each part of a schema may have its own."""
HOLDING = frozenset({"items", "prefixItems", "additionalProperties", "anyOf", "oneOf"})
MAPPING = frozenset({"properties", "patternProperties", "$defs", "definitions"})
"""Keywords that hold schemas, and that map names to schemas."""
JOINING = frozenset(
    {"allOf", "if", "not", "dependentSchemas", "dependencies", "dependentRequired"}
    | {"minProperties", "unevaluatedProperties", "$dynamicRef"}
)
"""Keywords by which another part of the schema may need properties that an object does not name."""


def move_schema(schema: Any, to: str) -> Any:
    """Return the schema with the references that it needs at the pointer `to` of another one.

    Engines resolve all references from the outermost schema and ignore `$id`, which is left out.
    A reference to a place that is not in the schema stays as it is.

    Raises:
        InvalidField: A pointer or a URI is too long.
    """
    pointers: dict[str, str] = {}
    for part, at, base in _list_parts(schema, to, ""):
        if at == to or "$id" in part:
            pointers.setdefault(base, at)
        if isinstance(anchor := part.get("$anchor"), str):
            pointers[f"{base}#{anchor}"] = at
    return _move(schema, "", pointers)


def close_objects(schema: Any) -> Any:
    """Return the schema with no properties but those that its objects name.

    Objects that say which others they take stay as they are. So does a schema of which several
    parts may hold for the same object. xgrammar, SGLang's default, closes objects by itself;
    llguidance lets a model write foreign properties up to its limit.
    """
    for part in _list_objects(schema):
        chooses = part.keys() & {"anyOf", "oneOf", "$ref"}
        if part.keys() & JOINING or (chooses and part.keys() & {"properties", "required"}):
            return schema
    return _close(schema)


def refers_to_itself(schema: Any) -> bool:
    """Tell whether a part is, by references alone, itself: SGLang follows them without end.

    Raises what `move_schema` does.
    """
    same: dict[str, list[str]] = {}
    for part, at, _ in _list_parts(move_schema(schema, "#"), "#", ""):
        same[at] = [unquote(part["$ref"])] if isinstance(part.get("$ref"), str) else []
        for name in ("allOf", "anyOf", "oneOf"):
            same[at] += [f"{at}/{name}/{step}" for step, _ in _list_items(part.get(name))]
    try:
        TopologicalSorter(same).prepare()
    except CycleError:
        return True
    return False


def allows_long_numbers(schema: Any) -> bool:
    """Tell whether `enum` or `const` has a number over 64 bits, in whose place another is written.

    Raises what `move_schema` does.
    """
    for part, _, _ in _list_parts(schema, "#", ""):
        values = part.get("enum")
        for value in [part.get("const"), *(values if isinstance(values, list) else ())]:
            if isinstance(value, int | float) and abs(value) >= 2**63:
                return True
    return False


def _list_parts(part: Any, at: str, base: str) -> Iterator[tuple[NewValues, str, str]]:
    """Yield all objects with their pointers and the URIs that their references begin from."""
    if isinstance(part, dict):
        base = _find_base(part, base)
        yield part, at, base
    if part and len(at) + len(base) > MAX_POINTER and isinstance(part, dict | list):
        raise InvalidField(
            f"The schema has a path or an $id of more than {MAX_POINTER} characters.",
            field="tools",
            remedy="Shorten its names.",
        )
    for name, inner in _list_items(part):
        step = str(name).replace("~", "~0").replace("/", "~1")
        yield from _list_parts(inner, f"{at}/{step}", base)


def _list_items(part: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(part, dict):
        yield from part.items()
    elif isinstance(part, list):
        yield from enumerate(part)


def _list_objects(part: Any) -> Iterator[NewValues]:
    if isinstance(part, dict):
        yield part
    for _, inner in _list_items(part):
        yield from _list_objects(inner)


def _close(part: Any) -> Any:
    if isinstance(part, list):
        return [_close(inner) for inner in part]
    if not isinstance(part, dict):
        return part
    closed = dict(part)
    for name in part.keys() & HOLDING:
        closed[name] = _close(part[name])
    for name in part.keys() & MAPPING:
        if isinstance(part[name], dict):
            closed[name] = {key: _close(inner) for key, inner in part[name].items()}
    names = part.get("properties")
    required = part.get("required", [])
    if not isinstance(names, dict) or not isinstance(required, list):
        return closed
    if all(isinstance(name, str) and name in names for name in required):
        closed.setdefault("additionalProperties", False)
    return closed


def _find_base(part: NewValues, base: str) -> str:
    own = part.get("$id")
    return _join(base, own).removesuffix("#") if isinstance(own, str) else base


def _join(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:  # it is no URL
        return reference


def _move(part: Any, base: str, pointers: dict[str, str]) -> Any:
    if isinstance(part, list):
        return [_move(inner, base, pointers) for inner in part]
    if not isinstance(part, dict):
        return part
    base = _find_base(part, base)
    moved: NewValues = {}
    for name, inner in part.items():
        if name == "$ref" and isinstance(inner, str):
            moved[name] = _point(inner, base, pointers)
        elif name != "$id" or not isinstance(inner, str):
            moved[name] = _move(inner, base, pointers)
    return moved


def _point(reference: str, base: str, pointers: dict[str, str]) -> str:
    """Return the reference as a pointer from the outermost schema."""
    uri = base + reference if reference.startswith("#") else _join(base, reference)
    if uri in pointers:
        return pointers[uri]
    document, _, pointer = uri.partition("#")
    if document in pointers and (not pointer or pointer.startswith("/")):
        return pointers[document] + pointer
    return reference
