"""The OpenAI Agents SDK with its default model class, which asks /v1/responses: handoffs, tools,
lazy answers.
"""

import uuid
from collections.abc import Mapping
from typing import Any

import openai
import pytest

from shell_router.core.engine import Generation
from tests.fakes.api_server import Api, api
from tests.fakes.chat_engines import ChatScript, call, chat_pair
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Script

pytestmark = pytest.mark.slow

agents = pytest.importorskip("agents", reason="pip install openai-agents")


def hands_over_then_asks_the_weather(body: Mapping[str, Any]) -> Mapping[str, Any]:
    tools = [tool["function"]["name"] for tool in body.get("tools", ())]
    last = body["messages"][-1]
    if last["role"] == "tool" and "weather" in tools and "dry" in last["content"]:
        return {"role": "assistant", "content": "No rain."}
    return (
        call("weather", {"city": "Paris"}, "call_2")
        if "weather" in tools
        else call(tools[0], {}, "call_1")
    )


def moa_that_does_so() -> ScriptedMoa:
    """The roots of topologies write the same calls as text."""
    moa = ScriptedMoa(call_mark="<tool_call>")

    def root(request: Generation) -> Script:
        prompt = moa.tokenizers["large"].decode(request.input_ids)
        if "<tool weather>" not in prompt:
            return Script(
                '<tool_call>{"name": "transfer_to_forecaster", "arguments": {}}</tool_call>'
            )
        called = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
        return Script("No rain." if "dry in Paris" in prompt else called)

    moa.engines["large"].answer = root
    return moa


def asked_by(served: Api, ai: openai.AsyncOpenAI) -> Any:
    return agents.RunConfig(
        model_provider=agents.OpenAIProvider(openai_client=ai, use_responses=True),
        tracing_disabled=True,
    )


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("model", ["small", "duo"])
async def test_an_agent_hands_over_to_one_with_a_tool(model: str, streamed: bool) -> None:
    @agents.function_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"dry in {city}"

    async with (
        chat_pair(ChatScript(say=hands_over_then_asks_the_weather)) as at,
        api(moa_that_does_so(), relays={"small": at.pair}) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as ai,
    ):
        forecaster = agents.Agent(
            name="forecaster", instructions="Ask the tool.", model=model, tools=[weather]
        )
        desk = agents.Agent(
            name="desk", instructions="Hand over.", model=model, handoffs=[forecaster]
        )
        config = asked_by(served, ai)
        if streamed:
            run = agents.Runner.run_streamed(desk, "Rain in Paris?", run_config=config)
            events = [event async for event in run.stream_events()]
            assert any(event.type == "raw_response_event" for event in events)
        else:
            run = await agents.Runner.run(desk, "Rain in Paris?", run_config=config)
        assert run.final_output == "No rain."
        assert run.last_agent.name == "forecaster"
        if model == "small":
            assert [body["messages"][-1]["role"] for _, body in at.decode.sent] == [
                "user",
                "tool",
                "tool",
            ]


async def test_an_agent_whose_answer_only_others_read_is_lazy() -> None:
    async with (
        api() as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as ai,
    ):
        config, lazy = asked_by(served, ai), {"program": uuid.uuid4().hex, "lazy": True}
        solver = agents.Agent(
            name="solver", model="small", model_settings=agents.ModelSettings(extra_body=lazy)
        )
        judge = agents.Agent(name="judge", model="large")
        draft = await agents.Runner.run(solver, "Rain in Paris?", run_config=config)
        assert draft.final_output.startswith("[[lazyanswer:")
        answer = await agents.Runner.run(judge, f"Judge: {draft.final_output}", run_config=config)
        (asked,) = served.moa.engines["large"].generated
        prompt = served.moa.tokenizers["large"].decode(asked.input_ids)
        assert (
            answer.final_output
            and "Judge:" in prompt
            and "thinks" in prompt
            and "lazyanswer" not in prompt
        )
