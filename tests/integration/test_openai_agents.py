"""The OpenAI Agents SDK with its default model class, which asks /v1/responses: a handoff, then a tool."""

from collections.abc import Mapping
from typing import Any

import openai
import pytest

from tests.fakes.api_server import api
from tests.fakes.chat_engines import ChatScript, call, chat_pair

pytestmark = pytest.mark.slow

agents = pytest.importorskip("agents", reason="pip install openai-agents")


def hands_over_then_asks_the_weather(body: Mapping[str, Any]) -> Mapping[str, Any]:
    tools = [tool["function"]["name"] for tool in body.get("tools", ())]
    last = body["messages"][-1]
    if last["role"] == "tool" and "weather" in tools and "dry" in last["content"]:
        return {"role": "assistant", "content": "No rain."}
    return call("weather", {"city": "Paris"}, "call_2") if "weather" in tools else call(tools[0], {}, "call_1")


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_agent_hands_over_to_one_with_a_tool(streamed: bool) -> None:
    @agents.function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"dry in {city}"

    async with (
        chat_pair(ChatScript(say=hands_over_then_asks_the_weather)) as at,
        api(relays={"small": at.pair}) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as ai,
    ):
        forecaster = agents.Agent(name="forecaster", instructions="Ask the tool.", model="small", tools=[weather])
        desk = agents.Agent(name="desk", instructions="Hand over.", model="small", handoffs=[forecaster])
        config = agents.RunConfig(
            model_provider=agents.OpenAIProvider(openai_client=ai, use_responses=True), tracing_disabled=True
        )
        if streamed:
            run = agents.Runner.run_streamed(desk, "Rain in Paris?", run_config=config)
            events = [event async for event in run.stream_events()]
            assert any(event.type == "raw_response_event" for event in events)
        else:
            run = await agents.Runner.run(desk, "Rain in Paris?", run_config=config)
        assert run.final_output == "No rain."
        assert run.last_agent.name == "forecaster"
        assert [body["messages"][-1]["role"] for _, body in at.decode.sent] == ["user", "tool", "tool"]
