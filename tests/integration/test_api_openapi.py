"""The router describes its routes and their fields, as its readers and its reference page have
them.
"""

import re
from pathlib import Path
from typing import Any, get_type_hints

import jsonschema
import pytest
from openai import types

from shell_router.api.app import ROUTES
from shell_router.api.bodies import NATIVE_NAMES
from shell_router.api.fields import CHAT
from shell_router.api.openapi import ROUTER_BODIES as BODIES
from shell_router.core.sampling import RANGES
from shell_router.engines.native_body import GENERATE_FIELDS
from tests.fakes.api_server import api, chat

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
USER = {"role": "user", "content": "Hello"}


async def described() -> dict[str, Any]:
    async with api() as served:
        status, found = await served.get("/openapi.json")
        assert status == 200
        return found


def body_of(found: dict[str, Any], path: str, method: str) -> dict[str, Any]:
    content = found["paths"][path][method]["requestBody"]["content"]
    schema: dict[str, Any] = content["application/json"]["schema"]
    return schema


def resolved(found: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = schema["$ref"].removeprefix("#/components/schemas/")
    component: dict[str, Any] = found["components"]["schemas"][name]
    return component


async def test_every_route_is_there_with_what_it_does_and_its_parameters() -> None:
    found = await described()
    named = {
        f"{method.upper()} {path}" for path, methods in found["paths"].items() for method in methods
    }
    assert named == {f"{route.method} {route.path}" for route in ROUTES}
    operations = [one for methods in found["paths"].values() for one in methods.values()]
    assert all(one["summary"].endswith(".") for one in operations)
    assert len({one["operationId"] for one in operations}) == len(operations)
    shown = found["paths"]["/v1/agent/outputs/{marker}"]["get"]["parameters"]
    assert [(one["name"], one["in"]) for one in shown] == [("marker", "path"), ("wait_s", "query")]


async def test_keys_come_in_either_header() -> None:
    found = await described()
    schemes = found["components"]["securitySchemes"]
    assert (schemes["x-api-key"]["in"], schemes["x-api-key"]["name"]) == ("header", "x-api-key")
    assert {name for one in found["security"] for name in one} == schemes.keys()


async def test_bodies_that_are_answered_fit_and_wrong_ones_do_not() -> None:
    found = await described()
    asked = body_of(found, "/v1/chat/completions", "post")
    check = jsonschema.Draft202012Validator({**asked, "components": found["components"]})
    tool = {"type": "function", "function": {"name": "look"}}
    for good in (
        {},
        {"stop": "x", "temperature": 1},
        {"tools": [tool], "tool_choice": "auto"},
        {"model": ["a", "b"]},
    ):
        check.validate(chat(**good))
    for wrong in (
        {"temperature": -1},
        {"messages": []},
        {"stream": "yes"},
        {"messages": [{"role": "robot"}]},
    ):
        assert not check.is_valid(chat(**wrong)), wrong


@pytest.mark.parametrize(
    ("route", "asked"),
    [
        (
            "POST /v1/chat/completions",
            types.chat.completion_create_params.CompletionCreateParamsNonStreaming,
        ),
        ("POST /v1/completions", types.completion_create_params.CompletionCreateParamsNonStreaming),
        (
            "POST /v1/responses",
            types.responses.response_create_params.ResponseCreateParamsNonStreaming,
        ),
        ("POST /v1/embeddings", types.embedding_create_params.EmbeddingCreateParams),
    ],
)
def test_no_field_of_openais_client_is_taken_for_a_misspelt_one(route: str, asked: type) -> None:
    BODIES[route].find_unknown(dict.fromkeys(get_type_hints(asked), 1))


async def test_every_field_of_every_body_is_described_and_sampling_fields_with_their_ranges() -> (
    None
):
    found = await described()
    for route, body in BODIES.items():
        method, path = route.split()
        schema = resolved(found, body_of(found, path, method.lower()))
        assert schema["properties"].keys() == body.names
        for name, native in NATIVE_NAMES.items():
            if native in RANGES and name in body.names:
                limits = RANGES[native]
                described_as = schema["properties"][name]
                is_open = limits.open and native != "top_p"
                lowest = "exclusiveMinimum" if is_open else "minimum"
                least = max(limits.low, 1) if native == "max_new_tokens" else limits.low
                assert (described_as[lowest], described_as["maximum"]) == (least, limits.high)
    assert BODIES["POST /generate"].names == GENERATE_FIELDS
    embeddings = resolved(found, body_of(found, "/v1/embeddings", "post"))
    assert embeddings["required"] == ["model", "input"]


@pytest.mark.parametrize(
    "route",
    [one for one in BODIES if "/v1/" in one and not one.endswith(("engines", "tokens"))],
)
def test_the_reference_page_has_every_field(route: str) -> None:
    section = re.search(
        rf"^## {re.escape(route)}\n(.*?)(?=^## )", REFERENCE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert section is not None or "topologies" in route
    if section is not None:
        as_in_chats = {*NATIVE_NAMES} if "sampling fields" in section[1] else set()
        if "as in a chat completion" in section[1]:
            as_in_chats |= CHAT.names
        names = BODIES[route].names - as_in_chats
        assert [name for name in names if f"`{name}" not in section[1]] == []
