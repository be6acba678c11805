"""The prompts that chats become, on every route, for a model, a graph and a lazy answer."""

from typing import Any

import pytest

from shell_router.topology import Agent, Prompt, Topology
from tests.fakes.api_server import api
from tests.fakes.moa import ScriptedMoa

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
GRAPH = Topology(
    "graph", {"solo": Agent("solo", "small", (), Prompt(system="Do well.", prefix="{question}"))}
)
LATER = [
    {"role": "system", "content": "first"},
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "developer", "content": "later"},
    {"role": "user", "content": "q2"},
]


async def prompt_of(route: str, body: dict[str, Any]) -> str:
    moa = ScriptedMoa()
    async with api(moa, topologies=(GRAPH,)) as served:
        status, answer = await served.post(route, {"model": "small", **body})
        assert status == 200, answer
        if body.get("lazy"):
            marker = answer["choices"][0]["message"]["content"]
            read = await served.get(f"/v1/agent/outputs/{marker}")
            assert read[0] == 200
    return moa.prompts("small")[0].removesuffix("<assistant>")


@pytest.mark.parametrize(
    ("route", "body", "first"),
    [
        (CHAT, {"messages": LATER}, "first"),
        (CHAT, {"messages": LATER, "model": "graph"}, "Do well.\n\nfirst"),
        (CHAT, {"messages": LATER, "program": "p", "lazy": True}, "first"),
        (RESPONSES, {"input": LATER}, "first"),
        (RESPONSES, {"instructions": "first", "input": LATER[1:]}, "first"),
    ],
    ids=["chat", "graph", "lazy", "responses", "instructions"],
)
async def test_a_later_system_message_stays_where_it_is(
    route: str, body: dict[str, Any], first: str
) -> None:
    prompt = await prompt_of(route, body)
    assert prompt == f"<system>{first}<user>q1<assistant>a1<system>later<user>q2"


def parts(*texts: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


@pytest.mark.parametrize(
    ("route", "body", "prompt"),
    [
        (CHAT, {"messages": [{"role": "user", "content": parts("a", "b")}]}, "<user>a b"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": parts("a", "b", kind="input_text")}]},
            "<user>a b",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "system": parts("s", "t"),
                "messages": [{"role": "user", "content": parts("a", "b")}],
            },
            "<system>s\nt<user>a b",
        ),
    ],
    ids=["chat", "responses", "messages"],
)
async def test_parts_are_joined_as_sglang_joins_them(
    route: str, body: dict[str, Any], prompt: str
) -> None:
    assert await prompt_of(route, body) == prompt
    on_graph = await prompt_of(route, {**body, "model": "graph"})
    assert on_graph.endswith(prompt.partition("<user>")[2])


MESSAGES = "/v1/messages"
SCHEMA = "response_format.json_schema.schema"
LONG_ENUM = {"enum": [2**70]}
USER = {"role": "user", "content": "q"}
TOOLS: Any = (
    (CHAT, {"messages": [USER]}, {"type": "function", "function": {"name": "f"}}, "function.name"),
    (RESPONSES, {"input": "q"}, {"type": "function", "name": "f"}, "name"),
    (MESSAGES, {"max_tokens": 9, "messages": [USER]}, {"name": "f"}, "name"),
)


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize(("route", "body", "tool"), [row[:3] for row in TOOLS])
async def test_a_schema_of_a_tool_that_engines_misread_is_named_as_the_tools(
    route: str, body: dict[str, Any], tool: dict[str, Any]
) -> None:
    inner = tool.get("function", tool)
    inner = {**inner, "input_schema" if route == MESSAGES else "parameters": LONG_ENUM}
    tool = {**tool, "function": inner} if route == CHAT else inner
    choice: Any = {"type": "any"} if route == MESSAGES else "required"
    async with api(topologies=(GRAPH,)) as served:
        for model in ("small", "graph"):
            sent = {"model": model, **body, "tools": [tool], "tool_choice": choice}
            status, answer = await served.post(route, sent)
            assert status == 400
            assert answer["error"]["message"].startswith("tools must hold")


ASSISTANT = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (RESPONSES, {"input": [USER, ASSISTANT]}, "input[1].role"),
        (RESPONSES, {"input": [ASSISTANT]}, "input[0].role"),
        (
            RESPONSES,
            {
                "instructions": "s",
                "input": [
                    USER,
                    {"type": "reasoning", "summary": []},
                    {"type": "function_call_output", "call_id": "c", "output": "r"},
                ],
            },
            "input[2]",
        ),
        (
            RESPONSES,
            {"input": "q", "text": {"format": {"type": "json_schema", "name": "x"}}},
            "text.format.schema",
        ),
        ("/v1/messages", {"max_tokens": 9, "messages": [USER, ASSISTANT]}, "messages[1].role"),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "system": "s",
                "messages": [
                    USER,
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}],
                    },
                ],
            },
            "messages[1]",
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [USER],
                "output_config": {"format": {"type": "json_schema"}},
            },
            "output_config.format.schema",
        ),
        (CHAT, {"messages": [USER], "response_format": schema_format(LONG_ENUM)}, SCHEMA),
        (
            RESPONSES,
            {"input": "q", "text": {"format": {"type": "json_schema", "schema": LONG_ENUM}}},
            "text.format.schema",
        ),
        (
            MESSAGES,
            {
                "max_tokens": 9,
                "messages": [USER],
                "output_config": {"format": {"type": "json_schema", "schema": LONG_ENUM}},
            },
            "output_config.format.schema",
        ),
        *(
            (route, {**body, "tools": [one, one]}, f"tools[1].{name}")
            for route, body, one, name in TOOLS
        ),
        *(
            (route, {**body, "tools": [{**one, "name": "a b"}]}, "tools[0].name")
            for route, body, one, _ in TOOLS[1:]
        ),
        (
            RESPONSES,
            {
                "input": "q",
                "tools": [TOOLS[1][2]],
                "tool_choice": {"type": "function", "name": "g"},
            },
            "tool_choice.name",
        ),
        (
            MESSAGES,
            {
                **TOOLS[2][1],
                "tools": [TOOLS[2][2]],
                "tool_choice": {"type": "tool", "name": "g"},
            },
            "tool_choice.name",
        ),
        (
            RESPONSES,
            {"input": [USER, {"type": "function_call", "call_id": "c", "name": "a b"}]},
            "input[1].name",
        ),
    ],
)
async def test_an_error_names_the_field_that_the_client_sent(
    route: str, body: dict[str, Any], param: str
) -> None:
    async with api(topologies=(GRAPH,)) as served:
        for model in ("small", "graph"):
            status, answer = await served.post(route, {"model": model, **body})
            error = answer["error"]
            assert status == 400
            assert error.get("param", param) == param and param in error["message"]


@pytest.mark.parametrize("model", ["small", "graph"])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, {"messages": [USER]}),
        (RESPONSES, {"input": "q"}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 9}),
    ],
)
async def test_top_p_0_takes_the_most_probable_token_alone(
    model: str, route: str, body: dict[str, Any]
) -> None:
    moa = ScriptedMoa()
    async with api(moa, topologies=(GRAPH,)) as served:
        assert (await served.post(route, {"model": model, "top_p": 0, **body}))[0] == 200
    assert 0 < moa.engines["small"].generated[0].sampling["top_p"] < 1e-5
