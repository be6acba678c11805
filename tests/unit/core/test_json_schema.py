"""Schemas that move into others, and that are closed, by what jsonschema accepts of them."""

import json
from typing import Any

import jsonschema
import pytest

from shell_router.core.json_schema import close_objects, move_schema

CITY: dict[str, Any] = {"enum": ["Bonn"]}


def needing(reference: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"$ref": reference}}, "required": ["a"], **more}


SCHEMAS: dict[str, Any] = {
    "$defs": needing("#/$defs/A", **{"$defs": {"A": CITY}}),
    "definitions": needing("#/definitions/A", definitions={"A": CITY}),
    "an escaped name": needing("#/$defs/a~1b", **{"$defs": {"a/b": CITY}}),
    "a property": needing(
        "#/properties/b", properties={"a": {"$ref": "#/properties/b"}, "b": CITY}
    ),
    "a place in an array": needing("#/anyOf/0", anyOf=[{"properties": {"a": CITY}}, True]),
    "an anchor": needing("#city", **{"$defs": {"A": {**CITY, "$anchor": "city"}}}),
    "below $id": needing("#/$defs/A", **{"$id": "https://x.example/t", "$defs": {"A": CITY}}),
    "by its $id": needing(
        "https://x.example/t#/$defs/A", **{"$id": "https://x.example/t", "$defs": {"A": CITY}}
    ),
    "a part with an $id": needing(
        "part", **{"$id": "https://x.example/t", "$defs": {"A": {"$id": "part", **CITY}}}
    ),
    "in a part with an $id": needing(
        "#/$defs/A",
        **{"$defs": {"A": {"$id": "urn:a", "$ref": "#/$defs/B", "$defs": {"B": CITY}}}},
    ),
    "itself": {"enum": ["Bonn", {"a": "Bonn"}], "properties": {"a": {"$ref": "#"}}},
    "names of keywords": {
        "properties": {"a": {"$ref": "#/properties/enum"}, "enum": CITY, "$ref": CITY, "$id": CITY}
    },
    "a boolean": True,
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_a_moved_schema_accepts_what_it_accepted_before(schema: Any) -> None:
    moved = {"$ref": "#/$defs/s", "$defs": {"s": move_schema(schema, "#/$defs/s"), "A": False}}
    before = jsonschema.Draft202012Validator(schema)
    after = jsonschema.Draft202012Validator(moved)
    values: list[Any] = [{"a": "Bonn"}, {"a": "Rome"}, {"$ref": "#"}, {"a": {"a": "Bonn"}}, "Bonn"]
    assert before.is_valid(values[0])
    for value in values:
        assert after.is_valid(value) == before.is_valid(value), value


@pytest.mark.parametrize("reference", ["https://elsewhere.example/s", "http://["])
def test_a_reference_to_nothing_in_the_schema_stays(reference: str) -> None:
    schema = needing(reference)
    assert move_schema(schema, "#/$defs/s") == schema


@pytest.mark.parametrize("no_url", [{"$id": "http://["}, {"$ref": "http://["}])
def test_what_is_no_url_stays_beside_ids(no_url: dict[str, str]) -> None:
    moved = move_schema({"$id": "https://example.com/s", "$defs": {"a": no_url}}, "#")
    assert moved["$defs"]["a"].get("$ref") == no_url.get("$ref")


OPEN: dict[str, Any] = {
    "an object": {"properties": {"a": CITY}, "required": ["a"]},
    "a definition": needing("#/$defs/A", **{"$defs": {"A": {"properties": {"b": CITY}}}}),
    "one of several": {"anyOf": [{"type": "null"}, {"properties": {"a": CITY}}]},
    "an item": {"items": {"properties": {"a": CITY}}},
    "a value of a map": {"additionalProperties": {"properties": {"a": CITY}}},
    "a property named like a keyword": {"properties": {"a": CITY, "properties": CITY}},
}
FOREIGN: dict[str, Any] = {
    "a definition": {"a": {"b": "Bonn", "c": 1}},
    "an item": [{"a": "Bonn", "c": 1}],
    "a value of a map": {"c": {"a": "Bonn", "c": 1}},
}


@pytest.mark.parametrize("name", OPEN)
def test_a_closed_schema_takes_no_properties_that_it_does_not_name(name: str) -> None:
    value = FOREIGN.get(name, {"a": "Bonn", "c": 1})
    closed = jsonschema.Draft202012Validator(close_objects(OPEN[name]))
    assert jsonschema.Draft202012Validator(OPEN[name]).is_valid(value)
    assert not closed.is_valid(value)
    named = json.loads(json.dumps(value).replace(', "c": 1', ""))
    assert closed.is_valid(named)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {"a": CITY}, "additionalProperties": True},
        {"properties": {"a": CITY}, "additionalProperties": {"type": "integer"}},
        {"properties": {"a": CITY}, "patternProperties": {"^c": True}},
        {"properties": {"a": CITY}, "required": ["a", "c"]},
        {"properties": {"a": CITY}, "minProperties": 2},
        {"allOf": [{"properties": {"a": CITY}}, {"properties": {"c": {"type": "integer"}}}]},
        {"properties": {"a": CITY}, "anyOf": [{"properties": {"c": {"type": "integer"}}}]},
        {"required": ["c"], "anyOf": [{"properties": {"a": CITY}}]},
        {"properties": {"a": CITY}, "$ref": "#/$defs/C", "$defs": {"C": {"required": ["c"]}}},
        True,
    ],
    ids=str,
)
def test_a_schema_that_may_need_other_properties_goes_on_taking_them(schema: Any) -> None:
    value = {"a": "Bonn", "c": 1}
    assert jsonschema.Draft202012Validator(close_objects(schema)).is_valid(value)
