"""The router describes its routes and their fields, as its readers and its reference page have
them.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import jsonschema
import pytest
from openai import types

from shell_router.api import messages
from shell_router.api.agents import read_agent_body
from shell_router.api.app import ROUTES
from shell_router.api.chat import KNOWN, REFUSED, read_chat
from shell_router.api.engine_chat import ENGINE_FIELDS, NOT_COMPLETED, read_completion
from shell_router.api.fields import SAMPLING, Fields
from shell_router.api.openapi import BODIES, REQUIRED
from shell_router.api.responses import STATEFUL, as_chat
from shell_router.batch.api.routes import read_batch
from shell_router.errors import InvalidField
from tests.fakes.api_server import api, chat

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
USER = {"role": "user", "content": "Hello"}


async def described() -> dict[str, Any]:
    async with api() as served:
        status, found = await served.get("/openapi.json")
        assert status == 200
        return found


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
    asked = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"][
        "application/json"
    ]["schema"]
    check = jsonschema.Draft202012Validator(asked)
    tool = {"type": "function", "function": {"name": "look"}}
    for good in (
        {},
        {"stop": "x", "temperature": 1},
        {"tools": [tool], "tool_choice": "auto"},
        {"model": ["a", "b"]},
    ):
        check.validate(chat(**good))
    for wrong in (
        {"temperature": 3},
        {"messages": []},
        {"stream": "yes"},
        {"messages": [{"role": "robot"}]},
    ):
        assert not check.is_valid(chat(**wrong)), wrong


class Recorded(dict[str, Any]):
    """An object that remembers what it was asked for."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)
        self.asked: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.asked.add(name)
        return super().get(name, default)


def asked_of(reader: Callable[[Fields], object], **fields: Any) -> set[str]:
    """The fields that `reader` asks a body for."""
    body = Recorded(**fields)
    reader(Fields(body))
    return body.asked


CHAT = BODIES["POST /v1/chat/completions"].keys()


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
    Fields(dict.fromkeys(get_type_hints(asked), 1)).check_spelling(BODIES[route])


def test_a_chat_has_the_fields_that_its_reader_knows() -> None:
    names = asked_of(lambda body: read_chat(body, "run", "me", 60.0), model="m", messages=[USER])
    of_panels = {"models", "quorum", "grace_s", "criteria"}  # read where there is one
    refused = REFUSED.keys() - ENGINE_FIELDS.keys()
    assert (names | KNOWN | of_panels | ENGINE_FIELDS.keys()) - refused == CHAT


NOT_SERVED = {
    "POST /v1/responses": {*STATEFUL},
    "POST /v1/completions": {*NOT_COMPLETED, "rid"},
}
READERS: dict[str, tuple[Callable[[Fields], object], dict[str, Any]]] = {
    "POST /v1/responses": (as_chat, {"input": "Hello", "stream": True}),
    "POST /v1/messages": (messages.as_chat, {"messages": [USER], "max_tokens": 4, "stream": True}),
    "POST /v1/completions": (lambda body: read_completion(body, "m"), {"prompt": "Hello"}),
    "POST /v1/agent/requests": (
        lambda body: read_agent_body(body, "me", 60.0),
        {"program": "p", "agent": "a", "model": "m", "prompt": "x"},
    ),
    "POST /v1/batches": (
        lambda body: read_batch(body, "b", "me", 0),
        {"input_file_id": "f", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ),
}


@pytest.mark.parametrize("route", READERS)
def test_other_bodies_have_every_field_that_their_readers_ask_for(route: str) -> None:
    reader, fields = READERS[route]
    assert asked_of(reader, **fields) - NOT_SERVED.get(route, set()) <= BODIES[route].keys()
    for name in fields.keys() & REQUIRED[route]:
        with pytest.raises(InvalidField, match=name):
            reader(Fields({key: said for key, said in fields.items() if key != name}))


@pytest.mark.parametrize(
    "route",
    ["POST /v1/chat/completions", "POST /v1/embeddings", *(READERS.keys() - {"POST /v1/batches"})],
)
def test_the_reference_page_has_every_field(route: str) -> None:
    section = re.search(
        rf"^## {re.escape(route)}\n(.*?)(?=^## )", REFERENCE.read_text(), re.DOTALL | re.MULTILINE
    )
    assert section is not None
    as_in_chats = {*SAMPLING} if "sampling fields" in section[1] else set()
    assert [
        name for name in BODIES[route] if f"`{name}" not in section[1] and name not in as_in_chats
    ] == []
