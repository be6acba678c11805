"""A deployment of an embedded pair whose model thinks and calls tools, as the official client sees
it.
"""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from shell_router.app import serve_deployment
from shell_router.config import Config, EmbedderSettings, Listen, ModelSettings, PairSettings
from shell_router.standins.embedded.settings import EmbeddedSettings
from tests.fakes.shared_engines import SharedEngines
from tests.fakes.thinking_model import with_template

pytestmark = pytest.mark.asyncio(loop_scope="module")
TREE = """
name: tree
agents:
  left: {model: thinker, max_thinking_tokens: 4}
  right: {model: plain}
  root: {model: plain, precursors: [left, right]}
defaults: {sampling: {max_new_tokens: 12, temperature: 0}}
"""
CITY = {"type": "string", "enum": ["Bonn", "Kyoto"]}
WEATHER = {
    "name": "weather",
    "description": "How it is outside.",
    "parameters": {
        "type": "object",
        "properties": {"city": CITY},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [{"type": "function", "function": WEATHER}]
ASKED: Any = [{"role": "user", "content": "How is the weather?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ai(
    engines: SharedEngines, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[openai.AsyncOpenAI]:
    folder = tmp_path_factory.mktemp("deployment")
    model = engines.model(architecture="qwen3", seed=5)
    settings = EmbeddedSettings(
        str(model), dtype="float64", chunked_prefill_size=64, max_running_requests=12
    )
    at = engines.pair(settings).address
    pairs = (PairSettings(at.prefill_url, at.decode_url, at.bootstrap_port, at.bootstrap_host),)
    plain, thinker = (Path(shutil.copytree(model, folder / name)) for name in ("plain", "thinker"))
    models = {
        "plain": ModelSettings(with_template(plain), pairs=pairs, tool_call_parser="hermes"),
        "thinker": ModelSettings(
            with_template(thinker, "<think>\n"),
            pairs=pairs,
            reasoning_parser="qwen3",
            tool_call_parser="hermes",
        ),
    }
    (folder / "tree.yaml").write_text(TREE, encoding="utf-8")
    config = Config(
        models,
        embedder=EmbedderSettings("none"),
        listen=Listen(port=0),
        topologies=(folder / "tree.yaml",),
    )
    async with (
        serve_deployment(config) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as connected,
    ):
        yield connected


@pytest.mark.parametrize("model", ["plain", "thinker", "tree"])
async def test_a_forced_call_has_the_arguments_that_its_schema_asks_for(
    model: str, ai: openai.AsyncOpenAI
) -> None:
    asked: Any = {
        "model": model,
        "messages": ASKED,
        "tools": TOOLS,
        "tool_choice": "required",
        "seed": 3,
    }
    asked |= {
        "parallel_tool_calls": False,
        "max_tokens": 120,
        "extra_body": {"max_thinking_tokens": 6},
    }
    if model != "thinker":
        del asked["extra_body"]
    whole = await ai.chat.completions.create(**asked)
    message = whole.choices[0].message
    (call,) = message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Bonn", "Kyoto")
    assert (whole.choices[0].finish_reason, message.content) == ("tool_calls", None)
    assert ("reasoning_content" in (message.model_extra or {})) == (model == "thinker")

    async with ai.chat.completions.stream(**asked) as stream:
        async for _ in stream:
            pass
        streamed = (await stream.get_final_completion()).choices[0]
    (again,) = streamed.message.tool_calls or []
    assert (streamed.finish_reason, again.function.arguments) == (
        "tool_calls",
        call.function.arguments,
    )

    said = message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    after = await ai.chat.completions.create(
        model=model, messages=[*ASKED, said, result], tools=TOOLS, max_tokens=8, seed=3
    )
    assert after.choices[0].finish_reason in ("length", "stop")


async def test_a_loop_of_calls_finds_the_roots_prompt_cached(ai: openai.AsyncOpenAI) -> None:
    messages = [*ASKED]
    before = 0
    for _ in range(4):
        answer = await ai.chat.completions.create(
            model="tree",
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            max_tokens=120,
            extra_body={"include_agents": True},
        )
        agents: Any = (answer.model_extra or {})["agents"]
        assert agents["root"]["cached_tokens"] >= before
        before = agents["root"]["prompt_tokens"]
        kept = {agents[name]["state"] for name in ("left", "right")}
        assert kept == ({"kept"} if len(messages) > 1 else {"finished"})
        message: Any = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        ids = [call.id for call in message.tool_calls]
        messages += [{"role": "tool", "tool_call_id": id, "content": "Rain."} for id in ids]


async def test_an_answer_in_a_schema_follows_the_thinking(ai: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": CITY},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = await ai.chat.completions.create(
        model="thinker",
        messages=ASKED,
        max_tokens=80,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema},
        },
        extra_body={"max_thinking_tokens": 5},
    )
    assert json.loads(answer.choices[0].message.content or "")["city"] in ("Bonn", "Kyoto")
    details = answer.usage and answer.usage.completion_tokens_details
    assert (
        details is not None
        and details.reasoning_tokens is not None
        and details.reasoning_tokens >= 5
    )


class Visit(BaseModel, extra="forbid"):
    city: Literal["Bonn", "Kyoto"]


@pytest.mark.parametrize("model", ["plain", "tree"])
async def test_chats_and_responses_have_their_schema_whole_and_streamed(
    model: str, ai: openai.AsyncOpenAI
) -> None:
    chat: Any = {
        "model": model,
        "messages": ASKED,
        "response_format": Visit,
        "max_tokens": 60,
        "temperature": 0,
    }
    response: Any = {
        "model": model,
        "input": ASKED,
        "text_format": Visit,
        "max_output_tokens": 60,
        "temperature": 0,
    }
    whole = (await ai.chat.completions.parse(**chat)).choices[0].message
    async with ai.chat.completions.stream(**chat) as chunks:
        pieces = [event.delta async for event in chunks if event.type == "content.delta"]
        streamed = (await chunks.get_final_completion()).choices[0].message
    async with ai.responses.stream(**response) as events:
        deltas = [
            event.delta async for event in events if event.type == "response.output_text.delta"
        ]
        ended = await events.get_final_response()
    assert isinstance(whole.parsed, Visit)
    assert (
        whole.parsed
        == streamed.parsed
        == ended.output_parsed
        == (await ai.responses.parse(**response)).output_parsed
    )
    assert whole.content == "".join(pieces) == "".join(deltas)


async def test_a_schema_that_cannot_be_followed_is_a_bad_request(ai: openai.AsyncOpenAI) -> None:
    asked: Any = {
        "model": "plain",
        "messages": ASKED,
        "extra_body": {"json_schema": '{"type": "strin"}'},
    }
    with pytest.raises(openai.BadRequestError, match="Invalid type: strin"):
        await ai.chat.completions.create(**asked)
    stream = await ai.chat.completions.create(stream=True, **asked)
    with pytest.raises(openai.APIError, match="Invalid type: strin"):
        await anext(aiter(stream))


async def test_thinking_is_cut_or_turned_off_by_the_request(ai: openai.AsyncOpenAI) -> None:
    cut = await ai.chat.completions.create(model="thinker", messages=ASKED, max_tokens=9)
    assert (cut.choices[0].finish_reason, cut.choices[0].message.content) == ("length", "")
    assert (cut.choices[0].message.model_extra or {})["reasoning_content"]
    with pytest.raises(openai.BadRequestError, match="chat_template_kwargs sets 'messages'"):
        await ai.chat.completions.create(
            model="plain", messages=ASKED, extra_body={"chat_template_kwargs": {"messages": []}}
        )
