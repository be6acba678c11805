"""Chats that real SGLang answers itself on both servers of a pair: tools, choices, log
probabilities. The router itself answers calls that must come: see test_smollm2.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from shell_router.engines.sglang import SglangPair
from tests.fakes.api_server import api
from tests.fakes.pairs_under_test import ON_A_PAIR_AND_ON_A_SERVER

pytestmark = [pytest.mark.sglang, ON_A_PAIR_AND_ON_A_SERVER]

PARAMETERS = {
    "type": "object",
    "properties": {"wet": {"type": "boolean"}},
    "required": ["wet"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": PARAMETERS},
}
QUESTION: Any = {"role": "user", "content": "Rain?"}


@asynccontextmanager
async def client(pair: SglangPair) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        api(relays={"small": pair}) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as ai,
    ):
        yield ai


async def test_tools_are_offered_and_calls_and_results_are_read(pair: SglangPair) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    history: Any = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "dry"},
    ]
    asked: Any = {"model": "small", "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    async with client(pair) as ai:
        prompts = []
        for messages in ([QUESTION], history):
            for offered in ({}, {"tools": [WEATHER]}):
                answer = await ai.chat.completions.create(
                    messages=messages, logprobs=True, **asked, **offered
                )
                assert answer.usage is not None and answer.usage.completion_tokens == 4
                prompts.append(answer.usage.prompt_tokens)
        plain, with_tools, with_history, with_both = prompts
        assert plain < with_tools < with_both and plain < with_history < with_both


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
        response = await ai.responses.create(
            model="small", input="Rain?", max_output_tokens=16, tools=[tool]
        )
        assert [item.type for item in response.output] == ["message"]
        assert response.usage is not None and response.usage.output_tokens > 0


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
