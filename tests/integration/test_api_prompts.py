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
