"""The official OpenAI client gets answers, streams, lists and errors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest

from shell_router.api import ApiSettings
from shell_router.core.marks import ReasoningMarks
from shell_router.errors import EngineStalled
from tests.fakes.api_server import Api, api, chat
from tests.fakes.moa import ScriptedMoa
from tests.fakes.scripted_engine import Script

ROOT_SAYS = "root thinks and root speaks and then root is done"


@asynccontextmanager
async def client(served: Api, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key=key, max_retries=0
    ) as connected:
        yield connected


async def test_it_gets_an_answer_from_a_tree_with_usage_over_all_agents() -> None:
    async with api() as served, client(served) as ai:
        answer = await ai.chat.completions.create(**chat())
        assert answer.choices[0].message.content == ROOT_SAYS
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None and answer.usage.completion_tokens == 30
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 30


async def test_it_gets_an_answer_straight_from_a_model() -> None:
    async with api() as served, client(served) as ai:
        answer = await ai.chat.completions.create(**chat(model="small"))
        assert answer.choices[0].message.content == ROOT_SAYS.replace("root", "small")
        assert len(served.moa.engines["small"].generated) == 1


async def test_it_reads_a_stream_to_the_same_text() -> None:
    async with api() as served, client(served) as ai:
        stream = await ai.chat.completions.create(
            stream=True, stream_options={"include_usage": True}, **chat()
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == ROOT_SAYS
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 30


async def test_it_steps_over_agent_events_and_can_look_at_them() -> None:
    async with api() as served, client(served) as ai:
        stream = await ai.chat.completions.create(
            stream=True, extra_body={"include_agents": True}, **chat()
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        events = [chunk.model_extra["agent_event"] for chunk in chunks if not chunk.choices]
        assert text == ROOT_SAYS
        assert {"agent.started", "agent.prefill", "agent.tokens", "agent.finished"} <= {
            e["type"] for e in events
        }


async def test_it_raises_when_a_stream_fails_after_its_head() -> None:
    scripts = {
        "root": Script("a b c d e f", error=EngineStalled("nothing came for 60 s."), error_after=1)
    }
    async with api(ScriptedMoa(scripts)) as served, client(served) as ai:
        stream = await ai.chat.completions.create(stream=True, **chat())
        with pytest.raises(openai.APIError, match="nothing came"):
            async for _ in stream:
                pass


async def test_it_lists_models_of_both_kinds() -> None:
    async with api() as served, client(served) as ai:
        kinds = {model.id: model.kind async for model in ai.models.list()}  # type: ignore[attr-defined]
        assert kinds["duo"] == "topology" and kinds["small"] == "model"
        assert (await ai.models.retrieve("duo")).id == "duo"


async def test_it_raises_its_own_errors() -> None:
    async with api(settings=ApiSettings(keys={"me": "sk-1"})) as served:
        async with client(served, "sk-2") as ai:
            with pytest.raises(openai.AuthenticationError):
                await ai.models.list()
        async with client(served, "sk-1") as ai:
            with pytest.raises(openai.NotFoundError, match="Known: auto, duo"):
                await ai.chat.completions.create(**chat(model="missing"))
            with pytest.raises(openai.BadRequestError, match="temperature must be"):
                await ai.chat.completions.create(temperature=-1, **chat())


async def test_it_gets_thinking_apart_from_the_answer() -> None:
    moa = ScriptedMoa(
        {"root": Script("<think>\nmaybe so</think>\n\nIt is.", piece_words=1)},
        reasoning=ReasoningMarks(),
    )
    async with api(moa) as served, client(served) as ai:
        whole = await ai.chat.completions.create(**chat())
        message = whole.choices[0].message
        assert (message.content, message.model_extra) == (
            "It is.",
            {"reasoning_content": "maybe so"},
        )
        details = whole.usage and whole.usage.completion_tokens_details
        assert details is not None and details.reasoning_tokens
        for include_agents in (False, True):
            body = chat() | {"extra_body": {"include_agents": include_agents}}
            stream = await ai.chat.completions.create(stream=True, **body)
            deltas = [choice.delta async for chunk in stream for choice in chunk.choices]
            assert "".join(delta.content or "" for delta in deltas) == "It is."
            assert (
                "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
                == "maybe so"
            )


async def test_it_gets_calls_of_tools_behind_the_text_before_them() -> None:
    said = 'I look. <tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "look"}}]
    async with (
        api(ScriptedMoa({"root": said}, call_mark="<tool_call>")) as served,
        client(served) as ai,
    ):
        for model in ("duo", "small"):
            if model == "small":
                served.moa.engines["small"].answer = lambda _request: Script(said, piece_words=1)
            whole = (await ai.chat.completions.create(tools=tools, **chat(model=model))).choices[0]  # type: ignore[call-overload]
            async with ai.chat.completions.stream(tools=tools, **chat(model=model)) as stream:  # type: ignore[arg-type]
                async for _ in stream:
                    pass
                streamed = (await stream.get_final_completion()).choices[0]
            for choice in (whole, streamed):
                (call,) = choice.message.tool_calls or []
                assert (call.function.name, call.function.arguments) == ("look", '{"at":"it"}')
                assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look. ")
