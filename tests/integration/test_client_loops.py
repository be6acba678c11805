"""Client programs that run tools for a root, step by step, and for several agents at once."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from shell_router.topology import parse_topology
from tests.fakes.api_server import api
from tests.fakes.tool_loops import ANSWER, CALLERS, calling, calling_below, ran

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # the clients' own warnings are theirs
]

NAME = "tree-9-3-1"
FILE = Path(__file__).parents[2] / "topologies" / f"{NAME}.yaml"
SHIPPED = parse_topology(FILE.read_text(encoding="utf-8"), source=FILE.name)
QUESTION = "How is it?"
SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}

Look = Callable[[int], str]
Client = Callable[[str, Look], Awaitable[object]]


async def openai_python(url: str, look: Look) -> object:
    tool: Any = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai:
        while True:
            answer = await ai.chat.completions.create(model=NAME, messages=messages, tools=[tool])
            message = answer.choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message)
            for call in message.tool_calls:
                result = look(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def openai_agents(url: str, look: Look) -> object:
    agents = pytest.importorskip("agents", reason="pip install openai-agents")
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai:
        provider = agents.OpenAIProvider(openai_client=ai, use_responses=True)
        agent = agents.Agent(name="looker", model=NAME, tools=[agents.function_tool(look)])
        config = agents.RunConfig(model_provider=provider, tracing_disabled=True)
        return (await agents.Runner.run(agent, QUESTION, run_config=config)).final_output


async def langgraph(url: str, look: Look) -> object:
    langchain_openai = pytest.importorskip(
        "langchain_openai", reason="pip install langchain-openai"
    )
    prebuilt = pytest.importorskip("langgraph.prebuilt", reason="pip install langgraph")
    model = langchain_openai.ChatOpenAI(
        model=NAME, base_url=f"{url}/v1", api_key="none", max_retries=0
    )
    agent = prebuilt.create_react_agent(model, [look])
    return (await agent.ainvoke({"messages": [("user", QUESTION)]}))["messages"][-1].content


async def anthropic(url: str, look: Look) -> object:
    sdk = pytest.importorskip("anthropic", reason="pip install anthropic")
    tool = {"name": "look", "input_schema": SCHEMA}
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with sdk.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as ai:
        while True:
            answer = await ai.messages.create(
                model=NAME, max_tokens=64, messages=messages, tools=[tool]
            )
            if answer.content[-1].type == "text":
                return answer.content[-1].text
            results = [
                {"type": "tool_result", "tool_use_id": used.id, "content": look(**used.input)}
                for used in answer.content
                if used.type == "tool_use"
            ]
            messages += [
                {"role": "assistant", "content": answer.content},
                {"role": "user", "content": results},
            ]


CLIENTS = (openai_python, openai_agents, langgraph, anthropic)


@pytest.mark.parametrize("fan_out, runs", [("turn", 12 + 5), ("request", 5 * 13)])
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
async def test_five_steps_of_a_client_take_seventeen_agent_runs(
    client: Client, fan_out: Any, runs: int
) -> None:
    looked: list[int] = []

    def look(at: int) -> str:
        """Look at something."""
        looked.append(at)
        return f"seen {len(looked)}"

    tree = replace(SHIPPED, fan_out=fan_out)
    async with api(calling(), topologies=(tree,)) as served:
        assert await client(served.url, look) == ANSWER
        assert looked == 4 * [1]
        assert ran(served.moa) == runs


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
async def test_a_client_runs_the_calls_of_two_agents_and_then_of_their_root(client: Client) -> None:
    looked: list[int] = []

    def look(at: int) -> str:
        """Look at something."""
        looked.append(at)
        return f"seen {len(looked)}"

    async with api(calling_below(), topologies=(CALLERS,)) as served:
        assert await client(served.url, look) == ANSWER
        assert looked == 3 * [1]
        assert ran(served.moa) == 2 + 3 + 1
