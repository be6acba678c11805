"""Chats that real SGLang answers itself on both servers of a pair: forced tool calls, choices, log
probabilities.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import orjson
import pytest

from shell_router.engines.sglang import SglangPair
from tests.fakes.api_server import api

pytestmark = pytest.mark.sglang

PARAMETERS = {
    "type": "object",
    "properties": {"wet": {"type": "boolean"}},
    "required": ["wet"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": PARAMETERS, "strict": True},
}
QUESTION: Any = {"role": "user", "content": "Rain?"}


@asynccontextmanager
async def client(pair: SglangPair) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        api(relays={"small": pair}) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as ai,
    ):
        yield ai


async def test_a_forced_call_is_a_call_whole_and_streamed(pair: SglangPair) -> None:
    asked: Any = {
        "model": "small",
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_tokens": 1000,
    }
    asked["frequency_penalty"] = 2  # or random weights might write nothing but white space
    async with client(pair) as ai:
        answer = await ai.chat.completions.create(messages=[QUESTION], **asked)
        calls = answer.choices[0].message.tool_calls
        assert calls and calls[0].type == "function" and answer.model == "small"
        assert isinstance(orjson.loads(calls[0].function.arguments)["wet"], bool)
        stream = await ai.chat.completions.create(messages=[QUESTION], stream=True, **asked)
        deltas = [
            one
            for chunk in [c async for c in stream]
            for choice in chunk.choices
            for one in choice.delta.tool_calls or ()
        ]
        arguments = "".join(one.function.arguments or "" for one in deltas if one.function)
        assert isinstance(orjson.loads(arguments)["wet"], bool)
        result: Any = {"role": "tool", "tool_call_id": calls[0].id, "content": "dry"}
        history = [QUESTION, answer.choices[0].message.model_dump(exclude_none=True), result]
        answer = await ai.chat.completions.create(model="small", messages=history, max_tokens=4)
        assert answer.usage is not None and answer.usage.completion_tokens == 4


async def test_its_parser_finds_calls_in_a_text(pair: SglangPair) -> None:
    assert pair.tool_parser in ("qwen", "qwen25")  # SGLang says either
    called = '<tool_call>\n{"name": "weather", "arguments": {"wet": true}}\n</tool_call>'
    assert await pair.parse_calls(f"I look.\n{called}", [WEATHER]) == (
        "I look.",
        [{"name": "weather", "arguments": {"wet": True}}],
    )
    assert await pair.parse_calls("Dry.", [WEATHER]) == ("Dry.", [])


async def test_choices_and_log_probabilities(pair: SglangPair) -> None:
    async with client(pair) as ai:
        asked: Any = {
            "model": "small",
            "messages": [QUESTION],
            "max_tokens": 3,
            "n": 2,
            "logprobs": True,
        }
        answer = await ai.chat.completions.create(
            top_logprobs=2, extra_body={"ignore_eos": True}, **asked
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        for choice in answer.choices:
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert [len(one.top_logprobs) for one in choice.logprobs.content] == [2, 2, 2]


async def test_prompts_are_completed_and_responses_translated(pair: SglangPair) -> None:
    async with client(pair) as ai:
        asked: Any = {"model": "small", "max_tokens": 3, "extra_body": {"ignore_eos": True}}
        answers = [
            await ai.completions.create(prompt=prompt, **asked) for prompt in ("Once", [5, 6, 7])
        ]
        assert [answer.usage.completion_tokens for answer in answers if answer.usage] == [3, 3]
        tool: Any = {"type": "function", **WEATHER["function"]}
        forced: Any = {
            "tools": [tool],
            "tool_choice": "required",
            "extra_body": {"frequency_penalty": 2},
        }
        response = await ai.responses.create(
            model="small", input="Rain?", max_output_tokens=1000, **forced
        )
        assert [item.type for item in response.output if item.type != "message"] == [
            "function_call"
        ]


async def held(pair: SglangPair) -> int:
    return sum([(await server.report()).running for server in pair.fleet.servers])


async def test_a_client_that_leaves_ends_its_chats_on_both_servers(pair: SglangPair) -> None:
    async with client(pair) as ai:
        asked: Any = {
            "model": "small",
            "messages": [QUESTION],
            "n": 2,
            "max_tokens": 20_000,
            "stream": True,
        }
        async with await ai.chat.completions.create(
            extra_body={"ignore_eos": True}, **asked
        ) as stream:
            await anext(stream)
            while await held(pair) < 2:  # SGLang tells its load every 15 steps of its decoding
                await anext(stream)
    async with asyncio.timeout(30):
        while await held(pair):  # noqa: ASYNC110 - the engine is another process
            await asyncio.sleep(0)
