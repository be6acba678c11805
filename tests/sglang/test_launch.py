"""One file and one command give an answer from real SGLang, and nothing is left. Runs first: see
conftest.py.
"""

import os
import signal

import aiohttp
import pytest

from tests.fakes.command import running_command, survivors

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("environment")]

CONFIG = "configs/sglang-cpu.yaml"
QUESTION = {
    "model": "tree-9-3-1",
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_tokens": 12,
    "stream": True,
    "include_agents": True,
}
ENGINES_AND_THEIR_CHILDREN = 6


async def answer(url: str) -> str:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session,
        session.post(f"{url}/v1/chat/completions", json=QUESTION) as response,
    ):
        return await response.text()


def whole(events: str) -> bool:
    """Whether all 13 agents came to an end and so did the stream."""
    ended = sum(events.count(f"event: agent.{end}\n") for end in ("finished", "skipped", "stopped"))
    return ended == 13 and events.rstrip().endswith("data: [DONE]")


async def test_one_file_gives_a_streamed_tree_outlives_its_prefill_and_leaves_nothing() -> None:
    async with running_command("launch", "--config", CONFIG, "--port", "0") as command:
        url = (await command.line_with("Serving on", limit_s=400)).split()[-1]
        assert whole(await answer(url))
        os.kill(command.engine("prefill"), signal.SIGKILL)
        await command.line_with("small/prefill: ready after", limit_s=400)
        assert whole(await answer(url)), "decode took the new prefill for the old one"
        started = command.started()
        assert len(started) >= ENGINES_AND_THEIR_CHILDREN
        command.signal(signal.SIGTERM)
        code, output = await command.ended(limit_s=120)
        assert (code, survivors(started)) == (0, set()), output
