"""Prompts that the router renders are, token by token, those of SGLang's own chats."""

from typing import Any

import aiohttp
import pytest

from shell_router.engines.tokenizer import HfTokenizer
from shell_router.moa.calls import add_sglang_nulls
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
