"""JSON Schemas of the classes that describe files, and words for what they ask for."""

from collections.abc import Iterator, Sequence
from typing import Any, NotRequired, Required, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

Schema = dict[str, Any]
NO_LIMIT = 2**31 - 1
"""A bound of this size says no more than the type of a number."""
DIALECT = "https://json-schema.org/draft/2020-12/schema"
_BOUNDS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
}
_NOUNS = {"integer": "a whole number", "number": "a number"}


def annotation_text(hint: Any) -> str:
    """Return the first text of an annotation, which describes the setting."""
    if get_origin(hint) in (Required, NotRequired):
        hint = get_args(hint)[0]
    notes = getattr(hint, "__metadata__", ())
    return next((note for note in notes if isinstance(note, str)), "")


def class_text(kind: type) -> str:
    """Return the first paragraph of a class's docstring, as one line."""
    return " ".join((kind.__doc__ or "").strip().split("\n\n")[0].split())


class _Generator(GenerateJsonSchema):
    """JSON Schema whose descriptions are the texts of annotations and docstrings."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Leave titles to types that set one: they complete "must be ..."."""
        return False

    def bool_schema(self, schema: core_schema.BoolSchema) -> Schema:
        """Accept `on` and `off` too, which YAML 1.2 has as text."""
        return {"enum": [True, False, "on", "off"]}

    def dict_schema(self, schema: core_schema.DictSchema) -> Schema:
        """Keep the form of the keys apart from that of the values."""
        written = super().dict_schema(schema)
        for values in written.pop("patternProperties", {}).values():
            written["additionalProperties"] = values
        names = self.generate_inner(schema.get("keys_schema", core_schema.str_schema())).copy()
        if len(names) > 1:
            written["propertyNames"] = names
        return written

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> Schema:
        """Describe a dataclass and its fields."""
        return _describe(schema["cls"], super().dataclass_schema(schema))

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> Schema:
        """Describe a TypedDict and its keys."""
        return _describe(schema["cls"], super().typed_dict_schema(schema))


def _describe(kind: type, written: Schema) -> Schema:
    hints = get_type_hints(kind, include_extras=True)
    for name, form in written["properties"].items():
        if text := annotation_text(hints[name]):
            form["description"] = text
    if kind.__doc__:
        written["description"] = class_text(kind)
    return {"additionalProperties": False, **written}


def json_schema(kind: Any, title: str) -> Schema:
    """Write the JSON Schema 2020-12 of the documents that are read as `kind`."""
    schema: Schema = TypeAdapter(kind).json_schema(schema_generator=_Generator)
    return {"$schema": DIALECT, **schema, "title": title}


def resolve(schema: Schema, form: Schema) -> Schema:
    """Follow the form's reference, if it is one."""
    name = form.get("$ref", "").rpartition("/")[2]
    return {**schema["$defs"][name], **form} if name else form


def alternatives(schema: Schema, form: Schema) -> Iterator[Schema]:
    """Yield the forms of a union, else the form alone; null is left out."""
    form = resolve(schema, form)
    if "anyOf" in form:
        marks = {key: form[key] for key in ("writeOnly",) if key in form}
        for inner in form["anyOf"]:
            yield from alternatives(schema, {**inner, **marks})
    elif form.get("type") != "null":
        yield form


def forms_at(schema: Schema, path: Sequence[str | int]) -> list[Schema]:
    """List the forms that the value at `path` may have."""
    forms = list(alternatives(schema, schema))
    for step in path:
        inner = [form for outer in forms for form in _inside(outer, step)]
        forms = [form for union in inner for form in alternatives(schema, union)]
    return forms


def _inside(form: Schema, step: str | int) -> Iterator[Schema]:
    fields = form.get("properties", {})
    others = form.get("items" if isinstance(step, int) else "additionalProperties")
    if step in fields:
        yield fields[step]
    elif isinstance(others, dict):
        yield others


def phrase(forms: Sequence[Schema]) -> str:
    """Say what a value of one of these forms is, to complete "must be ..."."""
    return " or ".join(dict.fromkeys(map(_phrase, forms))) or "left out"


def _phrase(form: Schema) -> str:
    words = options(form)
    if True in words:
        return "on or off"
    if words:
        return " or ".join(f"'{word}'" for word in words)
    kind = form.get("type", "")
    if kind == "string":
        return str(form.get("title") or ("a path" if form.get("format") == "path" else "text"))
    if kind == "array":
        return f"a list{_lengths(form)}"
    if kind == "object":
        return "a mapping with entries" if "minProperties" in form else "a mapping"
    return f"{_NOUNS.get(kind, 'a JSON value')} {' and '.join(bounds(form))}".strip()


def _lengths(form: Schema) -> str:
    least = form.get("minItems", 0)
    if "maxItems" in form:
        return f" of {least} to {form['maxItems']} items"
    return f" of {least} or more items" if least else ""


def options(form: Schema) -> list[Any]:
    """List the values of a form that names all of them."""
    return list(form.get("enum", [form["const"]] if "const" in form else []))


def bounds(form: Schema) -> list[str]:
    """List the bounds of a number: `above 0`, `at most 1`."""
    limits = {key: form[key] for key in _BOUNDS if abs(form.get(key, NO_LIMIT)) < NO_LIMIT}
    return [f"{_BOUNDS[key]} {limit:g}" for key, limit in limits.items()]
