"""Prompts that the router renders are, token by token, those of SGLang's own chats."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio

from shell_router.core.engine import Finish, Generation, Prefilled, ServedModel, Tokens
from shell_router.core.marks import CALL_MARKS
from shell_router.engines.sglang import SglangPair
from shell_router.engines.tokenizer import HfTokenizer
from shell_router.moa.calls import add_sglang_nulls
from tests.fakes.api_server import Api, api
from tests.fakes.moa import ScriptedMoa
from tests.fakes.pairs_under_test import PairUnderTest

pytestmark = pytest.mark.sglang

FUNCTION = {
    "name": "weather",
    "description": "How it is.",
    "parameters": {"type": "object", "properties": {"ä": {}}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": function}
    for function in (FUNCTION, FUNCTION | {"name": "rain", "strict": False}, {"name": "time"})
]
CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "weather", "arguments": {"ä": "Bö<nn>"}},
}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I look."},
    {"role": "tool", "content": "Rain.", "tool_call_id": "c"},
]


@pytest.mark.parametrize("messages", [TALK[:2], TALK], ids=["question", "result"])
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize(
    "options", [{}, {"enable_thinking": False}], ids=["thinking", "not thinking"]
)
async def test_it_has_the_same_tokens(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    options: dict[str, Any],
    real_sglang: PairUnderTest,
    session: aiohttp.ClientSession,
) -> None:
    body: dict[str, Any] = {"model": "x", "messages": messages, "chat_template_kwargs": options}
    async with session.post(
        f"{real_sglang.address.decode_url}/tokenize",
        json=body | ({"tools": tools} if tools else {}),
    ) as answer:
        theirs = await answer.json()
    tokenizer = HfTokenizer.from_folder(real_sglang.needs_model())
    shown = [add_sglang_nulls(tool) for tool in tools]
    assert theirs["tokens"] == tokenizer.encode(tokenizer.render_chat(messages, shown, options)), (
        theirs
    )


class PromptReader:
    """An engine that keeps the prompts of its requests."""

    def __init__(self, pair: SglangPair) -> None:
        self._pair = pair
        self.prompts: list[list[int]] = []

    def generate(self, request: Generation) -> AsyncGenerator[Tokens | Finish, None]:
        """Keep the prompt, and have the pair answer."""
        self.prompts.append(list(request.input_ids))
        return self._pair.generate(request)

    async def prefill(self, request: Generation) -> Prefilled:
        """Have the pair prefill."""
        return await self._pair.prefill(request)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


WRITTEN = {**CALL, "function": {"name": "weather", "arguments": '{"ä": "Bö<nn>"}'}}
CALLED = [
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": None, "tool_calls": [WRITTEN]},
]
ANSWERED = [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}]
QUESTION = {"role": "user", "content": "q2"}
LATER = {"role": "system", "content": "Be brief."}
CHATS: dict[str, dict[str, Any]] = {
    "question": {"messages": [QUESTION]},
    "system first": {"messages": [LATER, QUESTION]},
    "system twice": {"messages": [LATER, {**LATER, "content": "Be kind."}, QUESTION]},
    "later system": {"messages": [LATER, *ANSWERED, {**LATER, "content": "Be kind."}, QUESTION]},
    "parts": {"messages": [{"role": "user", "content": parts("Is it?", "Yes or no.")}]},
    "parts of all": {
        "messages": [
            {"role": "system", "content": parts("Be", "brief.")},
            {"role": "user", "content": parts("q1")},
            {"role": "assistant", "content": parts("a1", "so")},
            QUESTION,
        ]
    },
    "tools": {"messages": [QUESTION], "tools": TOOLS},
    "result": {
        "messages": [*CALLED, {"role": "tool", "content": "Rain.", "tool_call_id": "c"}],
        "tools": TOOLS,
    },
    "result in parts": {
        "messages": [*CALLED, {"role": "tool", "content": parts("a", "b"), "tool_call_id": "c"}],
        "tools": TOOLS,
    },
    "thinking": {
        "messages": [
            {"role": "user", "content": "q1"},
            {"role": "assistant", "content": "a1", "reasoning_content": "I think."},
            QUESTION,
        ]
    },
    "no thinking": {"messages": [QUESTION], "chat_template_kwargs": {"enable_thinking": False}},
}


@pytest_asyncio.fixture
async def read_prompts(
    real_sglang: PairUnderTest, pair: SglangPair
) -> AsyncIterator[tuple[Api, PromptReader]]:
    """The router before a plain model, and the prompts that its engine gets."""
    moa = ScriptedMoa()
    reader = PromptReader(pair)
    moa.models["small"] = ServedModel(
        "small",
        reader,
        HfTokenizer.from_folder(real_sglang.needs_model()),
        real_sglang.context_length,
        call_mark=CALL_MARKS["hermes"],
        call_parser=pair,
    )
    async with api(moa) as served:
        yield served, reader


@pytest.mark.parametrize("chat", CHATS)
async def test_a_plain_models_prompt_is_that_of_sglangs_own_chat(
    chat: str, read_prompts: tuple[Api, PromptReader], pair: SglangPair
) -> None:
    served, reader = read_prompts
    body = {"model": "small", "max_tokens": 1, **CHATS[chat]}
    status, answer = await served.post("/v1/chat/completions", body)
    assert status == 200, answer
    field = "return_prompt_token_ids"
    sent = orjson.dumps({**body, field: True})
    async with pair.forward("v1/chat/completions", sent, fields=[field]) as relayed:
        theirs = orjson.loads(b"".join([chunk async for chunk in relayed.chunks]))
    assert reader.prompts == [theirs["choices"][0]["prompt_token_ids"]]


async def test_an_image_is_refused_before_a_prompt_is_made(
    read_prompts: tuple[Api, PromptReader],
) -> None:
    served, reader = read_prompts
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    message = {"role": "user", "content": [*parts("What?"), image]}
    status, _ = await served.post(
        "/v1/chat/completions", {"model": "small", "messages": [message], "max_tokens": 1}
    )
    assert (status, reader.prompts) == (400, [])
